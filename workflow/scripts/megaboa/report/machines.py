"""What the runs took of their GPUs: a table of the page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megaboa.report.expected import measured_gib
from megaboa.report.runs import RunResult


def rows(runs: Sequence[RunResult]) -> list[dict[str, Any]]:
    """One for each run of which memory, energy or its slowest rank is known: none on the CPU."""
    found = [_row(run) for run in runs]
    return [row for row in found if any(row[name] is not None for name in ("gib", "joules", "slowest_over_fastest"))]


def _row(run: RunResult) -> dict[str, Any]:
    summary = run.summary or {}
    energy, stragglers = summary.get("energy") or {}, summary.get("stragglers") or {}
    return {
        "run": run.name,
        "tflops": _median(summary.get("tflops_per_rank")),
        "mfu": _median(summary.get("mfu")),
        "gib": measured_gib(summary),
        "joules": _median(energy.get("joules_per_gpu_and_step")),
        "watts": _median(energy.get("watts_per_gpu")),
        "slowest_over_fastest": _median(stragglers.get("slowest_over_fastest")),
        "slowest": _slowest(stragglers.get("slowest") or {}),
    }


def _median(spread: dict[str, Any] | None) -> float | None:
    return spread["median"] if spread else None


def _slowest(times: dict[str, int]) -> str:
    """`3, in 18 of 20 reports`"""
    if not times:
        return ""
    rank, often = max(times.items(), key=lambda item: item[1])
    return f"{rank}, in {often} of {sum(times.values())} reports"
