"""How long a step took in earlier runs of the same model, layout and hardware."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from megaboa import files, records
from megaboa.paths import measured
from megaboa.records import Summary

SIZES = ("global_batch_size", "micro_batch_size", "seq_length", "precision")


def speeds(results: Path) -> dict[str, float]:
    """Seconds per step by key, from the summaries of all experiments' runs that passed; the median, where there are
    several."""
    found: dict[str, list[float]] = {}
    for folder in measured(results):
        summary = records.read(Summary, folder.summary)
        timed = summary.step_seconds
        planned = folder.file("run").exists() and folder.file("launch").exists()
        if summary.state != "PASS" or not timed or not planned:
            continue
        found.setdefault(key(folder.run, folder.launch.gpu), []).append(timed.median)
    return {name: statistics.median(values) for name, values in found.items()}


def key(run: dict[str, Any], gpu: str | None) -> str:
    """What decides the speed: neither names, nor seeds and learning rates, nor how many steps there are."""
    model = {name: value for name, value in run["model"].items() if name not in ("name", "init", "seed")}
    sizes = {name: run["training"].get(name) for name in SIZES}
    same = {name: run.get(name) for name in ("parallel", "world_size", "device", "overrides")}
    return files.digest({"model": model, "sizes": sizes, "gpu": gpu, **same})
