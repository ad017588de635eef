"""The calibration of a GPU: the experiment's own, as written by `megaboa calibrate`, or else the shipped one."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

from megaboa import peaks, records
from megaboa.errors import InputError
from megaboa.records import Calibration, HeldBack, Law

FOLDER = Path("calibrations")  # in the user's working directory
SHIPPED = Path(__file__).parent / "calibrations"
SAME = {"h800": "h100"}  # same processors and memory; its links are slower, but by how much isn't known
NEAREST = {"gb200": "b200", "gb300": "b200", "b300": "b200"}  # measured GPU that an unmeasured one is scaled from


def of(gpu: str | None) -> Calibration | None:
    """The calibration of a GPU named as in resources.gpu, such as h100-80g; None if nothing is known about it."""
    kind = (gpu or "").split("-")[0]
    for path in (FOLDER / f"{kind}.json", SHIPPED / f"{SAME.get(kind, kind)}.json"):
        if path.exists():
            return _read(path, path.stat().st_mtime_ns)
    return _scaled(kind) if peaks.operations(kind) else None


def name(gpu: str | None) -> str:
    found = of(gpu)
    return found.name if found else "none"


def short(gpu: str | None, is_uncertain: bool) -> str:
    """Name of the calibration, with its median error for such runs among those that it wasn't fitted to
    (`speed.is_uncertain`)."""
    found = of(gpu)
    held = found and (found.held_back_by_host if is_uncertain else found.held_back)
    return f"{name(gpu)} ({f'off by {held.median:.0%}' if held else 'never checked'})"


def told(gpu: str | None) -> str:
    """The calibration with its errors for all kinds of runs."""
    found = of(gpu)
    if found is None:
        return f"no calibration of {gpu}"
    errors = []
    if found.held_back:
        errors.append(_errors(found.held_back))
    if found.held_back_by_host:
        errors.append(f"{_errors(found.held_back_by_host)} of experts or that wait for the host")
    return f"{found.name}; {'; '.join(errors) or 'never held against runs'}"


def _errors(held: HeldBack) -> str:
    return f"off by {held.median:.0%}, at most {held.worst:.0%}, in {held.rows} other runs"


@functools.cache
def _read(path: Path, _changed: int) -> Calibration:
    try:
        found = records.read(Calibration, path)
        if not (found.products and found.layer and {"forward", "backward"} <= found.attention.keys()):
            raise ValueError("it lacks products, layers or attention")
        return found
    except ValueError as error:  # includes invalid JSON and records
        raise InputError(
            f"{path} is not a calibration ({error}): remove it, or call `megaboa calibrate` again"
        ) from None


@functools.cache
def _scaled(kind: str) -> Calibration:
    """Calibration of the nearest measured GPU, scaled by data sheets' operations per second, except links and host."""
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
        held_back_by_host=None,
    )
