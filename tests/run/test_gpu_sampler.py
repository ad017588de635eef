"""The sampler of a node's GPUs, as a process of its own, with a library of the driver's C ABI."""

import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from drivers import nvml_stand_in

from megaboa.records import GpuSample, GpusFound, NotSampled, line, read_gpu_events
from megaboa.run import gpu_sampler
from megaboa.run.gpu_sampler import SCRIPT, thin
from megaboa.store_paths import AttemptFolder

WAIT = 120


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return nvml_stand_in(tmp_path_factory.mktemp("driver"))


@contextlib.contextmanager
def sampler(out, *arguments, **environment):
    command = [sys.executable, str(SCRIPT), f"--out={out}", "--seconds=0.05", *arguments]
    inherited = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    process = subprocess.Popen(command, env={**inherited, **environment})
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def events_of(out, count):
    """The first events, as soon as there are so many."""
    deadline = time.monotonic() + WAIT
    while len(found := read_gpu_events(out)) < count:
        assert time.monotonic() < deadline, f"{len(found)} of {count} events"
        time.sleep(0.02)
    return found


def sampled(tmp_path, library, count=4, arguments=("--ranks=2",), **environment):
    with sampler(tmp_path / "gpus.jsonl", *arguments, **library, **environment):
        return events_of(tmp_path / "gpus.jsonl", count)


def test_a_sample_has_what_the_driver_says_of_every_gpu(tmp_path, library):
    found, *samples = sampled(tmp_path, library)
    assert isinstance(found, GpusFound) and found.driver == "570.124.06" and found.host == socket.gethostname()
    assert [gpu.uuid for gpu in found.gpus] == ["GPU-0000abc0", "GPU-0000abc1"]
    second = found.gpus[1]
    assert (second.name, second.pci, second.most_sm_mhz) == ("NVIDIA H200", "00000000:3C:00.0", 1980)
    assert (second.limit_watts, second.default_limit_watts) == (500.0, 700.0)
    first = samples[0]
    assert isinstance(first, GpuSample)
    assert first.watts == (650.5, 550.5) and samples[1].watts == (651.5, 551.5)
    assert first.celsius == (61, 62) and first.memory_celsius == (70, 71) and first.utilisation == (99, 98)
    assert first.sm_mhz == (1980, 1980) and first.memory_mhz == (3201, 3201) and first.used_mib == (1000, 1001)
    assert first.reasons == (0x4, 0x4)  # by the name that older drivers have
    # Not supported by the first GPU; of the kinds of NVLink's errors two are.
    assert first.ecc_corrected == (None, 7) and first.ecc_uncorrected == (None, 0) and first.nvlink_errors == (1, 13)
    assert first.errors == {}


def test_counts_are_written_again_when_one_has_changed(tmp_path, library):
    _, *samples = sampled(tmp_path, library, count=7, NVML_ECC="1")
    assert [sample.ecc_uncorrected for sample in samples if sample.ecc_uncorrected] == [(None, 0), (None, 2)]


def test_a_gpu_that_is_lost_is_named_and_the_other_one_measured(tmp_path, library):
    _, sample, *_ = sampled(tmp_path, library, NVML_LOST="1")
    assert sample.errors == {"1": "the GPU is lost"} and sample.watts == (650.5, None) and sample.sm_mhz == (1980, None)


@pytest.mark.parametrize(
    "shown, ranks, expected",
    [
        ("1", 1, [1]),
        ("GPU-0000abc1", 1, [1]),
        ("0", 2, [0, 1]),  # every rank is shown its own
        ("", 2, [0, 1]),
        ("", 1, [0]),
        ("1,0", 1, [1]),
        ("0,1", 0, [0, 1]),  # by hand
        ("MIG-5c89852c", 1, [0, 1]),
    ],
)
def test_the_gpus_are_those_of_the_ranks(tmp_path, library, shown, ranks, expected):
    found, *_ = sampled(tmp_path, library, arguments=(f"--ranks={ranks}",), CUDA_VISIBLE_DEVICES=shown)
    assert [gpu.index for gpu in found.gpus] == expected


def test_without_a_driver_the_file_says_why_there_are_no_samples(tmp_path, library):
    for name, environment, why in (
        ("none", {}, "libnvidia-ml.so.1 can't be loaded"),
        ("refuses", {**library, "NVML_NO_DRIVER": "1"}, "the driver doesn't answer: Driver Not Loaded"),
    ):
        out = tmp_path / f"{name}.jsonl"
        with sampler(out, **environment) as process:
            assert process.wait(WAIT) == 0
        (event,) = read_gpu_events(out)
        assert isinstance(event, NotSampled) and why in event.detail and event.host == socket.gethostname()


def rank(tmp_path, library, then, device="cuda", seconds=0.05, local=0, **more):
    """A process that starts the sampler as a rank does."""
    code = f"""
import sys, time
sys.path.insert(0, {str(SCRIPT.parent)!r})
from types import SimpleNamespace as Name
from pathlib import Path
from megaboa.store_paths import AttemptFolder
from megaboa.run import gpu_sampler
launch = Name(start=Name(gpu_sampling_seconds={seconds}), gpus_per_node=2)
gpu_sampler.start(Name(run=Name(device={device!r}), launch=launch), AttemptFolder(Path({str(tmp_path)!r})))
{then}
"""
    environment = {**os.environ, **library, "LOCAL_RANK": str(local), **more}
    return subprocess.Popen([sys.executable, "-c", code], env=environment, start_new_session=True)


def test_it_ends_with_its_rank_however_that_ends_and_no_signal_ends_it_before(tmp_path, library):
    process = rank(tmp_path, library, "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)")
    out = AttemptFolder(tmp_path).gpus(socket.gethostname())
    events_of(out, 3)
    os.killpg(process.pid, signal.SIGTERM)  # as a scheduler asks a step to end, which saves first
    events_of(out, len(read_gpu_events(out)) + 3)
    process.kill()
    process.wait()
    deadline = time.monotonic() + WAIT
    while alive(process.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(process.pid)


def alive(group):
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    states = subprocess.run(["ps", "-o", "stat=", "-g", str(group)], capture_output=True, text=True).stdout.split()
    return any(not state.startswith("Z") for state in states)


@pytest.mark.parametrize("wrong", [{"device": "cpu"}, {"seconds": 0}, {"local": 1}])
def test_only_the_first_rank_of_a_node_with_gpus_starts_it(tmp_path, library, wrong):
    assert rank(tmp_path, library, "time.sleep(1)", **wrong).wait(WAIT) == 0
    assert AttemptFolder(tmp_path).sampled == []


@pytest.mark.parametrize("trouble", ["NVML_CRASHES", "NVML_HANGS"])
def test_a_driver_that_crashes_or_hangs_touches_no_rank(tmp_path, library, trouble):
    assert rank(tmp_path, library, "time.sleep(1)", **{trouble: "1"}).wait(WAIT) == 0


def test_what_cannot_be_started_is_no_error(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no python"))
    launch = SimpleNamespace(start=SimpleNamespace(gpu_sampling_seconds=5.0), gpus_per_node=2)
    folder = SimpleNamespace(run=SimpleNamespace(device="cuda"), launch=launch)
    gpu_sampler.start(folder, AttemptFolder(tmp_path), {"LOCAL_RANK": "0"})


def test_a_file_stays_small_and_keeps_what_it_says_of_errors(tmp_path):
    path = tmp_path / "gpus.jsonl"
    samples = [GpuSample(time=float(number), watts=(float(number),)) for number in range(100)]
    samples[51] = GpuSample(time=51.0, watts=(51.0,), ecc_uncorrected=(2,))
    path.write_text("".join(line(event) + "\n" for event in [GpusFound(host="n1", seconds=5.0), *samples]))
    thin(path)
    found, *kept = read_gpu_events(path)
    assert found.seconds == 5.0 and len(kept) in (50, 51)
    assert any(sample.ecc_uncorrected == (2,) for sample in kept)
    assert json.loads(path.read_text().splitlines()[-1])["time"] == kept[-1].time


def test_of_counts_that_always_rise_half_go_too(tmp_path):
    """A link that is ill counts errors in every sample: else the file would stay full, and nothing more be sampled."""
    path = tmp_path / "n1.jsonl"
    samples = [GpuSample(time=float(number), nvlink_errors=(3 * number,)) for number in range(100)]
    path.write_text("".join(line(event) + "\n" for event in [GpusFound(host="n1", seconds=5.0), *samples]))
    thin(path)
    found, *kept = read_gpu_events(path)
    assert isinstance(found, GpusFound) and len(kept) in (50, 51)
    assert kept[-1].nvlink_errors == (297,) and kept[0].nvlink_errors[0] <= 3


def test_a_full_file_is_thinned_and_sampled_less_often(tmp_path, library, monkeypatch):
    """In this process, by a clock that only sleeping moves."""

    class Over(BaseException):
        pass

    slept = [0.0]

    def sleep(seconds):
        slept.append(seconds)
        if len(slept) > 200:
            raise Over

    monkeypatch.setattr(gpu_sampler, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: sum(slept)))
    monkeypatch.setattr(gpu_sampler, "MOST_BYTES", 4000)
    monkeypatch.setattr("megaboa.run.nvml.LIBRARY", f"{library['LD_LIBRARY_PATH']}/libnvidia-ml.so.1")
    out = tmp_path / "gpus.jsonl"
    with pytest.raises(Over):
        gpu_sampler.sample(out, 5.0, 2, None)
    assert out.stat().st_size < 5000
    waits = [round(seconds, 3) for seconds in slept[1:]]
    assert waits == sorted(waits) and waits[0] == 5.0 and waits[-1] >= 160.0
    assert {later / sooner for sooner, later in itertools.pairwise(waits)} == {1.0, 2.0}
    found, *samples = read_gpu_events(out)
    assert isinstance(found, GpusFound) and samples[0].ecc_corrected == (None, 7) and len(samples) > 3
