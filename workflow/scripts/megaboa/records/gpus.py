"""attempts/NN/gpus/<host>.jsonl: the driver's readings of a node's GPUs during an attempt."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from megaboa.records.base import IF_SET, Event, Record, events

COUNTS = ("ecc_corrected", "ecc_uncorrected", "nvlink_errors")
Values = tuple[float | None, ...]  # one for each of `GpusFound.gpus`; None: not reported by the driver


@dataclass(frozen=True, kw_only=True)
class GpuFound(Record):
    index: int  # the driver's index, as in nvidia-smi
    uuid: str | None = None
    name: str | None = None
    pci: str | None = None
    limit_watts: float | None = None
    default_limit_watts: float | None = None
    most_sm_mhz: float | None = None


@dataclass(frozen=True, kw_only=True)
class GpusFound(Event):
    event = "gpus"
    host: str
    seconds: float  # initial sampling interval
    driver: str | None = None
    gpus: tuple[GpuFound, ...] = ()


@dataclass(frozen=True, kw_only=True)
class GpuSample(Event):
    """One sample of all GPUs. Error counts are since the driver was loaded, and only written when one has changed."""

    event = "sample"
    utilisation: Values = ()  # percent of the time in which a kernel ran
    watts: Values = ()
    celsius: Values = ()
    memory_celsius: Values = ()
    sm_mhz: Values = ()
    memory_mhz: Values = ()
    used_mib: Values = ()
    reasons: tuple[int | None, ...] = ()  # bits of NVML's clock event reasons
    ecc_corrected: Values = field(default=(), metadata=IF_SET)
    ecc_uncorrected: Values = field(default=(), metadata=IF_SET)
    nvlink_errors: Values = field(default=(), metadata=IF_SET)
    errors: dict[str, str] = field(default_factory=dict)  # by position in the list: GPUs that stopped answering

    @property
    def counts(self) -> tuple[Values, ...]:
        return tuple(getattr(self, name) for name in COUNTS)


@dataclass(frozen=True, kw_only=True)
class NotSampled(Event):
    event = "failed"
    host: str
    detail: str


GPU_EVENTS = {kind.event: kind for kind in (GpusFound, GpuSample, NotSampled)}


def read_gpu_events(path: str | Path, every: int = 1) -> list[Event]:
    """The events of a file, oldest first, without incomplete lines. `every`: only every n-th sample is read."""
    lines = Path(path).read_text(encoding="utf-8", errors="replace").split("\n") if Path(path).exists() else []
    found = []
    for one in every_so_many(lines, every):
        with contextlib.suppress(json.JSONDecodeError):
            found.append(json.loads(one))
    return events(GPU_EVENTS, found, path)


def every_so_many(lines: Iterable[str], every: int) -> list[str]:
    """Every n-th sample, and all lines with error counts, so that no error is missed."""
    kept, seen = [], 0
    for one in filter(None, lines):
        plain = f'"event": "{GpuSample.event}"' in one and not any(name in one for name in COUNTS)
        if not plain or seen % every == 0:
            kept.append(one)
        seen += plain
    return kept
