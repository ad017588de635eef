"""The calibration of a GPU: the experiment's own, as `megaboa calibrate` wrote it, or else the one that is shipped."""

from __future__ import annotations

import functools
from pathlib import Path

from megaboa import records
from megaboa.records import Calibration

FOLDER = Path("calibrations")  # of the user's working directory
SHIPPED = Path(__file__).parent / "calibrations"
SAME = {"h800": "h100", "gb200": "b200", "gb300": "b200", "b300": "b200"}  # the nearest that was measured


def of(gpu: str | None) -> Calibration | None:
    """By the name in resources.gpu, as h100-80g; None where there is none for this GPU."""
    kind = (gpu or "").split("-")[0]
    for folder in (FOLDER, SHIPPED):
        for name in (kind, SAME.get(kind, kind)):
            path = folder / f"{name}.json"
            if path.exists():
                return _read(path, path.stat().st_mtime_ns)
    return None


@functools.cache
def _read(path: Path, _changed: int) -> Calibration:
    return records.read(Calibration, path)
