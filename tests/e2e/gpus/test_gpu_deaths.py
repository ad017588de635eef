"""Runs on GPUs, one rank of which is killed between two saves, continue from the last, or from copies on the node."""

import os
import signal

import pytest
from clone import edit
from gpu_runs import BF16, TWO, experiment, hit_each, on_two_gpus

from megaboa.files import read_jsonl

pytestmark = on_two_gpus

STEPS, SAVE_INTERVAL, COPIED_EVERY = 600, 200, 20
KILLED_AFTER = 249  # or later: a save in the background takes its time
SHARDINGS = {"fsdp-1": "optim", "fsdp-2": "optim_grads", "fsdp-3": "optim_grads_params"}  # no_shard can't be saved
RUNS = {
    "dp2": f"{{{TWO}}}",  # saves in the background, as the next one does, as a large model is saved
    # Runs must differ in more than how they save; without experts this loss has no effect.
    "dp2-shards": f"{{{TWO}, checkpoint.reshardable: false, overrides.model.moe_aux_loss_coeff: 1}}",
    "copies": f"{{{TWO}, checkpoint.local.every: {COPIED_EVERY}, overrides.model.moe_aux_loss_coeff: 2}}",  # in /tmp
    **{run: f"{{{TWO}, parallel.fsdp: megatron, parallel.fsdp_sharding: {kind}}}" for run, kind in SHARDINGS.items()},
}


def configuration(workspace):
    config = experiment(workspace, "long", RUNS, init="scratch")
    edit(config, "train_iters: 20", f"train_iters: {STEPS}")
    edit(config, "save_interval: 10", f"save_interval: {SAVE_INTERVAL}")
    edit(config, "seq_length: 128", "seq_length: 128, precision: bf16_mixed")
    return config


@pytest.fixture(scope="module")
def interrupted(workspace):
    def kill(run):
        os.kill(workspace.rank_processes("long", run)[-1], signal.SIGKILL)

    hit_each(workspace, configuration(workspace), "long", RUNS, KILLED_AFTER, kill, saved=SAVE_INTERVAL)
    return workspace


def losses_of_attempts(workspace, run):
    """Of the first two, which are all."""
    found = []
    for attempt in ("01", "02"):
        events = read_jsonl(workspace.store("long", run) / "attempts" / attempt / "steps.jsonl")
        found.append({event["step"]: event["loss"] for event in events if event["event"] == "step"})
    return found


@pytest.mark.parametrize("run", RUNS)
def test_a_killed_run_continues_from_what_it_saved_last(interrupted, run):
    lost, after = losses_of_attempts(interrupted, run)
    if run == "copies":
        assert max(lost) - 2 * COPIED_EVERY <= min(after) <= max(lost) + 1  # a copy takes its time
        assert (min(after) - 1) % COPIED_EVERY == 0
    else:
        assert min(after) in (SAVE_INTERVAL + 1, 2 * SAVE_INTERVAL + 1)
    assert max(after) == STEPS
    again = sorted(lost.keys() & after.keys())[:20]
    assert again or run == "copies"
    assert all(abs(lost[step] - after[step]) <= BF16 for step in again)
    assert interrupted.json("long", "runs", run, "train.json")["iteration"] == STEPS
