"""A GPU that stands still: the hang is told by what NCCL has recorded, and the run resumes."""

import re

import pytest
from clone import edit
from gpu_runs import TWO, experiment, hit_each, on_two_gpus

from megaboa.files import read_jsonl

pytestmark = on_two_gpus

STEPS, SAVE_INTERVAL = 300, 50
TIMED = "timed"  # with what tells which GPU it is
RUNS = ("untimed", TIMED)


def configuration(workspace):
    runs = {}
    for number, run in enumerate(RUNS):
        injected = {"MEGABOA_ZYGOTE": "0", "PYTHONPATH": workspace.path / "benchmarks" / "injected"}
        injected |= {"INJECTED_FAULTS": workspace.path / run}
        injected |= {"TORCH_NCCL_ENABLE_TIMING": "1"} if run == TIMED else {}
        environment = ", ".join(f'{name}: "{value}"' for name, value in injected.items())
        # Runs must differ in more than their environment; without experts this loss has no effect.
        values = f"{TWO}, launch.environment: {{{environment}}}, overrides.model.moe_aux_loss_coeff: {number}"
        runs[run] = f"{{{values}}}"
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
    both, one = "rank 0, 1 waited in .*, which all had joined", "began on rank 1 and not on the GPU of rank 0"
    assert re.search(one if run == TIMED else both, ends[0]["detail"])
    assert told.json("hangs", "runs", run, "train.json")["iteration"] == STEPS
