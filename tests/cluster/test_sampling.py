"""The sampler of GPUs in steps of a real SLURM: one on every host, and none when the step is over."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from drivers import nvml_stand_in

from megaboa.records import GpuSample, read_gpu_events
from megaboa.store_paths import AttemptFolder

pytestmark = pytest.mark.slow

SCRIPTS = Path(__file__).parents[2] / "workflow" / "scripts"
RANK = """
import os, socket, sys, time
from pathlib import Path
from types import SimpleNamespace as Name

sys.path.insert(0, {scripts!r})
from megaboa.store_paths import AttemptFolder
from megaboa.run import gpu_sampler
from megaboa.scheduler import rank_of

os.environ |= rank_of(os.environ)
attempt = AttemptFolder(Path({attempt!r}))
launch = Name(start=Name(gpu_sampling_seconds=0.1), gpus_per_node=2)
gpu_sampler.start(Name(run=Name(device="cuda"), launch=launch), attempt)
samples = attempt.gpus(socket.gethostname())
while not samples.exists() or len(samples.read_text().splitlines()) < 6:
    time.sleep(0.1)
time.sleep({seconds})
"""


@pytest.fixture(scope="module")
def sampling(make_lab, tmp_path_factory):
    lab = make_lab(accounting=False)
    shared = lab.root / "sampling"
    shared.mkdir(mode=0o777)
    library = nvml_stand_in(shared)

    def start(name, seconds):
        attempt = shared / name
        attempt.mkdir(mode=0o777)
        attempt.chmod(0o777)
        code = RANK.format(scripts=str(SCRIPTS), attempt=str(attempt), seconds=seconds)
        step = [
            "srun",
            "--partition=gpu",
            "--nodes=2",
            "--ntasks-per-node=2",
            "--export=ALL," + "".join(f"{variable}={value}" for variable, value in library.items()),
        ]
        return attempt, lab.popen([*step, sys.executable, "-c", code], stdin=subprocess.DEVNULL)

    return lab, start


def samplers(attempt):
    """Numbers of their processes."""
    said = subprocess.run(["ps", "-ww", "-eo", "pid,args"], capture_output=True, text=True, check=True).stdout
    return [int(line.split()[0]) for line in said.splitlines() if f"sample_gpus.py --out={attempt}/" in line]


def test_one_for_every_host_ends_with_the_step(sampling):
    lab, start = sampling
    attempt, step = start("done", 1)
    assert step.wait(120) == 0
    lab.wait(lambda: samplers(attempt) == [], 60, "the end of the samplers")
    hosts = {path.stem for path in AttemptFolder(attempt).sampled}
    assert len(hosts) == 2 and socket.gethostname() not in hosts
    for path in AttemptFolder(attempt).sampled:
        found, *samples = read_gpu_events(path)
        assert found.host == path.stem and len(found.gpus) == 2
        assert len(samples) >= 5 and all(isinstance(sample, GpuSample) for sample in samples)


def test_a_request_to_save_does_not_end_it_and_a_kill_does(sampling):
    """Ranks that are asked to end may yet save for minutes."""
    lab, start = sampling
    attempt, step = start("killed", 300)

    def counts():
        return [len(read_gpu_events(path)) for path in AttemptFolder(attempt).sampled]

    lab.wait(lambda: len(counts()) == 2 and min(counts()) > 2, 60, "samples")
    for pid in samplers(attempt):  # alone, as these ranks have no handler
        os.kill(pid, signal.SIGTERM)
    time.sleep(1)
    assert len(samplers(attempt)) == 2
    job = lab.run(["squeue", "--noheader", "--format=%i"]).stdout.split()[0]
    lab.run(["scancel", job])
    step.wait(60)
    lab.wait(lambda: samplers(attempt) == [], 60, "the end of the samplers")
