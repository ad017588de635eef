"""metrics.py, from a run's store to its table and its summary."""

import json
import subprocess
import sys
from pathlib import Path

import pandas as pd
from fake_runs import FakeExperiment, loss_at

SCRIPT = Path(__file__).parents[2] / "workflow" / "scripts" / "metrics.py"


def test_metrics_of_a_run(tmp_path):
    experiment = FakeExperiment(tmp_path)
    train = experiment.completed_run("moe", model="moe", steps=20, losses={7: float("nan")})
    metrics = train.parent / "metrics"
    arguments = ["--train", train]
    outputs = ["--steps", metrics / "steps.parquet", "--summary", metrics / "summary.json"]
    for _ in range(2):
        subprocess.run([sys.executable, SCRIPT, *arguments, *outputs], check=True)
        text = (metrics / "summary.json").read_text()
        summary = json.loads(text)
        assert "NaN" not in text
        assert (summary["state"], summary["reasons"]) == ("INVALID", ["no finite loss at step 7"])
    steps = pd.read_parquet(metrics / "steps.parquet")
    assert steps["loss"].isna().tolist() == [step == 7 for step in range(1, 21)]
    assert steps["loss"].iloc[19] == loss_at(20, "moe")
    assert steps["losses/load_balancing_loss"].notna().sum() == 19
