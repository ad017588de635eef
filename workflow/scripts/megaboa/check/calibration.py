"""The calibration of a GPU: the experiment's own, as `megaboa calibrate` wrote it, or else the one that is shipped."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

from megaboa import peaks, records
from megaboa.records import Calibration, Law

FOLDER = Path("calibrations")  # of the user's working directory
SHIPPED = Path(__file__).parent / "calibrations"
SAME = {"h800": "h100"}  # by processors and memory; its slower links are not known
NEAREST = {"gb200": "b200", "gb300": "b200", "b300": "b200"}  # of which a GPU is a multiple that nobody measured


def of(gpu: str | None) -> Calibration | None:
    """By the name in resources.gpu, as h100-80g; None where nothing is known of the GPU."""
    kind = (gpu or "").split("-")[0]
    for path in (FOLDER / f"{kind}.json", SHIPPED / f"{SAME.get(kind, kind)}.json"):
        if path.exists():
            return _read(path, path.stat().st_mtime_ns)
    return _scaled(kind) if peaks.operations(kind) else None


def name(gpu: str | None) -> str:
    found = of(gpu)
    return found.name if found else "none"


def short(gpu: str | None) -> str:
    """`told` in a table."""
    found = of(gpu)
    held = found and found.held_back
    return f"{name(gpu)} ({f'off by {held.median:.0%}' if held else 'never checked'})"


def told(gpu: str | None) -> str:
    """Which one, and how far its predictions of runs were off that it wasn't fitted to."""
    found = of(gpu)
    if found is None:
        return f"no calibration of {gpu}"
    held = found.held_back
    if held is None:
        return f"{found.name}; never held against runs"
    return f"{found.name}; off by {held.median:.0%}, at most {held.worst:.0%}, in {held.rows} other runs"


@functools.cache
def _read(path: Path, _changed: int) -> Calibration:
    return records.read(Calibration, path)


@functools.cache
def _scaled(kind: str) -> Calibration:
    """Everything but links and host by the data sheets' operations per second."""
    nearest = NEAREST.get(kind, "h100")
    known = records.read(Calibration, SHIPPED / f"{nearest}.json")
    share = (peaks.operations(kind) or 0.0) / (peaks.operations(nearest) or 1.0)

    def scaled(law: Law) -> Law:
        return replace(law, rate=law.rate * share, moved=law.moved and law.moved * share)

    def every(laws: dict[str, Law]) -> dict[str, Law]:
        return {name: scaled(law) for name, law in laws.items()}

    return replace(
        known,
        name=f"{nearest}'s, scaled to {kind} by data sheets",
        gpu=kind,
        products=every(known.products),
        grouped=every(known.grouped),
        attention=every(known.attention),
        memory=scaled(known.memory),
        held_back=None,
    )
