"""`megaboa summarize`, from a run's store to its table and its summary."""

import json

import pandas as pd
import pytest
from called import called
from fake_runs import FakeExperiment, loss_at


def test_metrics_of_a_run(tmp_path):
    experiment = FakeExperiment(tmp_path)
    train = experiment.completed_run("moe", model="moe", steps=20, losses={7: float("nan")})
    metrics = train.parent / "metrics"
    arguments = ["--train", train]
    outputs = ["--steps", metrics / "steps.parquet", "--summary", metrics / "summary.json"]
    outputs += ["--goodput", metrics / "goodput.json"]
    for _ in range(2):
        assert called("summarize", *arguments, *outputs).returncode == 0
        text = (metrics / "summary.json").read_text()
        summary = json.loads(text)
        assert "NaN" not in text
        assert (summary["state"], summary["reasons"]) == ("INVALID", ["no finite loss at step 7"])
    goodput = json.loads((metrics / "goodput.json").read_text())
    assert sum(goodput["seconds"].values()) == pytest.approx(goodput["wall_seconds"])
    steps = pd.read_parquet(metrics / "steps.parquet")
    assert steps["loss"].isna().tolist() == [step == 7 for step in range(1, 21)]
    assert steps["loss"].iloc[19] == loss_at(20, "moe")
    assert steps["losses/load_balancing_loss"].notna().sum() == 19
