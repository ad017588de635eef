"""What does the pipeline cost? A run trained by the workflow beside the bare entrypoint with the same configuration.

    python benchmarks/overhead.py config/config.yaml dp2 --repeat 3

The workflow: `snakemake .../train.json` in an experiment of its own, `results/overhead-N`, its shared stages made
before. Bare: Bridge's `pretrain()` with the same configuration and nothing of ours around it, one process a rank. By
turns; a step's time is Bridge's own, of the median step after the first ten.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "workflow/scripts"))

from megaboa.bridge import process
from megaboa.paths import RunFolder
from megaboa.run.command import rank_environment
from megaboa.scheduler.ranks import ReservedPort
from megaboa.store_paths import AttemptFolder, RunStore

SKIPPED = 10
STEP = re.compile(r"iteration +(\d+)/.*elapsed time per iteration \(ms\): ([\d.]+)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("run")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--snakemake", nargs="*", default=[], help="further arguments, without their dashes")
    arguments = parser.parse_args()
    found: dict[str, list[tuple[float, float]]] = {"workflow": [], "bare": []}
    for number in range(arguments.repeat):
        folder = RunFolder(Path("results", f"overhead-{number}", "runs", arguments.run))
        snakemake(arguments, number, "preflight", "data", "import")
        found["workflow"].append(by_workflow(arguments, number, folder))
        with tempfile.TemporaryDirectory() as out:
            found["bare"].append(bare(folder, Path(out)))
        steps = ", ".join(f"{pairs[-1][0]:.1f} ms {what}" for what, pairs in found.items())
        print(f"{number + 1} of {arguments.repeat}: {steps}", file=sys.stderr, flush=True)
    print(table(found))


def snakemake(arguments: argparse.Namespace, number: int, *targets: str) -> None:
    command = [sys.executable, "-m", "snakemake", *targets, "--profile", "profiles/local", "--configfile"]
    command += [str(arguments.config), "--config", f"experiment=overhead-{number}"]
    command += [f"--{one}" for one in arguments.snakemake]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def by_workflow(arguments: argparse.Namespace, number: int, folder: RunFolder) -> tuple[float, float]:
    """Milliseconds per step, and seconds of the whole command."""
    start = time.perf_counter()
    snakemake(arguments, number, str(folder.train_manifest))
    seconds = time.perf_counter() - start
    return step_time((folder.store / "attempts").glob("*/rank-*.log")), seconds


def bare(folder: RunFolder, out: Path) -> tuple[float, float]:
    """The same times for the bare ranks."""
    with contextlib.closing(ReservedPort("127.0.0.1")) as port:
        number = port.number
    ranks = folder.run.world_size
    start = time.perf_counter()
    started = []
    for rank in range(ranks):
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_PORT": number}
        environment = {**os.environ, **{name: str(value) for name, value in names.items()}, "MASTER_ADDR": "127.0.0.1"}
        environment |= rank_environment(folder)
        with (out / f"rank-{rank}.log").open("w") as log:
            command = [sys.executable, __file__, "--rank", str(folder.path), str(out)]
            started.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
    codes = [one.wait() for one in started]
    seconds = time.perf_counter() - start
    if any(codes):
        sys.exit(f"the bare run failed:\n{(out / 'rank-0.log').read_text()[-3000:]}")
    return step_time(out.glob("rank-*.log")), seconds


def be_a_rank(folder: RunFolder, out: Path) -> None:
    process.prepare(folder.run.device, folder.launch.cpus_per_rank)
    from megatron.bridge.training import initialize
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain

    from megaboa.bridge import configuration, wheels

    config = configuration.build(folder.run, configuration.Inputs.read(folder))
    cache = Path(folder.index.cache) if folder.index else out / "index-cache"
    configuration.place(config, folder.launch, RunStore(out), AttemptFolder(out), None, cache)
    wheels.keep_compiled_helpers(initialize)
    wheels.without_missing_kernels(config.model, folder.run.overrides)
    pretrain(config, forward_step)


def step_time(logs) -> float:
    lines = [STEP.search(line) for log in logs for line in log.read_text(errors="replace").splitlines()]
    times = [float(line[2]) for line in lines if line and int(line[1]) > SKIPPED]
    return statistics.median(times)


def table(found: dict[str, list[tuple[float, float]]]) -> str:
    lines = [f"{'':10}{'ms a step':>12}{'least':>8}{'most':>8}{'whole, s':>10}"]
    for what, pairs in found.items():
        steps = [step for step, _ in pairs]
        seconds = statistics.median(seconds for _, seconds in pairs)
        lines.append(f"{what:10}{statistics.median(steps):12.1f}{min(steps):8.1f}{max(steps):8.1f}{seconds:10.1f}")
    pairs = list(zip(found["workflow"], found["bare"], strict=True))
    ratio = statistics.median(ours[0] / theirs[0] for ours, theirs in pairs)
    around = statistics.median(ours[1] - theirs[1] for ours, theirs in pairs)
    lines.append(
        f"a step in the workflow takes {ratio:.3f} times as long as a bare one; {around:.1f} s go into the rest"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    if sys.argv[1] == "--rank":
        be_a_rank(RunFolder(Path(sys.argv[2])), Path(sys.argv[3]))
    else:
        main()
