"""What the profiler itself costs: the run's own steps under it, beside those without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from megaboa.files import read_jsonl
from megaboa.observe.traces.findings import Finding

MATERIAL = 0.05  # of a step


def perturbation(log: Path, steps: list[int]) -> dict[str, Any] | None:
    """Median time of the captured steps, and of those after them; the first of these still pays for the capture's end.

    By the clock of the rank that writes the log, whose steps wait for every rank's. None: nothing to compare.
    """
    seconds = {event["step"]: event["seconds"] for event in read_jsonl(log) if event["event"] == "step"}
    first, end = steps
    captured = [seconds[step] for step in range(first + 1, end - 1) if step in seconds]
    reference = [seconds[step] for step in seconds if step > end]
    if not captured or not reference:
        return None
    under, without = float(np.median(captured)), float(np.median(reference))
    return {
        "captured_ms": under * 1e3,
        "captured_n": len(captured),
        "reference_ms": without * 1e3,
        "reference_n": len(reference),
        "reference": f"steps {min(s for s in seconds if s > end)} to {max(seconds)}",
        "slowdown": under / without - 1,
    }


def about(found: dict[str, Any] | None) -> list[Finding]:
    if not found or abs(found["slowdown"]) < MATERIAL:
        return []
    captured = f"{found['captured_ms']:.4g} ms (n = {found['captured_n']})"
    reference = f"{found['reference_ms']:.4g} ms ({found['reference']}, n = {found['reference_n']})"
    text = (
        f"under the profiler a step takes {captured}, without it {reference}: {found['slowdown']:+.1%}; "
        f"times and ceilings are those of perturbed steps"
    )
    return [Finding("perturbed", "note", "profile", text)]
