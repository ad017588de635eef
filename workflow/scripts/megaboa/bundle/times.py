"""When an experiment ran, from what its runs wrote down."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd


def experiment_times(results: Path, runs: Sequence[str]) -> tuple[float | None, float]:
    """Begin of the first step and end of the last one, in seconds since 1970; the epoch where none has run."""
    tables = [path for run in runs if (path := results / "runs" / run / "metrics" / "steps.parquet").exists()]
    times = pd.concat([pd.read_parquet(path, columns=["time"])["time"] for path in tables]) if tables else pd.Series()
    return (None, 0.0) if times.empty else (float(times.min()), float(times.max()))
