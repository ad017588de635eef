"""Samples of GPUs as numbers of a run: in its summary, its doctor's words and its report."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from drivers import nvml_stand_in
from fake_runs import START, FakeExperiment
from sampled import assert_sampled

from megaboa.doctor import passed
from megaboa.files import write_text
from megaboa.observe.measure import trained
from megaboa.observe.steps import write_steps
from megaboa.paths import RunFolder
from megaboa.records import Energy, GpuFound, GpuSample, GpusFound, NotSampled, Spread, Unsampled, line, write
from megaboa.report.drawing import draw
from megaboa.report.notes import read_captions
from megaboa.report.runs import load_runs
from megaboa.run import gpu_use
from megaboa.run.gpu_use import use_of
from megaboa.store_paths import AttemptFolder, RunStore

CAPTIONS = Path(__file__).parents[2] / "workflow" / "report" / "captions.yaml"
SCRIPTS = Path(__file__).parents[2] / "workflow" / "scripts"


def write_samples(attempt, host, samples, count=2, **found):
    gpus = tuple(
        GpuFound(index=index, uuid=f"GPU-{host}-{index}", name="NVIDIA H200", **found) for index in range(count)
    )
    events = [GpusFound(host=host, seconds=5.0, gpus=gpus), *samples]
    write_text(attempt.gpus(host), "".join(line(event) + "\n" for event in events))


def sample(at, **values):
    usual = {"watts": (600.0, 500.0), "celsius": (60, 64), "sm_mhz": (1980, 1965), "utilisation": (99, 98)}
    return GpuSample(time=at, **{**usual, "reasons": (0x4, 0), **values})


@pytest.fixture
def run(tmp_path):
    """30 steps of an eighth of a second each, from START on; the first three count for no speed."""
    experiment = FakeExperiment(tmp_path)
    experiment.completed_run("a", steps=30)
    return RunFolder(experiment.results / "runs" / "a")


def attempt_of(run):
    return RunStore.of(run.attempts_link).attempt(1)


def test_samples_count_while_timed_steps_run(run):
    samples = [sample(START + 2.5), sample(START + 3, watts=(700.0, 510.0)), sample(START + 3.5, celsius=(61, 80))]
    others = [sample(START - 20, watts=(90.0, 90.0)), sample(START + 900, watts=(999.0, 999.0))]
    write_samples(attempt_of(run), "n1", [others[0], *samples, others[1]])
    summary = trained(run).summary
    first, second = summary.gpus.each
    assert (first.host, first.index, first.samples) == ("n1", 0, 3)
    assert first.watts.median == 600 and second.watts.median == 500 and second.celsius == 80
    total = summary.gpus.total
    assert (total.watts_peak, total.celsius_most, total.utilisation) == (700, 80, 98.5)
    assert (total.power_capped, total.too_hot, total.power_braked) == (0.5, 0, 0)
    assert first.throttled == {"power cap": 1.0} and second.throttled == {}
    # Nobody asked Bridge for the energy: power is what was sampled.
    assert summary.energy == Energy(watts_per_gpu=summary.energy.watts_per_gpu, sampled=True)
    assert summary.energy.watts_per_gpu.median == 550 and summary.energy.watts_per_gpu.n == 6
    assert [moment.values["watts"] for moment in summary.gpus.course] == [
        (500, 550, 600),
        (510, 605, 700),
        (500, 550, 600),
    ]


def test_bridges_own_energy_wins(run):
    write_samples(attempt_of(run), "n1", [sample(START + 3)])
    said = (
        " [2026-02-06 20:55:02] iteration {:8d}/ 30 | elapsed time per iteration (ms): 125.0 |"
        " energy per GPU (J/iter/GPU): 80.0 | power per GPU (W/GPU): 640.0 | lm loss: 2.4E+00 |\n"
    )
    write_text(attempt_of(run).log(0), "".join(said.format(step) for step in range(1, 31)))
    energy = trained(run).summary.energy
    assert energy.watts_per_gpu.median == 640 and not energy.sampled


def test_a_run_without_samples_has_none(run):
    assert trained(run).summary.gpus is None and trained(run).summary.energy is None
    write_text(attempt_of(run).gpus("n1"), line(NotSampled(host="n1", detail="no driver")) + "\n")
    assert trained(run).summary.gpus.missing == (Unsampled(host="n1", why="no driver"),)


def test_errors_are_those_that_came_in_an_attempt_whatever_was_before(tmp_path):
    first, second = AttemptFolder(tmp_path / "1"), AttemptFolder(tmp_path / "2")
    counts = [(None, (7, 7)), (1, (7, 9)), (2, None), (3, (7, 10))]
    for attempt in (first, second):  # the driver counts on between them
        samples = [sample(at or 0.0, **({"ecc_uncorrected": said} if said else {})) for at, said in counts]
        write_samples(attempt, "n1", samples)
    found = use_of({1: first, 2: second})
    assert [one.ecc_uncorrected for one in found.each] == [0, 6] and found.each[0].nvlink_errors is None
    assert (found.total.ecc_uncorrected, found.total.nvlink_errors) == (6, None)


def test_a_driver_that_was_loaded_again_counts_from_nothing(tmp_path):
    samples = [sample(0.0, nvlink_errors=(5, 5)), sample(1.0, nvlink_errors=(2, 6))]
    write_samples(AttemptFolder(tmp_path), "n1", samples)
    found = use_of({1: AttemptFolder(tmp_path)})
    assert [one.nvlink_errors for one in found.each] == [0, 1] and found.total.nvlink_errors == 1


def test_bits_are_named_and_one_that_explains_nothing_is_left_out():
    assert gpu_use.slowed(0x1 | 0x2 | 0x100) == []  # idle, application clocks, display
    assert gpu_use.slowed(0x40 | 0x8) == ["heat (hardware)"] and gpu_use.slowed(0x80 | 0x8) == ["power brake"]
    assert gpu_use.slowed(0x8) == ["slowdown by the hardware"] and gpu_use.slowed(0x20) == ["heat (driver)"]


def test_of_very_many_samples_every_so_many_th_is_read(tmp_path, monkeypatch):
    samples = [sample(float(at)) for at in range(1000)]
    samples[501] = sample(501.0, ecc_uncorrected=(0, 0))
    samples[503] = sample(503.0, ecc_uncorrected=(0, 4))
    write_samples(AttemptFolder(tmp_path), "n1", samples)
    monkeypatch.setattr(gpu_use, "MOST_BYTES", 20_000)
    found = use_of({1: AttemptFolder(tmp_path)})
    assert 50 < found.each[0].samples < 300 and found.each[1].ecc_uncorrected == 4
    assert len(found.course) <= gpu_use.MOMENTS and found.each[0].watts.median == 600


def findings(tmp_path, samples, **found):
    write_samples(AttemptFolder(tmp_path), "node-7", samples, **found)
    return passed.gpu_findings(use_of({1: AttemptFolder(tmp_path)}))


def test_the_doctor_has_nothing_to_say_of_healthy_gpus(tmp_path):
    assert findings(tmp_path, [sample(float(at), nvlink_errors=(3, 3)) for at in range(20)]) == []
    assert passed.gpu_findings(None) == []


def test_the_doctor_names_a_gpu_that_is_hot_and_slower_than_the_others(tmp_path):
    samples = [sample(float(at), sm_mhz=(1980, 1200), celsius=(60, 88), reasons=(0, 0x48)) for at in range(20)]
    hot, slow, tried = findings(tmp_path, samples)
    assert hot == "node-7, GPU 1: slowed down for 100% of the time by heat (hardware), at up to 88 °C"
    assert slow.startswith("node-7, GPU 1: slower than the others: its clock is 1200 MHz in the median, theirs 1980")
    assert "--exclude=NODE" in tried


def test_a_clock_counts_only_while_kernels_run(tmp_path):
    samples = [sample(float(at), sm_mhz=(1980, 345), utilisation=(99, 0)) for at in range(20)]
    assert findings(tmp_path, samples) == []


def test_the_doctor_names_a_power_limit_only_where_somebody_has_lowered_it(tmp_path):
    samples = [sample(float(at), reasons=(0x4, 0x4)) for at in range(20)]
    limits = {"limit_watts": 700.0, "default_limit_watts": 700.0}
    assert findings(tmp_path, samples, **limits) == []
    lowered = findings(tmp_path, samples, **{**limits, "limit_watts": 500.0})
    assert lowered[0] == "node-7, GPU 0: at its power limit for 100% of the time, which is 500 W instead of 700"


def test_the_doctor_names_errors_of_memory_and_links_and_gpus_that_are_gone(tmp_path):
    samples = [sample(0.0, ecc_uncorrected=(0, 0), ecc_corrected=(5, 5), nvlink_errors=(0, 0))]
    samples.append(sample(1.0, ecc_uncorrected=(0, 1), ecc_corrected=(6, 5000), nvlink_errors=(3, 40)))
    samples.append(sample(2.0, watts=(600.0, None), errors={"1": "the GPU is lost"}))
    said = [one.removeprefix("node-7, GPU 1: ") for one in findings(tmp_path, samples)[:-1]]
    assert said == [
        "no longer answered: the GPU is lost",
        "1 uncorrected memory error(s) while it trained",
        "4995 corrected memory errors while it trained",
        "40 NVLink errors while it trained",
    ]


def test_spreads_are_those_of_the_other_numbers():
    assert gpu_use.spread([]) is None
    assert gpu_use.spread([3.0, 1.0, 2.0]) == Spread(median=2.0, p5=1.1, p95=pytest.approx(2.9), n=3)


RANK = """
import json, sys, time
from pathlib import Path
from types import SimpleNamespace as Name

sys.path.insert(0, {scripts!r})
from megaboa.store_paths import AttemptFolder
from megaboa.run import gpu_sampler

attempt = AttemptFolder(Path({attempt!r}))
launch = Name(start=Name(gpu_sampling_seconds=0.1), gpus_per_node=2)
gpu_sampler.start(Name(run=Name(device="cuda"), launch=launch), attempt)
with attempt.steps.open("w", buffering=1) as steps:
    while len(attempt.sampled) == 0:  # a start takes longer than these steps
        time.sleep(0.05)
    for step in range(1, 31):
        time.sleep(0.05)
        line = {{"event": "step", "step": step, "time": time.time(), "seconds": 0.05, "loss": 4.0, "tokens": 1024}}
        print(json.dumps(line), file=steps)
"""


def test_from_the_driver_to_the_report(run, tmp_path):
    """A rehearsal of tests/e2e/gpus/test_gpu_samples.py, with a library that stands for the driver's: a rank starts the
    sampler, and writes steps instead of training."""
    code = RANK.format(scripts=str(SCRIPTS), attempt=str(attempt_of(run).path))
    environment = {**os.environ, **nvml_stand_in(tmp_path), "LOCAL_RANK": "0", "NVML_HOT": "1"}
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=60)
    found = trained(run)
    samples = assert_sampled(RunStore.of(run.attempts_link).path, found.summary, {"GPU-0000abc0", "GPU-0000abc1"})
    assert samples[0].watts == (650.5, 550.5)
    hot = found.summary.gpus.each[1]
    assert hot.sm_mhz.median == 1200 and hot.celsius == 88 and hot.throttled == {"heat (hardware)": 1.0}
    said = passed.gpu_findings(found.summary.gpus)
    assert sum("GPU 1: " in one for one in said) == 2 and not any("GPU 0: " in one for one in said)

    write(run.summary, found.summary)
    write_steps(run.steps_table, found.rows)
    drawn = draw(load_runs(run.path.parents[1]), [], [], read_captions(CAPTIONS), tmp_path / "report")
    assert "gpus" in {figure.name for figure in drawn}
    assert (tmp_path / "report" / "gpus.png").stat().st_size > 10_000
    head, *rows = (tmp_path / "report" / "data" / "gpus.tsv").read_text().splitlines()
    assert head.startswith("run\tattempt\tminutes\twatts\twatts.least\twatts.most\t") and len(rows) >= 5
