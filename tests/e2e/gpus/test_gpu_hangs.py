"""A GPU that stands still: the hang is told by what NCCL has recorded, and the run resumes."""

import re

import pytest
from clone import edit
from gpu_runs import TWO, experiment, hit_each, on_two_gpus

from megaboa.files import read_jsonl

pytestmark = on_two_gpus

STEPS, SAVE_INTERVAL = 300, 50
RUNS = {
    "dp2": TWO,  # has collectives that take no other rank, and tell which GPU it is
    "tp2": f"{TWO}, parallel.tp: 2",  # needs to know when a collective has begun
}
TOLD = {
    "dp2": r"rank 1 waited in .* for rank 0.* whose GPU stands still",
    "tp2": r"began on rank 1 and not on the GPU of rank 0",
}


def configuration(workspace):
    runs = {}
    for run, layout in RUNS.items():
        injected = {"MEGABOA_ZYGOTE": "0", "PYTHONPATH": workspace.path / "benchmarks" / "injected"}
        injected |= {"INJECTED_FAULTS": workspace.path / run}
        injected |= {"TORCH_NCCL_ENABLE_TIMING": "1"} if run == "tp2" else {}
        environment = ", ".join(f'{name}: "{value}"' for name, value in injected.items())
        runs[run] = f"{{{layout}, launch.environment: {{{environment}}}}}"
    config = experiment(workspace, "hangs", runs, init="scratch")
    edit(config, "train_iters: 20", f"train_iters: {STEPS}")
    edit(config, "save_interval: 10", f"save_interval: {SAVE_INTERVAL}")
    edit(config, "seq_length: 128", "seq_length: 128, precision: bf16_mixed")
    edit(config, "resources: {", "recovery: {backoff_seconds: 0, no_progress_minutes: 0.25}\nresources: {")
    return config


@pytest.fixture(scope="module")
def told(workspace):
    for run in RUNS:
        (workspace.path / run).mkdir()

    def stand_still(run):
        """The GPU of rank 0."""
        (workspace.path / run / "0.new").write_text("GPU_SLEEP")
        (workspace.path / run / "0.new").rename(workspace.path / run / "0")

    hit_each(workspace, configuration(workspace), "hangs", RUNS, SAVE_INTERVAL, stand_still)
    return workspace


@pytest.mark.parametrize("run", RUNS)
def test_a_hang_is_told_and_the_run_resumes(told, run):
    ends = [one for one in read_jsonl(told.store("hangs", run) / "attempts.jsonl") if one["event"] == "end"]
    assert [end["cause"] for end in ends] == ["hang", None], ends
    print(ends[0]["detail"])
    assert re.search(TOLD[run], ends[0]["detail"]) and ends[0]["rank"] == 0
    assert told.json("hangs", "runs", run, "train.json")["iteration"] == STEPS
