"""A loss that really rises: the run goes back to the checkpoint before, and leaves the spike's batches out."""

import json
import re
from collections import Counter

import pytest
from clone import edit

from megaboa.files import read_jsonl

pytestmark = pytest.mark.slow

SPIKE = "recovery: {backoff_seconds: 0, loss_spike: {factor: 1.02, window: 6, patience: 2, limit: 5}}\n"


def test_the_doctor_names_what_the_step_of_a_spike_has_read(workspace):
    """Of a learning rate that grows until the loss does."""
    runs = {"a": "{optimizer.lr: 2.0, optimizer.clip_grad: 100.0}"}
    config = workspace.experiment("rising", runs, steps=260, save_interval=260)
    edit(config, "warmup_iters: 2", "warmup_iters: 259")
    workspace.snakemake("metrics", "--configfile", config)
    said = workspace.megaboa("doctor", "rising")
    step = int(re.search(r"the largest at step (\d+)", said)[1])
    documents, most, number = re.search(
        rf"step {step} read text 100%, of (\d+) documents?; (\d+)% of its tokens are from document (\d+) of text", said
    ).groups()
    call = re.search(r"all of them: megaboa (documents rising/a --step \d+)", said)[1].split()
    batch = json.loads(workspace.megaboa(*call, "--json"))
    assert batch["step"] == step
    tokens = Counter()
    for sample in batch["samples"]:
        assert sum(piece["tokens"] for piece in sample["pieces"]) in (64, 65)
        for piece in sample["pieces"]:
            tokens[piece["document"]] += piece["tokens"]
    assert len(batch["samples"]) == 8 and batch["samples"][0]["number"] == 8 * (step - 1)
    (largest, count), *_ = tokens.most_common(1)
    assert (len(tokens), largest, round(100 * count / tokens.total())) == (int(documents), int(number), int(most))


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
