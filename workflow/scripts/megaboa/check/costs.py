"""What a run costs: tokens, operations, time, GPU-hours, and room on disk."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from megaboa import files, paths, peaks, records
from megaboa.check import flops, memory, parameters, speed
from megaboa.check.facts import Facts
from megaboa.records import RunSpec, Summary

# Of a run's training what decides how long its steps take.
SIZES = ("global_batch_size", "micro_batch_size", "seq_length", "precision")


@dataclass(frozen=True)
class Costs:
    """None means unknown. `source` says where the step time comes from."""

    tokens: int
    flops: float
    step_seconds: float | None
    source: str
    ranks: int
    iters: int
    checkpoint_bytes: float
    checkpoints: int  # at the most at one time
    export_bytes: float

    @property
    def hours(self) -> float | None:
        return None if self.step_seconds is None else self.step_seconds * self.iters / 3600

    @property
    def gpu_hours(self) -> float | None:
        return None if self.hours is None else self.hours * self.ranks

    @property
    def disk_bytes(self) -> float:
        return self.checkpoint_bytes * self.checkpoints + self.export_bytes


def of_run(
    f: Facts,
    *,
    given: float | None = None,
    measured: float | None = None,
    mfu: float | None = None,
    exported: bool = False,
) -> Costs | None:
    """`given` and `measured` are seconds per step: what the experiment says, and what an earlier run took.

    Without them the model of speed says how long a step takes, or the share `mfu` of the peak where that is set.
    """
    if not memory.is_known(f) or f.training.iters is None or f.training.gbs is None:
        return None
    step = flops.of_step(f)
    seconds, source = _step_seconds(f, step, given, measured, mfu)
    count = parameters.of_model(f)
    saved = parameters.adapters_of_model(f) if f.is_frozen else count
    width = 4 if f.training.precision == "fp32" else 2
    return Costs(
        tokens=f.training.iters * f.training.gbs * (f.training.seq_length or 0),
        flops=f.training.iters * step,
        step_seconds=seconds,
        source=source,
        ranks=f.layout.world_size or 1,
        iters=f.training.iters,
        checkpoint_bytes=saved * (width + 4 + memory.bytes_per_parameter(f)[2] - (0 if width == 4 else 4)),
        checkpoints=_checkpoints(f),
        export_bytes=count * width if exported else 0.0,
    )


def _step_seconds(
    f: Facts, step: float, given: float | None, measured: float | None, mfu: float | None
) -> tuple[float | None, str]:
    if given is not None:
        return given, "given"
    if measured is not None:
        return measured, "measured"
    peak = peaks.operations(f.cluster.gpu)
    if f.cluster.device != "cuda" or peak is None:
        return None, "unknown"
    if mfu is not None:
        return step / ((f.layout.world_size or 1) * peak * mfu), f"{mfu:.0%} of peak"
    return speed.of_step(f).seconds, "predicted"


def _checkpoints(f: Facts) -> int:
    """While one is written, those to be kept are still there."""
    interval, iters, keep = f.training.save_interval, f.training.iters or 0, f.training.keep_last
    saves = 0 if interval == 0 else 1 if interval is None else math.ceil(iters / interval)
    return saves if keep is None else min(saves, keep + 1)


def measured_speeds(results: Path) -> dict[str, float]:
    """Seconds per step by key, from the summaries of all experiments' runs that passed; the median, where there are
    several."""
    found: dict[str, list[float]] = {}
    for folder in paths.measured(results):
        summary = records.read(Summary, folder.summary)
        timed = summary.step_seconds
        planned = folder.file("run").exists() and folder.file("launch").exists()
        if summary.state != "PASS" or not timed or not planned:
            continue
        found.setdefault(speed_key(folder.run, folder.launch.gpu), []).append(timed.median)
    return {name: statistics.median(values) for name, values in found.items()}


def speed_key(run: RunSpec, gpu: str | None) -> str:
    """What decides the speed: neither names, nor seeds and learning rates, nor how many steps there are."""
    model = {name: value for name, value in run.model.items() if name not in ("name", "init", "seed")}
    sizes = {name: run.training.get(name) for name in SIZES}
    same = {name: getattr(run, name) for name in ("parallel", "world_size", "device", "overrides")}
    tuned = {"task": run.task, "tuning": {**run.tuning, "template": None}} if run.is_tuned else {}
    return files.digest({"model": model, "sizes": sizes, "gpu": gpu, **same, **tuned})


@dataclass(frozen=True)
class Total:
    """Of a plan; `unknown` runs have unknown costs and are missing from the sums."""

    tokens: int
    flops: float
    gpu_hours: float
    disk_bytes: float
    unknown: int


def total(costs: Iterable[Costs | None]) -> Total:
    found = list(costs)
    known = [one for one in found if one is not None]
    return Total(
        tokens=sum(one.tokens for one in known),
        flops=sum(one.flops for one in known),
        gpu_hours=sum(one.gpu_hours or 0.0 for one in known),
        disk_bytes=sum(one.disk_bytes for one in known),
        unknown=sum(one is None or one.gpu_hours is None for one in found),
    )


UNITS = {"M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}


def bytes_of(text: str) -> float:
    """`500G`, `1.5T`."""
    return float(text[:-1]) * UNITS[text[-1]]


def over_budget(found: Total, gpu_hours: float | None, disk: str | None) -> dict[str, str]:
    """Exceeded limits: the key, and by how much."""
    missing = f" (without {found.unknown} runs of which that isn't known)" if found.unknown else ""
    problems = {}
    if gpu_hours is not None and found.gpu_hours > gpu_hours:
        problems["budget.gpu_hours"] = f"{gpu_hours:,.6g} is less than the {found.gpu_hours:,.0f} GPU-hours of the plan"
    if disk is not None and found.disk_bytes > bytes_of(disk):
        problems["budget.disk"] = f"{disk} is less than the {found.disk_bytes / 1e9:,.0f} GB that the plan writes"
    return {key: text + missing for key, text in problems.items()}
