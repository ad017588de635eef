"""The driver's readings of links and clocks while the health check puts GPUs to work. Standard library only."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from megaboa.run.gpu_use import POWER_CAP, slowed
from megaboa.run.nvml import Nvml, NvmlError

# Limits during a check: fewer errors are harmless, because they are corrected.
NVLINK_ERRORS = 10
PCIE_REPLAYS = 80  # the limit of NVIDIA's DCGM in its own PCIe test
OFTEN = 2  # number of looks: a single one may catch a clock on its way up


@dataclass
class Watched:
    """Readings of a GPU; None: not reported by the driver."""

    index: int
    name: str | None
    nvlinks: int | None = None  # number of active links
    nvlink_errors: int | None = None  # since the check began
    pcie_lanes: int | None = None
    most_pcie_lanes: int | None = None  # for this GPU in this slot
    pcie_replays: int | None = None  # since the check began
    sm_mhz: int | None = None  # maximum seen
    most_sm_mhz: int | None = None
    slowed: dict[str, int] = field(default_factory=dict)  # reason -> number of looks that saw it


class Watch:
    """Watches GPUs while they work, by repeated calls of `look`. Watches none if the driver's library can't be used."""

    def __init__(self, uuids: Collection[str]):
        try:
            self._gpus = [gpu for gpu in Nvml().gpus() if gpu.uuid in uuids]
        except NvmlError:
            self._gpus = []
        self._errors = [(gpu.nvlink_errors, gpu.pcie_replays) for gpu in self._gpus]
        self._slowed: list[Counter[str]] = [Counter() for _ in self._gpus]
        self._clocks: list[list[int]] = [[] for _ in self._gpus]

    def look(self) -> None:
        for gpu, seen, clocks in zip(self._gpus, self._slowed, self._clocks, strict=True):
            seen.update(name for name in slowed(gpu.reasons or 0) if name != POWER_CAP)
            clocks += [] if (clock := gpu.sm_mhz) is None else [clock]

    def found(self) -> list[Watched]:
        seen = zip(self._gpus, self._errors, self._slowed, self._clocks, strict=True)
        return [
            Watched(
                index=gpu.index,
                name=gpu.name,
                nvlinks=gpu.nvlinks,
                nvlink_errors=_more(gpu.nvlink_errors, nvlink),
                pcie_lanes=gpu.pcie_lanes,
                most_pcie_lanes=gpu.most_pcie_lanes,
                pcie_replays=_more(gpu.pcie_replays, pcie),
                sm_mhz=max(clocks, default=None),
                most_sm_mhz=gpu.most_sm_mhz,
                slowed=dict(names),
            )
            for gpu, (nvlink, pcie), names, clocks in seen
        ]


def _more(now: int | None, before: int | None) -> int | None:
    return None if now is None or before is None else max(0, now - before)


def problems(found: Sequence[Watched]) -> list[str]:
    return [f"GPU {one.index}: {said}" for one in found for said in _problems(one, found)]


def _problems(one: Watched, found: Sequence[Watched]) -> Iterator[str]:
    peers = [peer.nvlinks for peer in found if peer is not one and peer.name == one.name and peer.nvlinks is not None]
    if peers and one.nvlinks is not None and one.nvlinks < (usual := statistics.median_high(peers)):
        yield f"{one.nvlinks} of its NVLinks are up, and {usual} of the other GPUs'"
    if (one.nvlink_errors or 0) >= NVLINK_ERRORS:
        yield f"{one.nvlink_errors} NVLink errors while it was tested"
    if one.pcie_lanes and one.most_pcie_lanes and one.pcie_lanes < one.most_pcie_lanes:
        yield f"{one.pcie_lanes} of its {one.most_pcie_lanes} PCIe lanes are up"
    if (one.pcie_replays or 0) >= PCIE_REPLAYS:
        yield f"{one.pcie_replays} PCIe replays while it was tested"
    yield from (f"slowed down by {name} while it was tested" for name, looks in one.slowed.items() if looks >= OFTEN)
