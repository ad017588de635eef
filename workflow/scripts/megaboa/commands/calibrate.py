"""Measure this machine for predictions of step times: its GPUs or, if there are none, its processors.

It takes three minutes and writes calibrations/<GPU>.json, which `advise`, preflight and the report then use instead of
the shipped calibration. On several nodes (--run, or torchrun with a process for each GPU) it measures the network too.
Needs Bridge, and on GPUs Transformer Engine for FP8 and experts.
"""

import argparse
import os
import socket
import subprocess
import sys
import time
import warnings
from pathlib import Path

from megaboa import commands, records
from megaboa.check import calibration
from megaboa.launch import networks
from megaboa.paths import RunFolder
from megaboa.run import converters
from megaboa.scheduler import adopt_rank


def main(words: list[str]) -> int:
    parser = commands.parser("calibrate", __doc__)
    parser.add_argument("--gpus", type=int, help="how many of this machine; default: all")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--out", type=Path, help=f"default: {calibration.FOLDER}/<GPU>.json")
    parser.add_argument("--run", type=Path, metavar="RUN.json", help="measure with this run's ranks, on its nodes")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args(words)
    if arguments.run and not arguments.out:
        parser.error("--run needs --out")
    if arguments.run:
        return _ranks_of(RunFolder(arguments.run.parent), arguments.out)
    if arguments.rank:
        adopt_rank()
    if arguments.rank or "RANK" in os.environ:
        return _rank(arguments)
    import torch

    has_gpus = torch.cuda.is_available() if arguments.device == "auto" else arguments.device == "cuda"
    there = torch.cuda.device_count()
    if has_gpus and not there:
        parser.error("--device: cuda, and this machine has no GPU")
    ranks = arguments.gpus if arguments.gpus is not None else (there if has_gpus else 2)
    if ranks < 1 or (has_gpus and ranks > there):
        parser.error(f"--gpus: {ranks}" + (f", and this machine has {there}" if has_gpus else ": at least 1"))
    return _start(words, ranks, "cuda" if has_gpus else "cpu")


def _ranks_of(run: RunFolder, out: Path) -> int:
    """As the ranks of training: by the scheduler, on all nodes of the job, in the image."""
    launch = run.launch
    words = [str(commands.MEGABOA), "calibrate", "--rank", f"--device={run.run.device}", f"--out={out}"]
    words += [f"--gpus={launch.gpus_per_node}"]
    logs = out.with_suffix(".ranks")
    print(converters.to_the_end(launch, run.run.device, run.image, run.run.world_size, words, logs), end="")
    measured = records.read(records.Calibration, out)
    calibration.FOLDER.mkdir(exist_ok=True)
    records.write(calibration.FOLDER / f"{measured.gpu}.json", measured)
    print(_used(measured.gpu, launch.gpu))
    return 0


def _used(measured: str, asked: str | None) -> str:
    """Which predictions take the measured GPU's file; `asked` is the run's `resources.gpu`."""
    file = calibration.FOLDER / f"{measured}.json"
    kind, _, memory = (asked or "").partition("-")
    if kind in ("", measured):
        return f"predictions in this folder are made with {file} from now on"
    return (
        f"resources.gpu: {asked}, and the GPUs are of the kind {measured}: "
        f"with {measured}-{memory} predictions are made with {file}, with {asked} they are not"
    )


def _start(words: list[str], ranks: int, device: str) -> int:
    """A process for each rank of this machine; the first that fails ends the others."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    command = [sys.executable, str(commands.MEGABOA), "calibrate", *words, "--device", device]
    workers = []
    for rank in range(ranks):
        own = {name: str(value) for name, value in {**shared, "RANK": rank, "LOCAL_RANK": rank}.items()}
        workers.append(subprocess.Popen(command, env={**networks.GROUPED_PRODUCTS, **os.environ, **own}))
    try:
        while any(worker.poll() is None for worker in workers):
            if failed := next((worker.returncode for worker in workers if worker.returncode), 0):
                return failed
            time.sleep(0.05)
        return next((worker.returncode for worker in workers if worker.returncode), 0)
    finally:
        for worker in workers:
            if worker.poll() is None:
                worker.kill()
            worker.wait()


def _rank(arguments: argparse.Namespace) -> int:
    import torch
    import torch.distributed as dist

    from megaboa.bridge.process import prepare
    from megaboa.bridge.quiet import quietly

    local = int(os.environ["LOCAL_RANK"])
    is_gpu = torch.cuda.is_available() and arguments.device != "cpu"
    device = torch.device("cuda", local) if is_gpu else torch.device("cpu")
    with quietly():
        prepare(device.type)
        from megaboa.bridge import calibrating
    if is_gpu:
        torch.cuda.set_device(device)
    warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 has other names for what 2.11 has
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    measured = calibrating.measure(device, rank, int(os.environ.get("LOCAL_WORLD_SIZE", arguments.gpus or ranks)))
    if rank == 0:
        path = arguments.out or calibration.FOLDER / f"{measured.gpu}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        records.write(path, measured)
        named = f", for resources.gpu: {measured.gpu}-<GB of memory>g" if is_gpu else ""
        print(f"{calibrating.told(measured)}\n\nwritten: {path}{named}")
    dist.barrier()
    dist.destroy_process_group()
    return 0
