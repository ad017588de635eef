"""Compares ranks: puts their captures on one clock, and finds the slow ones among ranks with the same work."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import numpy as np

from megaboa.observe.traces.budget import Timeline
from megaboa.observe.traces.captures import Capture, Finding
from megaboa.observe.traces.collectives import operations
from megaboa.records import Clock, PartSpeeds

LEAST_MATCHES = 3
# smaller differences are noise
NOTICEABLE = 0.02
# a rank is persistently slow if it is the slowest in this share of the steps
PERSISTENT = 0.7


def rebased(captures: list[Capture]) -> list[Capture]:
    """Shift all captures to one time axis, with 0 at the first event of any, by the time of day in each capture.

    If any capture lacks it, all stay as they are.
    """
    if any(capture.epoch is None for capture in captures):
        return captures
    first = min(capture.epoch + _first(capture) for capture in captures)
    return [capture.shifted(capture.epoch - first) for capture in captures]


def _first(capture: Capture) -> int:
    tables = (capture.kernels, capture.copies, capture.ranges, capture.calls)
    return min((int(table.start[0]) for table in tables if len(table)), default=0)


def aligned(captures: list[Capture]) -> tuple[list[Capture], list[Clock], list[Finding]]:
    """Captures on one clock. Those of other hosts than the first's are shifted by the ends of shared collectives."""
    findings = []
    silent = [capture.label for capture in captures if capture.epoch is None]
    if silent and len(captures) > 1:
        text = f"{', '.join(silent)} don't say when they began: times of different ranks can't be compared"
        findings.append(Finding("clock_unknown", "warning", "profile", text))
    captures = rebased(captures)
    moved, clocks = captures[:1], []
    for capture in captures[1:]:
        offsets = end_offsets(captures[0], capture)
        same_host = capture.host is not None and capture.host == captures[0].host and not silent
        if len(offsets) < LEAST_MATCHES:
            if not same_host and not silent:
                text = "no collectives to set its clock by: it is as exact as the hosts' clocks are"
                findings.append(Finding("clock_unaligned", "note", capture.label, text))
            moved.append(capture)
            continue
        offset = 0 if same_host else round(float(np.median(offsets)))
        low, high = np.percentile(offsets - offset, [5, 95])
        moved.append(replace(capture.shifted(-offset), epoch=capture.epoch))
        clocks.append(
            Clock(
                rank=capture.rank,
                to_rank=captures[0].rank,
                offset_us=offset / 1e3,
                residual_us=(float(low) / 1e3, float(high) / 1e3),
                n=len(offsets),
            )
        )
    return moved, clocks, findings


def end_offsets(one: Capture, other: Capture) -> np.ndarray:
    """Differences between the ends of shared collectives, matched by operation, size and order.

    All ranks leave a collective at the same time.
    """
    ends = [_ends(capture) for capture in (one, other)]
    shared = [key for key in ends[0] if key in ends[1] and len(ends[0][key]) == len(ends[1][key])]
    return np.concatenate([ends[1][key] - ends[0][key] for key in shared]) if shared else np.empty(0)


def _ends(capture: Capture) -> dict[tuple[str, int], np.ndarray]:
    table = capture.kernels.take(Timeline(capture).is_communication)
    found: dict[tuple[str, int], list[int]] = {}
    for key in zip(operations(capture, table).tolist(), table.sizes.tolist(), table.end.tolist(), strict=True):
        found.setdefault(key[:2], []).append(key[2])
    point_to_point = "SendRecv"  # in point-to-point operations one side may leave long before the other
    return {key: np.array(times) for key, times in found.items() if key[0] != point_to_point}


class Layout(Protocol):
    """The parts of a run's layout that are needed here; `megaboa.layout.Layout` implements it."""

    pp: int

    @property
    def world_size(self) -> int | None: ...

    @property
    def ways(self) -> int: ...

    def stage(self, rank: int) -> int: ...

    def part(self, rank: int) -> str: ...

    def ideal_bubble(self, microbatches: int | None) -> float | None: ...


def stragglers(
    parts: dict[str, list[int]], work: dict[int, dict[int, float]], hosts: dict[int, str]
) -> list[PartSpeeds]:
    """Slow ranks within every part that several captured ranks share, and whether they are always slow.

    `work` is each rank's milliseconds by step, without communication, in which fast ranks wait for slow ones.
    """
    return [_part(part, ranks, work, hosts) for part, ranks in parts.items() if len(ranks) > 1]


def _part(part: str, ranks: list[int], work: dict[int, dict[int, float]], hosts: dict[int, str]) -> PartSpeeds:
    steps = sorted(set.intersection(*(set(work[rank]) for rank in ranks)))
    if not steps:
        return PartSpeeds(part=part, ranks=tuple(ranks), n=0, verdict="no steps in common")
    table = np.array([[work[rank][step] for step in steps] for rank in ranks])
    medians = np.median(table, axis=1)
    middle = float(np.median(medians))
    slowest = np.array(ranks)[table.argmax(axis=0)]
    spread = float((medians.max() - medians.min()) / middle) if middle else 0.0
    by_step = float(np.median((table.max(axis=0) - table.min(axis=0)) / np.maximum(np.median(table, axis=0), 1e-9)))
    worst = ranks[int(medians.argmax())]
    share = float((slowest == worst).mean())
    if spread > NOTICEABLE and share >= PERSISTENT:
        verdict = "persistent"
    else:
        verdict = "rotating" if by_step > NOTICEABLE else "even"
    return PartSpeeds(
        part=part,
        ranks=tuple(ranks),
        n=len(steps),
        fastest=ranks[int(medians.argmin())],
        slowest=worst,
        slowest_host=hosts.get(worst),
        slowest_in=share,
        spread=spread,
        spread_by_step=by_step,
        verdict=verdict,
        median_ms={str(rank): float(value) for rank, value in zip(ranks, medians, strict=True)},
    )
