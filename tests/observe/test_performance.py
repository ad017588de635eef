"""TFLOP/s, MFU, memory and energy of runs."""

import made
import pytest
from fake_runs import START, FakeExperiment, step_event

from megaboa import records
from megaboa.files import write_json, write_text
from megaboa.observe import performance
from megaboa.observe.steps import step_rows
from megaboa.observe.summary import summarize
from megaboa.peaks import peak_of
from megaboa.records import STEPS, AttemptStart, TrainStart, plain
from megaboa.store_paths import RunStore


def run(gpu=None, flops_per_token=2e9, world_size=2, **given):
    events = [TrainStart(attempt=1, time=START, gpu=gpu, flops_per_token=flops_per_token)]
    steps = [{**step_event(step, START + step, seconds=0.5, tokens=1000), "attempt": 1} for step in range(1, 11)]
    events += records.events(STEPS, steps)
    train = made.trained(world_size=world_size)
    starts = [AttemptStart(attempt=1, world_size=world_size)]
    return plain(summarize("a", train, starts, events, step_rows(events), **given))


def test_the_mfu_against_a_stated_peak():
    summary = run(peak_tflops=10.0)
    assert summary["tflops_per_rank"]["median"] == pytest.approx(2e9 * 1000 / 0.5 / 2 / 1e12)
    assert summary["mfu"] == {
        "median": pytest.approx(0.2),
        "peak_tflops": 10.0,
        "peak_from": "resources.peak_tflops",
        "gpu": None,
    }


def test_the_mfu_against_a_data_sheet():
    mfu = run(gpu="NVIDIA H200")["mfu"]
    assert mfu["peak_tflops"] == 989.4 and "data sheet" in mfu["peak_from"] and mfu["gpu"] == "NVIDIA H200"


@pytest.mark.parametrize(
    ("name", "peak"),
    [("NVIDIA H100 80GB HBM3", 989.4), ("NVIDIA H100 PCIe", 756.0), ("NVIDIA H100 NVL", 835.5),
     ("NVIDIA A100-SXM4-80GB", 312.0), ("NVIDIA B200", 2250.0), ("NVIDIA GB200", 2500.0), ("NVIDIA H200", 989.4)],
)  # fmt: skip
def test_peaks_by_the_names_that_pytorch_gives(name, peak):
    assert peak_of(name)[0] == peak


@pytest.mark.parametrize("name", [None, "", "AMD Instinct MI300X"])
def test_no_peak_is_made_up(name):
    assert peak_of(name) is None


def test_attempts_of_an_older_version_have_no_tflops():
    summary = run(flops_per_token=None, peak_tflops=10.0)
    assert summary["tflops_per_rank"] is None and summary["mfu"] is None


def test_memory_is_that_of_the_last_attempt_that_ended_in_order(tmp_path):
    store = RunStore(tmp_path)
    for rank, used in ((0, 5), (1, 7), (10, 6)):
        write_json(store.attempt(1).end_record(rank), {"step": 3, "peak_allocated": used, "peak_reserved": used + 1})
    write_json(store.attempt(2).end_record(0), {"step": 3})
    memory = performance.memory(store, [1, 2])
    assert memory.attempt == 1 and memory.peak_bytes == {"allocated": 7, "reserved": 8}
    assert list(memory.by_rank) == ["0", "1", "10"]


def test_energy_is_read_from_the_console(tmp_path):
    store = RunStore(FakeExperiment(tmp_path).plan_run("a"))
    lines = [
        f" [2026-02-06 20:55:02] iteration {step:8d}/ 10 | elapsed time per iteration (ms): 3000.0 |"
        f" energy per GPU (J/iter/GPU): {1990 + step}.5 | power per GPU (W/GPU): 640.0 | lm loss: 2.4E+00 |\n"
        for step in range(1, 11)
    ]
    write_text(store.attempt(1).log(1), "".join(lines))
    energy, _ = performance.consoles(store, [1], world_size=2)
    assert energy.joules_per_gpu_and_step.n == 7 and energy.watts_per_gpu.median == 640.0
    assert performance.consoles(store, [1], world_size=1) == (None, None)


def test_stragglers_are_read_from_the_first_ranks_console_of_all_attempts(tmp_path):
    store = RunStore(FakeExperiment(tmp_path).plan_run("a"))
    line = "[2026-11-21 10:00:00] | MnRtt/Rnk: 100.00ms/0 | MxRtt/Rnk: {}.00ms/3 | MnPwr/Rnk: 612.11W/0 |\n"
    for attempt in (1, 2):
        write_text(store.attempt(attempt).log(0), line.format(300) + line.format(100 + 20 * attempt))
    _, found = performance.consoles(store, [1, 2], world_size=2)
    assert found.slowest == {"3": 2} and found.slowest_over_fastest.n == 2
    _, once = performance.consoles(store, [1], world_size=1)
    assert once.slowest_over_fastest.median == pytest.approx(1.2)
