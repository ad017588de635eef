"""A run in numbers, and whether it may be believed: `summary.json`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from megaboa.observe.steps import Row, is_finite, steps_in

# The first steps of every attempt are slow (allocation, compilation, connections) and say nothing about the speed.
WARMUP_STEPS = 3
# The loss at the end is the mean over the last tenth of the steps.
TAIL_SHARE = 0.1


def summarize(
    run: str, train: dict[str, Any], attempts: list[dict[str, Any]], events: list[dict[str, Any]], rows: list[Row]
) -> dict[str, Any]:
    """Gates and numbers of a run, from its train manifest, its attempts' start lines, its events and its step rows."""
    final = [row for row in rows if not row["replayed"]]
    reasons = invalid_reasons(train, attempts, final)
    timed = timed_rows(final)
    throughput = spread([row["tokens"] / row["seconds"] for row in timed if row["tokens"]])
    summary = {
        "run": run,
        "identity": train.get("identity"),
        "state": "INVALID" if reasons else "PASS",
        "reasons": reasons,
        "world_size": train["world_size"],
        "train_iters": train["train_iters"],
        "parent": train.get("parent"),
        "steps": len(final),
        "tokens": sum(row["tokens"] or 0 for row in final),
        "skipped_steps": sum(row["skipped"] for row in final),
        "attempts": len(attempts),
        "lost_steps": len(rows) - len(final),
        "left_out": train.get("skipped", []),  # steps whose batches were left out after a loss spike
        "warmup_steps_dropped": len(final) - len(timed),
        "step_seconds": spread([row["seconds"] for row in timed]),
        "tokens_per_second": throughput,
        "tokens_per_second_per_rank": throughput and throughput["median"] / train["world_size"],
        "loss": loss_summary(final),
        "grad_norm": {"last": final[-1]["grad_norm"], "max": _max([row["grad_norm"] for row in final])}
        if final
        else None,
        "validation": validation(events),
    }
    return without_nan(summary)


def invalid_reasons(train: dict[str, Any], attempts: list[dict[str, Any]], final: list[Row]) -> list[str]:
    """Why a run that came to its end must not be believed; nothing where it may."""
    reasons = []
    # A step that fp16's loss scaling skipped has no finite loss by design.
    bad = [row["step"] for row in final if not row["skipped"] and not is_finite(row["loss"])]
    if bad:
        reasons.append(f"no finite loss at {_steps(bad)}")
    left_out = steps_in(train.get("skipped", []))
    own = range((train.get("parent") or {"iteration": 0})["iteration"] + 1, train["train_iters"] + 1)
    missing = sorted(set(own) - {row["step"] for row in final} - left_out)
    if missing:
        reasons.append(f"{len(final)} of {len(own)} steps recorded; missing: {_steps(missing)}")
    wrong = sorted({start["world_size"] for start in attempts} - {train["world_size"]})
    if wrong:
        reasons.append(f"ran with {' and '.join(map(str, wrong))} ranks instead of {train['world_size']}")
    return reasons


def timed_rows(final: list[Row]) -> list[Row]:
    """The steps that count for the speed: all but the first few of every attempt."""
    seen: dict[int, int] = {}
    timed = []
    for row in final:
        seen[row["attempt"]] = seen.get(row["attempt"], 0) + 1
        if seen[row["attempt"]] > WARMUP_STEPS and row["seconds"]:
            timed.append(row)
    return timed


def spread(values: list[float]) -> dict[str, float] | None:
    if not values:
        return None
    p5, median, p95 = np.percentile(values, [5, 50, 95])
    return {"median": float(median), "p5": float(p5), "p95": float(p95), "n": len(values)}


def loss_summary(final: list[Row]) -> dict[str, Any] | None:
    losses = [row["loss"] for row in final]
    if not losses:
        return None
    finite = [(row["loss"], row["step"]) for row in final if is_finite(row["loss"])]
    tail = losses[-math.ceil(len(losses) * TAIL_SHARE) :]
    lowest, at_step = min(finite) if finite else (None, None)
    return {
        "first": losses[0],
        "last": losses[-1],
        "min": lowest,
        "min_step": at_step,
        "tail_mean": float(np.mean(tail)) if None not in tail else None,
        "tail_steps": len(tail),
    }


def validation(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Losses of every evaluation by step; of one that was repeated, the last."""
    by_step = {event["step"]: event["losses"] for event in events if event["event"] == "eval"}
    return [{"step": step, "losses": by_step[step]} for step in sorted(by_step)]


def without_nan(summary: dict[str, Any]) -> dict[str, Any]:
    """JSON knows no NaN: put null in its place and say under `not_finite` where it was."""
    found: dict[str, str] = {}

    def clean(value: Any, path: str) -> Any:
        if isinstance(value, dict):
            return {name: clean(item, f"{path}.{name}" if path else name) for name, item in value.items()}
        if isinstance(value, list):
            return [clean(item, f"{path}.{index}") for index, item in enumerate(value)]
        if isinstance(value, float) and not math.isfinite(value):
            found[path] = str(value)
            return None
        return value

    return {**clean(summary, ""), "not_finite": found}


def _max(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.max(known)) if known else None


def _steps(steps: list[int], shown: int = 5) -> str:
    more = f" and {len(steps) - shown} more" if len(steps) > shown else ""
    word = "step" if len(steps) == 1 else "steps"
    return f"{word} {', '.join(map(str, steps[:shown]))}{more}"
