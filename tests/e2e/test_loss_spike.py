"""A loss that really rises: the run goes back to the checkpoint before, and leaves the spike's batches out."""

import pytest

from megaboa.files import read_jsonl

pytestmark = pytest.mark.slow

SPIKE = "recovery: {backoff_seconds: 0, loss_spike: {factor: 1.02, window: 6, patience: 2, limit: 5}}\n"


def test_a_loss_spike_is_left_out(workspace):
    runs = {"a": "{optimizer.lr: 0.5, optimizer.clip_grad: 100.0}"}  # far too much, so that the loss rises
    config = workspace.experiment("spike", runs, steps=30, save_interval=5, more=SPIKE)
    text = config.read_text()
    config.write_text(text.replace("warmup_iters: 2", "warmup_iters: 29"))
    workspace.snakemake("metrics", "--configfile", config)

    ledger = read_jsonl(workspace.store("spike", "a") / "attempts.jsonl")
    first, last = next(entry["steps"] for entry in ledger if entry["event"] == "skip")
    again = [entry for entry in ledger if entry["event"] == "start"][1]
    assert again["resumed_from"] < first and [first, last] in again["skipped"]
    attempt = workspace.store("spike", "a") / "attempts" / f"{again['attempt']:02d}" / "steps.jsonl"
    done = {event["step"] for event in read_jsonl(attempt) if event["event"] == "step"}
    assert not done & set(range(first, last + 1)) and min(done) == again["resumed_from"] + 1

    summary = workspace.json("spike", "runs", "a", "metrics", "summary.json")
    assert [first, last] in summary["left_out"] and summary["state"] == "PASS"
    assert workspace.json("spike", "runs", "a", "train.json")["skipped"] == summary["left_out"]
