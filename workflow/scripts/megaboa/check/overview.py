"""One row per run, for people and as TSV: is it legal, does it fit, what does it cost?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megaboa import formats
from megaboa.check import calibration, fit, memory, parameters
from megaboa.check.costs import Costs, Total
from megaboa.check.facts import Facts
from megaboa.check.memory import GIB
from megaboa.layout import words
from megaboa.records import RunCheck, Tree

COLUMNS = (
    *("run", "state", "ranks", "layout", "params", "memory_gib", "limit_gib", "stage"),
    *("weights_gib", "gradients_gib", "optimizer_gib", "activations_gib", "logits_gib", "tensors_gib", "graphs_gib"),
    "memory_error",
    *(
        "tokens",
        "flops",
        "step_seconds",
        "step_source",
        "model_seconds",
        "model_parts",
        "model_by",
        "hours",
        "gpu_hours",
    ),
    *("checkpoint_bytes", "checkpoints", "disk_bytes", "why"),
)
SHOWN = 40  # limit for rows on a terminal
HEAD = (
    *("run", "state", "ranks", "layout", "params", "GiB", "of", "tokens", "FLOP", "s/step", "GPU-hours", "disk"),
    "time by",
)


def row(name: str, result: RunCheck, facts: Facts | None, costs: Costs | None) -> Tree:
    """A run's row. `result`: what preflight found."""
    found: Tree = dict.fromkeys(COLUMNS)
    found |= {"run": name, "state": result.state, "why": "; ".join(result.reasons or ())}
    if facts is None:
        return found
    found |= {"ranks": facts.layout.world_size, "layout": layout(facts), "params": _params(facts)}
    if memory.is_known(facts):
        need = memory.peak(facts)
        sizes = {f"{part}_gib": round(size, 2) for part, size in need.gib().items()}
        found |= {part: gib for part, gib in sizes.items() if part in COLUMNS}
        found |= {
            "memory_gib": round(fit.taken(facts, need) / GIB, 2),
            "stage": need.stage,
            "memory_error": fit.stated_error(facts),
        }
    if facts.cluster.gpu and facts.cluster.device == "cuda":
        found["limit_gib"] = round(fit.capacity(facts.cluster.gpu) / GIB, 2)
    if costs is not None:
        found |= {"tokens": costs.tokens, "flops": costs.flops, "step_source": costs.source}
        if costs.predicted is not None:
            found |= {"model_seconds": costs.predicted.seconds, "model_parts": costs.predicted.shares()}
            found["model_by"] = calibration.name(facts.cluster.gpu)
        found |= {"step_seconds": costs.step_seconds, "hours": costs.hours, "gpu_hours": costs.gpu_hours}
        found |= {"checkpoint_bytes": round(costs.checkpoint_bytes), "checkpoints": costs.checkpoints}
        found["disk_bytes"] = round(costs.disk_bytes)
    return found


def _params(f: Facts) -> int | None:
    return round(parameters.of_model(f)) if memory.is_known(f) else None


def layout(f: Facts) -> str:
    """Short form of a layout, such as `tp2 pp4 dp8 sp`; axes of size 1 are left out."""
    copies, fsdp = f.layout.dp or 1, f.layout.fsdp
    found = [*words(vars(f.layout)), *([f"dp{copies}"] if copies > 1 else []), *(["sp"] if f.layout.sp else [])]
    return " ".join(found + ([f"fsdp-{fsdp}"] if fsdp != "none" else [])) or "1 rank"


def tsv(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = ["\t".join(COLUMNS), *("\t".join(_cell(one[name]) for name in COLUMNS) for one in rows)]
    return "\n".join(lines) + "\n"


def _cell(value: Any) -> str:
    return "-" if value in (None, "") else f"{value:.6g}" if isinstance(value, float) else str(value)


def text(rows: Sequence[Mapping[str, Any]], total: Total) -> str:
    """The first rows, and the totals."""
    numbers = {"ranks", "params", "GiB", "of", "tokens", "FLOP", "s/step", "GPU-hours", "disk"}
    lines = formats.aligned([HEAD, *(_line(one) for one in rows[:SHOWN])], right=numbers)
    if len(rows) > SHOWN:
        lines.append(f"... and {formats.counted(len(rows) - SHOWN, 'more run')}, in preflight.tsv")
    lines.append(_totals(len(rows), total))
    return "\n".join(lines)


def _totals(runs: int, total: Total) -> str:
    """The sums, and of how many runs they know nothing: zero would be an answer."""
    if total.uncounted == runs:
        return f"{_runs(runs)}: tokens, FLOP, GPU-hours and disk are unknown"
    hours = "GPU-hours unknown" if total.unknown == runs else f"{total.gpu_hours:,.3g} GPU-hours"
    untimed = total.unknown - total.uncounted if total.unknown < runs else 0
    return (
        f"{_runs(runs)}: {formats.count(total.tokens)} tokens, {formats.count(total.flops)} FLOP, {hours}, "
        f"{formats.size(total.disk_bytes)} on disk"
        + (f"; {_runs(untimed)} of unknown duration" if untimed else "")
        + (f"; without {_runs(total.uncounted)} of which nothing is known" if total.uncounted else "")
    )


def _runs(count: int) -> str:
    return formats.counted(count, "run")


def _line(one: Mapping[str, Any]) -> tuple[str, ...]:
    cells = {
        "params": formats.count(one["params"]),
        "GiB": "-" if one["memory_gib"] is None else f"{one['memory_gib']:.1f}",
        "of": "-" if one["limit_gib"] is None else f"{one['limit_gib']:.1f}",
        "tokens": formats.count(one["tokens"]),
        "FLOP": formats.count(one["flops"]),
        "s/step": "-" if one["step_seconds"] is None else f"{one['step_seconds']:.3g}",
        "GPU-hours": "-" if one["gpu_hours"] is None else f"{one['gpu_hours']:,.3g}",
        "disk": "-" if one["disk_bytes"] is None else formats.size(one["disk_bytes"]),
        "time by": one["step_source"],
    }
    texts = [cells[head] if head in cells else one[head] for head in HEAD]
    return tuple("-" if cell is None else str(cell) for cell in texts)
