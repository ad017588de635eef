"""The costs of a run: tokens, operations, time, GPU-hours, and disk space."""

from __future__ import annotations

import csv
import functools
import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from megaboa import files, paths, peaks, records
from megaboa.check import adapters, calibration, flops, memory, parameters, speed
from megaboa.check.facts import Facts
from megaboa.check.parameters import Parameters
from megaboa.formats import counted
from megaboa.records import RunSpec, Summary, Tree

OWN = "own measurement"  # source of a step time that the trained run itself took: no expectation of it
# The keys of a run's training that determine the time of a step.
SIZES = ("global_batch_size", "micro_batch_size", "seq_length", "precision")


@dataclass(frozen=True)
class Correction:
    """Median factor by which earlier runs of this model on this GPU took longer than predicted, and their number."""

    ratio: float
    runs: int


@dataclass(frozen=True)
class History:
    """Measurements from all experiments' passed runs: seconds per step by speed key, corrections by model key, and
    each run's own seconds by experiment and run."""

    seconds: dict[str, float] = field(default_factory=dict)
    corrections: dict[str, Correction] = field(default_factory=dict)
    own: dict[tuple[str, str], float] = field(default_factory=dict)

    def of(self, run: RunSpec, gpu: str | None) -> tuple[float | None, Correction | None]:
        return self.seconds.get(speed_key(run, gpu)), self.corrections.get(model_key(run, gpu))


@dataclass(frozen=True)
class Costs:
    """Costs of a run; None means unknown. `source`: origin of the step time; `predicted`: the speed model's, in any
    case."""

    tokens: int
    flops: float
    step_seconds: float | None
    source: str
    predicted: speed.Step | None
    ranks: int
    iters: int  # that the run itself trains, without its parent's
    checkpoint_bytes: float
    checkpoints: int  # maximum number at a time
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
    own: float | None = None,
    earlier: tuple[float | None, Correction | None] = (None, None),
    mfu: float | None = None,
    exported: bool = False,
) -> Costs | None:
    """The costs of a run. `given`: seconds per step in the experiment; `own`: that the run has taken; `earlier`: the
    entry in the `History` for runs like it.

    Without these, step times come from the speed model, or from `mfu`, a share of the peak, if that is set.
    """
    iters = f.training.own_iters
    if not memory.is_known(f) or iters is None or f.training.gbs is None:
        return None
    step = flops.of_step(f)
    predicted = speed.of_step(f) if f.cluster.device == "cuda" and speed.is_known(f) else None
    seconds, source = _step_seconds(f, step, given, own, earlier, mfu, predicted)
    model = parameters.whole(f)
    saved = Parameters(adapters.of_model(f), 0.0) if f.is_frozen else model
    width = 4 if f.training.precision == "fp32" else 2
    repeated = 4 if width == 4 and f.layout.sharding != "no_shard" else 0  # fp32 weights, by a distributed optimizer
    return Costs(
        tokens=iters * f.training.gbs * (f.training.seq_length or 0),
        flops=iters * step,
        step_seconds=seconds,
        source=source,
        predicted=predicted,
        ranks=f.layout.world_size or 1,
        iters=iters,
        checkpoint_bytes=saved.total * (width + repeated) + memory.optimizer_bytes(f, saved),
        checkpoints=_checkpoints(f),
        export_bytes=model.total * width if exported else 0.0,
    )


def _step_seconds(
    f: Facts,
    step: float,
    given: float | None,
    own: float | None,
    earlier: tuple[float | None, Correction | None],
    mfu: float | None,
    predicted: speed.Step | None,
) -> tuple[float | None, str]:
    measured, correction = earlier
    if given is not None:
        return given, "given"
    if own is not None:
        return own, OWN
    if measured is not None:
        return measured, "measured"
    peak = peaks.operations(f.cluster.gpu)
    if mfu is not None and peak is not None and f.cluster.device == "cuda":
        return step / ((f.layout.world_size or 1) * peak * mfu), f"{mfu:.0%} of peak"
    if predicted is None:
        return None, "unknown"
    by = calibration.short(f.cluster.gpu, speed.is_uncertain(f, predicted), f.cluster.nodes, f.training.precision)
    source = f"predicted by {by}"
    if correction is None:
        return predicted.seconds, source
    runs = "a run" if correction.runs == 1 else f"{correction.runs} runs"
    return predicted.seconds * correction.ratio, f"{source} x {correction.ratio:.2f}, as {runs} of this model took"


def _checkpoints(f: Facts) -> int:
    """Maximum number of checkpoints: while one is written, all that are kept still exist."""
    interval, keep = f.training.save_interval, f.training.keep_last
    saves = 1 if interval is None else 0
    if interval:
        saves = math.ceil((f.training.iters or 0) / interval) - f.training.steps_before // interval
    return saves if keep is None else min(saves, keep + 1)


def history(results: Path) -> History:
    """History from the summaries of all experiments' passed runs, and the predictions of their preflights."""
    seconds: dict[str, list[float]] = {}
    ratios: dict[str, list[float]] = {}
    own: dict[tuple[str, str], float] = {}
    predicted_in = functools.cache(_predicted_in)
    for folder in paths.measured(results):
        summary = records.read(Summary, folder.summary)
        timed = summary.step_seconds
        planned = folder.file("run").exists() and folder.file("launch").exists()
        if summary.state != "PASS" or not timed or not planned:
            continue
        if folder.summary.stat().st_mtime < folder.file("run").stat().st_mtime:  # the run was changed after that
            continue
        run, gpu = folder.run, folder.launch.gpu
        own[folder.experiment, folder.name] = timed.median
        seconds.setdefault(speed_key(run, gpu), []).append(timed.median)
        table = paths.ExperimentFolder(folder.path.parents[1]).preflight_table
        if predicted := predicted_in(table, calibration.name(gpu)).get(folder.path.name):
            ratios.setdefault(model_key(run, gpu), []).append(timed.median / predicted)
    return History(
        {key: statistics.median(values) for key, values in seconds.items()},
        {key: Correction(statistics.median(values), len(values)) for key, values in ratios.items()},
        own,
    )


def _predicted_in(table: Path, by: str) -> dict[str, float]:
    """Predicted seconds per step by run, if made with the present calibration: errors of an earlier calibration say
    nothing about the present one."""
    if not table.exists():
        return {}
    with table.open(encoding="utf-8", newline="") as stream:
        rows = [row for row in csv.DictReader(stream, delimiter="\t") if row.get("model_by") == by]
    said = {row["run"]: row["model_seconds"] for row in rows}
    return {run: float(text) for run, text in said.items() if text and text != "-"}


def speed_key(run: RunSpec, gpu: str | None) -> str:
    """Key for runs with the same speed: without names, seeds, learning rates and numbers of steps."""
    sizes = {name: run.training.get(name) for name in SIZES}
    same = {name: getattr(run, name) for name in ("parallel", "world_size", "device", "overrides")}
    tuned = {"task": run.task, "tuning": {**run.tuning, "template": None, "samples": None}} if run.is_tuned else {}
    return files.digest({"model": _model(run), "sizes": sizes, "gpu": gpu, **same, **tuned})


def model_key(run: RunSpec, gpu: str | None) -> str:
    """Key for a model in a precision on a GPU, in any layout and batch; training only adapters has a key of its own."""
    task = {"task": run.task} if run.has_adapters else {}
    return files.digest({"model": _model(run), "precision": run.training.get("precision"), "gpu": gpu, **task})


def _model(run: RunSpec) -> Tree:
    return {name: value for name, value in run.model.items() if name not in ("name", "init", "seed")}


@dataclass(frozen=True)
class Total:
    """Total of a plan. `unknown`: number of runs whose GPU-hours are unknown; `uncounted`: of these, runs of which
    nothing is known. The sums don't include them."""

    tokens: int
    flops: float
    gpu_hours: float
    disk_bytes: float
    unknown: int
    uncounted: int = 0


def total(costs: Iterable[Costs | None]) -> Total:
    found = list(costs)
    known = [one for one in found if one is not None]
    return Total(
        tokens=sum(one.tokens for one in known),
        flops=sum(one.flops for one in known),
        gpu_hours=sum(one.gpu_hours or 0.0 for one in known),
        disk_bytes=sum(one.disk_bytes for one in known),
        unknown=sum(one is None or one.gpu_hours is None for one in found),
        uncounted=len(found) - len(known),
    )


UNITS = {"M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}


def bytes_of(text: str) -> float:
    """`500G`, `1.5T`."""
    return float(text[:-1]) * UNITS[text[-1]]


# Said of runs whose step time is unknown where budget.gpu_hours is set.
UNCHECKED = "budget.gpu_hours: isn't checked where the step time is unknown: set resources.step_seconds"


def over_budget(found: Total, gpu_hours: float | None, disk: str | None) -> dict[str, str]:
    """Exceeded limits: the key, and a message."""
    missing = f" (without {counted(found.unknown, 'run')} of which that isn't known)" if found.unknown else ""
    problems = {}
    if gpu_hours is not None and found.gpu_hours > gpu_hours:
        hours = _above(found.gpu_hours, gpu_hours)
        problems["budget.gpu_hours"] = f"{gpu_hours:,.6g} is less than the {hours} GPU-hours of the plan"
    if disk is not None and found.disk_bytes > bytes_of(disk):
        unit = next((one for one in reversed(UNITS) if UNITS[one] <= found.disk_bytes), "M")
        written = _above(found.disk_bytes / UNITS[unit], bytes_of(disk) / UNITS[unit])
        problems["budget.disk"] = f"{disk} is less than the {written} {unit}B that the plan writes"
    return {key: text + missing for key, text in problems.items()}


def _above(number: float, limit: float) -> str:
    """A number above a limit, with as many digits, at least three, as show that it is."""
    rounded = (float(f"{number:.{digits}g}") for digits in range(3, 18))
    return f"{next(one for one in rounded if one > limit):,.15g}"
