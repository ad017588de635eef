"""The most important results, in at most ten lines. Every share names its steps and their number."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megaboa.formats import counted
from megaboa.records import Analysis, Opportunity, PartSpeeds, StepBudget

MOST_LINES = 10
MATERIAL = 0.02  # share of a step: smaller losses aren't worth a look

# What could be won at most, and where to look. `starved` is part of idle; the others are disjoint.
_SHOWN = {"compute": "computing", "exposed": "exposed communication", "copies_exposed": "copies", "idle": "idle"}
_WHERE = {
    "exposed": "exposed communication: overlap of gradients and parameters, a layout with less of it",
    "starved": "the device waited for the host to launch: CUDA graphs, larger micro-batches, cores bound to ranks",
    "copies_exposed": "exposed copies: pinned memory, prefetching, offloading",
    "other_idle": "idle though the next kernel had been issued, or issue times are unknown: dependencies, other ranks",
}


def opportunities(document: Analysis) -> list[Opportunity]:
    """The gain from each kind of lost time if all of it were won: a ceiling, not a forecast."""
    found = []
    for kind, advice in _WHERE.items():
        rows = [(row.wall, lost) for row in document.budget if (lost := _lost(row, kind)) is not None]
        if not rows:
            continue
        wall, lost = (float(np.median(column)) for column in zip(*rows, strict=True))
        if wall > lost > 0:
            ceiling, n = gain(wall, lost), len(rows)
            found.append(Opportunity(kind=kind, ms=lost, share=lost / wall, gain_ceiling=ceiling, n=n, look=advice))
    return sorted(found, key=lambda row: -row.ms)


def gain(step: float, lost: float) -> float:
    """The relative increase in throughput if `lost` of every `step` were won."""
    return step / (step - lost) - 1


def summary(document: Analysis) -> list[str]:
    lines = [*_first_line(document), *_losses(document), *_others(document)]
    problems = [finding for finding in document.findings if finding.level != "note"]
    room = MOST_LINES - len(lines)
    shown = problems[: max(1, room - 1) if len(problems) > room else room]
    lines = lines[: MOST_LINES - len(shown) - (len(problems) > len(shown))]
    lines += [f"{finding.level}: {finding.where}: {finding.text}" for finding in shown]
    if len(problems) > len(shown):
        lines.append(f"and {counted(len(problems) - len(shown), 'more finding')}")
    return lines


def _first_line(document: Analysis) -> list[str]:
    rows = document.budget
    if not rows:
        kept = [finding.text for finding in document.findings if finding.code == "kept"]
        return kept or ["These captures give no result: see the findings."]
    walls = [row.wall for row in rows]
    shares = [
        f"{sum(getattr(row, kind) for row in rows) / sum(walls):.1%} {name}"
        for kind, name in _SHOWN.items()
        if all(getattr(row, kind) is not None for row in rows)
    ]
    median, least, most = (milliseconds(float(of(walls))) for of in (np.median, min, max))
    said = ", ".join(shares) or "nothing is known of the device"
    return [f"A step takes {median} ({least} to {most}): {said} ({_of(rows)})."]


def _losses(document: Analysis) -> list[str]:
    return [
        f"{milliseconds(row.ms)} of a step ({row.share:.1%}; removing it all: at most "
        f"+{row.gain_ceiling:.1%}): {row.look} ({_of(document.budget)})."
        for row in document.opportunities
        if row.share >= MATERIAL
    ]


def _others(document: Analysis) -> list[str]:
    slow = [line for row in document.stragglers if (line := _slow(row))]
    return [*_bound(document), *slow, *_stages(document), *_waits(document), *_largest_class(document)]


def _bound(document: Analysis) -> list[str]:
    rows = document.budget
    bound = sum(row.cpu_bound or False for row in rows)
    return [f"{bound} of {len(rows)} steps are bound by the host ({_of(rows)})."] if bound else []


def _slow(row: PartSpeeds) -> str | None:
    part = "parts that aren't known" if row.part == "unknown" else row.part  # a recipe may choose its own layout
    if row.verdict == "persistent":
        where = f" on {row.slowest_host}" if row.slowest_host else ""
        return (
            f"Rank {row.slowest}{where} is slow: {row.spread:.1%} more work time than rank "
            f"{row.fastest}, the slowest in {row.slowest_in:.0%} of the steps ({part}, n = {row.n})."
        )
    if row.verdict == "rotating":
        return (
            f"Ranks of {part} differ by {row.spread_by_step:.1%} within a step, but it is not always the "
            f"same one that is slow (n = {row.n})."
        )
    return None


def _stages(document: Analysis) -> list[str]:
    found = document.pipeline
    if not found:
        return []
    ideal = f"{found.ideal:.1%}" if found.ideal is not None else "unknown"
    count = sum(row.n for row in found.ranks)
    return [f"Pipeline stages stand still for {found.measured:.1%} of a step; ideal: {ideal} (n = {count})."]


def _waits(document: Analysis) -> list[str]:
    found = document.waiting
    if not found:
        return []
    label, waited = max(found.waiting_ms.items(), key=lambda item: item[1])
    if waited <= 0:
        return []
    return [
        f"Of shared collectives {milliseconds(found.transfer_ms)} a step are transfer; {label} waits "
        f"{milliseconds(waited)} in them for others (n = {found.matched} matched)."
    ]


def _largest_class(document: Analysis) -> list[str]:
    for rank in document.ranks[:1]:
        rows = [row for row in document.details[str(rank.rank)].classes if row.name != "communication"]
        if rows:
            share = rows[0].ms / (sum(r.wall for r in _of_rank(document, rank.rank)) / rank.n)
            return [f"Most computing is {rows[0].name}: {share:.1%} of a step ({rank.window}, n = {rank.n})."]
    return []


def _of_rank(document: Analysis, rank: int | None) -> list[StepBudget]:
    return [row for row in document.budget if row.rank == rank]


def _lost(row: StepBudget, kind: str) -> float | None:
    if kind != "other_idle" or row.idle is None:
        return getattr(row, kind, None)
    return row.idle - min(row.idle, row.starved or 0.0)


def _of(rows: Sequence[StepBudget]) -> str:
    steps, ranks = {row.step for row in rows}, {row.rank for row in rows}
    span = f"step {min(steps)}" if len(steps) == 1 else f"steps {min(steps)} to {max(steps)}"
    return f"{span} of {counted(len(ranks), 'rank')}, n = {len(rows)}"


def milliseconds(value: float, sign: bool = False) -> str:
    plus = "+" if sign and value > 0 else ""
    return f"{plus}{value:,.3g} ms" if abs(value) < 1000 else f"{plus}{value:,.0f} ms"
