"""Troubles with single GPUs, found in their samples: for the doctor, and for the memory of nodes."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from megaboa.records import Gpus, GpuUse
from megaboa.run.gpu_use import HOT, POWER_CAP

THROTTLED = 0.05  # share of the time
LOWERED = 0.98  # share of the default power limit
SLOW_CLOCK = 0.95  # relative to other GPUs' clocks
ENOUGH_SAMPLES = 3
CORRECTED, NVLINK = 1000, 10  # errors in a run: fewer are harmless, because they are corrected


def troubles_of(found: Gpus) -> Iterator[tuple[GpuUse, bool, str]]:
    """Each trouble: the GPU, whether it is broken (rather than slow), and a description."""
    for one in found.each:
        yield from ((one, False, said) for said in (*_throttled(one), *_slower(one, found)))
        yield from ((one, True, said) for said in _broken(one))


def _throttled(one: GpuUse) -> list[str]:
    shares = [(name, share) for name, share in one.throttled.items() if name != POWER_CAP and share >= THROTTLED]
    hot = f", at up to {one.celsius:.0f} °C" if one.celsius is not None else ""
    lines = [f"slowed down for {share:.0%} of the time by {name}{hot if name in HOT else ''}" for name, share in shares]
    capped, limit, usual = one.throttled.get(POWER_CAP, 0.0), one.limit_watts, one.default_limit_watts
    if capped >= THROTTLED and limit and usual and limit < LOWERED * usual:
        lines.append(f"at its power limit for {capped:.0%} of the time, which is {limit:.0f} W instead of {usual:.0f}")
    return lines


def _slower(one: GpuUse, found: Gpus) -> list[str]:
    """A message if the GPU's median clock is well below that of its peers, the run's other GPUs of the same kind."""
    peers = [peer.sm_mhz.median for peer in found.each if peer is not one and peer.name == one.name and peer.sm_mhz]
    if not peers or one.sm_mhz is None or one.sm_mhz.n < ENOUGH_SAMPLES:
        return []
    usual = statistics.median(peers)
    if one.sm_mhz.median >= SLOW_CLOCK * usual:
        return []
    return [f"slower than the others: its clock is {one.sm_mhz.median:.0f} MHz in the median, theirs {usual:.0f}"]


def _broken(one: GpuUse) -> list[str]:
    found = [f"no longer answered: {one.lost}"] if one.lost else []
    if one.ecc_uncorrected:
        found.append(f"{one.ecc_uncorrected:.0f} uncorrected memory error(s) while it trained")
    if one.ecc_corrected and one.ecc_corrected >= CORRECTED:
        found.append(f"{one.ecc_corrected:.0f} corrected memory errors while it trained")
    if one.nvlink_errors and one.nvlink_errors >= NVLINK:
        found.append(f"{one.nvlink_errors:.0f} NVLink errors while it trained")
    return found
