"""BERT and T5 from text to a trained run: killed and resumed bit for bit, and the same losses in every layout.

And a recipe file that brings a forward step of its own.
"""

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
from clone import kill_group

from megaboa.files import read_jsonl

pytestmark = pytest.mark.slow

STEPS, SAVE_INTERVAL, KILLED_AT = 30, 10, 13
EXPERIMENT = f"""\
experiment: NAME
device: cpu
tokenizers:
  bpe: {{train_on: text, vocab_size: 380}}
corpora:
  text: {{source: python-stdlib, limit: 60}}
models:
  bert: {{recipe: recipes/bert.py, args: {{size: tiny, vocab_size: 384, dropout: 0.0}}, tokenizer: bpe}}
  t5: {{recipe: recipes/t5.py, args: {{size: tiny, vocab_size: 512, dropout: 0.0}}, tokenizer: bpe}}
  own: {{recipe: own.py, tokenizer: bpe}}
data: {{split: "90,5,5", max_epochs: 100}}
training: {{train_iters: {STEPS}, global_batch_size: 8, micro_batch_size: 2, precision: fp32, eval_iters: 1}}
optimizer: {{lr: 3.0e-3}}
schedule: {{warmup_iters: 2}}
checkpoint: {{save_interval: {SAVE_INTERVAL}}}
recovery: {{backoff_seconds: 0}}
sweep:
  runs:
"""
RUNS = {
    "own": "{model: own, training.train_iters: 4, training.seq_length: 64, schedule.warmup_iters: 1}",
    "bert": "{model: bert}",
    "t5": "{model: t5}",
    "bert-tp2": "{model: bert, continue_from: masked/bert@20, resources.gpus_per_node: 2, parallel.tp: 2}",
    "bert-pp2": "{model: bert, continue_from: masked/bert@20, resources.gpus_per_node: 2, parallel.pp: 2}",
    "bert-dp2": "{model: bert, continue_from: masked/bert@20, resources.gpus_per_node: 2}",
    "t5-tp2": "{model: t5, continue_from: masked/t5@20, resources.gpus_per_node: 2, parallel.tp: 2}",
    "t5-dp2": "{model: t5, continue_from: masked/t5@20, resources.gpus_per_node: 2}",
}


OWN_STEP = """

import torch
from megatron.bridge.training import gpt_step


def forward_step(state, data_iterator, model, return_schedule_plan=False):
    output, loss = gpt_step.forward_step(state, data_iterator, model, return_schedule_plan)

    def doubled(logits):
        total, tokens, told = loss(logits)
        return total, tokens, {**told, "twice": told["lm loss"] * torch.tensor([2.0, 1.0])}

    return output, doubled
"""


def experiment(workspace, name, runs):
    config = workspace.path / f"{name}.yaml"
    text = EXPERIMENT.replace("NAME", name)
    config.write_text(text + "".join(f"    {run}: {values}\n" for run, values in runs.items()))
    return config


@pytest.fixture(scope="module")
def trained(workspace):
    (workspace.path / "own.py").write_text((workspace.path / "recipes" / "gpt_tiny.py").read_text() + OWN_STEP)
    workspace.snakemake("pretrain", "--configfile", experiment(workspace, "masked", RUNS))
    return workspace


@pytest.fixture(scope="module")
def killed(trained):
    """The first two runs, of each of which the rank is killed on the way."""

    def kill(run):
        (rank,) = trained.wait_for_step("killed", run, KILLED_AT)
        os.kill(rank, signal.SIGKILL)

    whole = {kind: RUNS[kind] for kind in ("bert", "t5")}
    process = trained.start("pretrain", "--configfile", experiment(trained, "killed", whole))
    try:
        with ThreadPoolExecutor() as pool:
            list(pool.map(kill, whole))
        output = process.communicate(timeout=240)[0]
    finally:
        kill_group(process)
    assert process.returncode == 0, output
    return trained


@pytest.mark.parametrize("kind", ["bert", "t5"])
def test_a_killed_run_goes_on_to_the_same_bits(trained, killed, kind):
    entries = read_jsonl(killed.store("killed", kind) / "attempts.jsonl")
    starts = [entry["resumed_from"] for entry in entries if entry["event"] == "start"]
    assert starts == [0, SAVE_INTERVAL] or starts == [0, 2 * SAVE_INTERVAL]
    assert [entry.get("cause") for entry in entries if entry["event"] == "end"] == ["killed", None]
    curve = trained.steps("masked", kind)
    assert len(curve) == STEPS and killed.steps("killed", kind) == curve
    assert float.fromhex(curve[-1][1]) < float.fromhex(curve[0][1]) - 0.2  # it learns


@pytest.mark.parametrize("run", ["bert-tp2", "bert-pp2", "bert-dp2", "t5-tp2", "t5-dp2"])
def test_losses_do_not_depend_on_the_layout(trained, run):
    whole = {step: float.fromhex(loss) for step, loss, _ in trained.steps("masked", run.split("-")[0])}
    found = {step: float.fromhex(loss) for step, loss, _ in trained.steps("masked", run)}
    assert list(found) == list(range(21, STEPS + 1))
    assert all(abs(loss - whole[step]) < 1e-5 for step, loss in found.items())


def test_what_is_predicted_is_not_that_of_a_decoder(trained):
    """Operations are counted by formulas of their own; memory isn't predicted, and nothing is written that says so."""
    checked = trained.json("masked", "preflight.json")["runs"]
    assert {checked[run]["facts"]["model"]["kind"] for run in ("bert", "bert-pp2")} == {"bert"}
    assert checked["t5"]["facts"]["model"]["kind"] == "t5" and all(
        one.get("memory_gib") is None for one in checked.values()
    )
    events = {run: events_of(trained.store("masked", run)) for run in ("bert", "t5")}
    assert all(max(event.get("flops_per_token") or 0 for event in found) > 1e5 for found in events.values())
    order = [event["losses"]["sop loss"] for event in events["bert"] if event["event"] == "step"]
    assert len(order) == STEPS and all(0.3 < loss < 1.5 for loss in order)


def test_a_recipe_file_brings_its_own_forward_step(trained):
    assert trained.json("masked", "preflight.json")["runs"]["own"]["facts"]["model"]["kind"] == "own"
    events = events_of(trained.store("masked", "own"))
    losses = [event["losses"] for event in events if event["event"] == "step"]
    assert len(losses) == 4 and all(one["twice"] == pytest.approx(2 * one["lm loss"]) for one in losses)


def events_of(store):
    return [event for path in sorted(store.glob("attempts/*/steps.jsonl")) for event in read_jsonl(path)]
