"""Summarizes logs."""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd

from megaboa.observe.logs.events import Event, LineFormat, Note, Steps
from megaboa.observe.logs.reader import Count
from megaboa.observe.numbers import WARMUP_STEPS, loss_summary, spread, without_nan
from megaboa.records import (
    Energy,
    GradNorm,
    LogMfu,
    LogNumbers,
    LogStepTime,
    Loss,
    Spread,
    Stragglers,
    parse,
)

# Fields that have their own place in the summary; all others are listed under `further`.
_PLACED = {
    "step", "attempt", "total", "replayed", "not_finite", "interval", "seconds", "loss", "grad_norm", "tflops_per_gpu",
    "batch", "tokens_per_second_per_gpu", "mfu", "skipped", "nan", "joules_per_gpu", "watts_per_gpu",
    "consumed_samples", "consumed_tokens", "seq_length", "peak_reserved",
}  # fmt: skip
_OF_SPEED = (
    "step", "seconds", "tflops_per_gpu", "batch", "tokens_per_second_per_gpu", "mfu", "joules_per_gpu", "watts_per_gpu",
    "seq_length",
)  # fmt: skip


class LogSummary:
    """Summarizes the events of a log, or of several logs of one run."""

    def __init__(self) -> None:
        self.count = Count()
        self.curve = Curve()
        self._notes: dict[str, list[Note]] = defaultdict(list)
        self._peaks: dict[str, dict[str, float]] = defaultdict(dict)
        self._ranks: set[str] = set()
        self._ratios, self._slowest, self._compiling = array("d"), Counter[str](), True

    def read(self, events: Iterable[Event], rank: str | None = None) -> None:
        """Add a log. `rank`: the rank of lines that don't name theirs."""
        self._compiling = True
        for event in events:
            of = event.rank or rank
            if of is not None:
                self._ranks.add(of)
            if isinstance(event, Steps):
                self.curve.add(event if event.rank == of else Steps(event.layout, event.numbers, of, event.label))
            elif event.kind == "start":
                self._compiling = True
                self.curve.start(of)
            elif event.kind == "memory":
                peaks = self._peaks[of or "0"]
                peaks |= {name: max(value, peaks.get(name, 0.0)) for name, value in event.values.items()}
            elif event.kind == "stragglers":
                self._watch(event.values)
            else:
                self._keep(event)

    def _watch(self, report: dict[str, Any]) -> None:
        """Record a straggler report, except the first one of each attempt, whose steps compile kernels."""
        if not self._compiling and report["fastest_ms"]:
            self._ratios.append(report["slowest_ms"] / report["fastest_ms"])
            self._slowest[report["slowest_rank"]] += 1
        self._compiling = False

    def _keep(self, note: Note) -> None:
        """Keep a note; repeated values only once, because logs can be endless."""
        kept = self._notes[note.kind]
        if note.kind != "validation" and note.values in [other.values for other in kept]:
            return
        kept.append(note)

    def summarize(self, seq_length: int | None = None, peak_tflops: float | None = None) -> LogNumbers:
        settings = {name: value for note in self._notes["setting"] for name, value in note.values.items()}
        frame = with_intervals(self.curve.steps())
        final = frame[~frame["replayed"]] if len(frame) and frame["replayed"].any() else frame
        timed, source = _timed(final) if "seconds" in final else self._speeds()
        tflops = _spread_of(timed, "tflops_per_gpu")
        found = without_nan(
            {
                "bytes": self.count.bytes,
                "lines": {
                    "all": self.count.lines,
                    "understood": self.count.understood,
                    "torn": self.count.torn,
                    "unknown": self.count.unknown,
                },
                "dialects": self.curve.dialects,
                "ranks": sorted(self._ranks, key=lambda rank: (len(rank), rank)),
                "attempts": self.curve.attempt,
                "steps": _steps(frame, final, self.curve.copies),
                "step_seconds": _step_seconds(timed, source),
                "tflops_per_gpu": tflops,
                "mfu": _mfu(timed, tflops, peak_tflops),
                **_throughput(timed, seq_length or settings.get("seq_length")),
                "loss": _loss(final),
                "grad_norm": _grad_norm(final),
                "skipped_iterations": _sum(final, "skipped"),
                "nan_iterations": _sum(final, "nan"),
                "not_finite_losses": int(final["not_finite"].eq(True).sum()) if "not_finite" in final else 0,
                "energy": _energy(timed),
                "stragglers": self._stragglers(),
                "memory": _memory(self._peaks, final),
                "parameters": [note.values for note in self._notes["parameters"]],
                "validation": _validation(self._notes["validation"]),
                "saved": [note.values["step"] for note in self._notes["saved"]],
                "settings": settings,
                "further": _further(final),
            }
        )
        return parse(LogNumbers, found, "the summary of a log")

    def _stragglers(self) -> Stragglers | None:
        """How much longer the slowest rank's forward passes took than the fastest's, and how often each rank was
        slowest."""
        ratios = spread(np.array(self._ratios))
        return ratios and Stragglers(slowest_over_fastest=ratios, slowest=dict(self._slowest.most_common()))

    def _speeds(self) -> tuple[pd.DataFrame, str]:
        """Times of lines without a step number, for logs that have no others, and a description of them.

        The first steps of every attempt are left out.
        """
        frame = self.curve.speeds()
        if frame.empty:
            return frame, "none"
        frame = frame.assign(step=frame.groupby("attempt").cumcount() + 1)
        return frame[frame["step"] > WARMUP_STEPS], "Step Time lines, numbered in their order"


def with_intervals(frame: pd.DataFrame) -> pd.DataFrame:
    """Add `interval`, the number of steps that a line covers. The first line of an attempt gets the smallest of all."""
    if frame.empty:
        return frame
    ordered = frame if (frame["attempt"] == 1).all() else frame.sort_values(["attempt", "step"], kind="stable")
    interval = ordered.groupby("attempt")["step"].diff()
    usual = interval.min()
    interval = interval.fillna(1.0 if np.isnan(usual) else usual).clip(upper=ordered["step"])
    frame["interval"] = interval
    return frame


def _timed(final: pd.DataFrame) -> tuple[pd.DataFrame, str]:
    """The lines that count for the speed: those that cover none of the first few steps of an attempt."""
    before = final["step"] - final["interval"]
    begin = before.groupby(final["attempt"]).transform("min")
    usable = (before - begin >= WARMUP_STEPS) & (final["seconds"] > 0)
    return final.loc[usable, [name for name in _OF_SPEED if name in final]], "step lines"


def _steps(frame: pd.DataFrame, final: pd.DataFrame, copies: int) -> dict[str, Any] | None:
    if frame.empty:
        return None
    return {
        "first": int(final["step"].min()),
        "last": int(final["step"].max()),
        "total": int(frame["total"].max()) or None,
        "printed": len(final),
        "interval": int(frame["interval"].min()),
        "replayed": int(frame["replayed"].sum()),
        "copies": copies,
    }


def _spread_of(frame: pd.DataFrame, name: str) -> Spread | None:
    return spread(frame[name].dropna().to_numpy()) if name in frame else None


def _step_seconds(timed: pd.DataFrame, source: str) -> LogStepTime | None:
    if not (found := _spread_of(timed, "seconds")):
        return None
    window = (int(timed["step"].min()), int(timed["step"].max()))
    return LogStepTime(median=found.median, p5=found.p5, p95=found.p95, n=found.n, window=window, source=source)


def _throughput(timed: pd.DataFrame, seq_length: int | None) -> dict[str, Any]:
    """Throughput from batch and step time; in tokens if the sequence length is known."""
    per_gpu = _spread_of(timed, "tokens_per_second_per_gpu")
    samples = timed["batch"] / timed["seconds"] if {"batch", "seconds"} <= set(timed) else pd.Series(dtype=float)
    lengths = timed.get("seq_length", seq_length)
    return {
        "samples_per_second": spread(samples.dropna().to_numpy()),
        "tokens_per_second": None if lengths is None else spread((samples * lengths).dropna().to_numpy()),
        "tokens_per_second_per_gpu": per_gpu,
        "seq_length": seq_length,
    }


def _mfu(timed: pd.DataFrame, tflops: Spread | None, peak: float | None) -> LogMfu | None:
    if tflops and peak:
        return LogMfu(median=tflops.median / peak, peak_tflops=peak)
    printed = _spread_of(timed, "mfu")
    return printed and LogMfu(median=printed.median, peak_tflops=None)


def _loss(final: pd.DataFrame) -> Loss | None:
    if "loss" not in final:
        return None
    # a line that covers only skipped steps has no loss
    known = final["not_finite"].notna()
    return loss_summary(final.loc[known, "step"].tolist(), final.loc[known, "loss"].tolist())


def _grad_norm(final: pd.DataFrame) -> GradNorm | None:
    norms = final["grad_norm"].dropna() if "grad_norm" in final else pd.Series(dtype=float)
    return GradNorm(last=float(norms.iloc[-1]), max=float(norms.max())) if len(norms) else None


def _sum(final: pd.DataFrame, name: str) -> int | None:
    return int(np.nansum(final[name])) if name in final else None


def _energy(timed: pd.DataFrame) -> Energy | None:
    joules, watts = _spread_of(timed, "joules_per_gpu"), _spread_of(timed, "watts_per_gpu")
    return Energy(joules_per_gpu_and_step=joules, watts_per_gpu=watts) if joules or watts else None


def _memory(peaks: dict[str, dict[str, float]], final: pd.DataFrame) -> dict[str, Any] | None:
    """The peak over all ranks, and that of each rank, in bytes."""
    if not peaks:
        on_steps = final["peak_reserved"].max() if "peak_reserved" in final else np.nan
        return None if np.isnan(on_steps) else {"peak_bytes": {"reserved": float(on_steps)}, "by_rank": {}}
    names = sorted({name for of_rank in peaks.values() for name in of_rank})
    most = {name: max(of_rank.get(name, 0.0) for of_rank in peaks.values()) for name in names}
    return {"peak_bytes": most, "by_rank": {rank: peaks[rank] for rank in sorted(peaks, key=lambda r: (len(r), r))}}


def _validation(notes: list[Note]) -> list[dict[str, Any]]:
    """Validation losses; of a repeated evaluation the last."""
    found = {(note.values["step"], note.values["at"]): note.values for note in notes}
    return list(found.values())


def _further(final: pd.DataFrame) -> dict[str, dict[str, Any]]:
    found = {}
    for name in (name for name in final if name not in _PLACED):
        numbers = final[name].dropna()
        if len(numbers):
            known = {"last": numbers.iloc[-1], "min": numbers.min(), "max": numbers.max()}
            found[name] = {"n": len(numbers), **{key: float(value) for key, value in known.items()}}
    return found


class Curve:
    """A table of a log's steps. It separates attempts, marks repeated steps and drops copies from other ranks.

    It accepts steps as they come, and takes eight bytes for every printed number.
    """

    def __init__(self) -> None:
        self.attempt = 1
        self.copies = 0  # number of dropped lines: another rank, or the same one, has already printed the step
        self._tables: dict[tuple[LineFormat, int], array[float]] = {}
        self._recent = (-1, -1)  # the last two steps
        self._starts: Counter[str | None] = Counter()
        self._pending = False  # a start was announced after steps, so the next step belongs to a new attempt
        self._mains: dict[bool, str | None] = {}  # the rank whose lines are kept, with and without a step number

    def start(self, rank: str | None) -> None:
        """Handle a start of training. Every rank may announce it, some only after others have done their first step."""
        self._starts[rank] += 1
        if self._starts[rank] >= self.attempt and any(attempt == self.attempt for _, attempt in self._tables):
            self._pending = True

    def add(self, steps: Steps) -> None:
        numbered = steps.layout.numbered
        if self._pending:
            self._begin_attempt()
        if self._mains.setdefault(numbered, steps.rank) != steps.rank:
            self.copies += steps.count
            return
        if not numbered:
            self._keep(steps.layout, steps.numbers)
            return
        done = np.frombuffer(steps.numbers)[:: steps.layout.width] + steps.layout.zero_based
        if done[0] > self._recent[1] and (np.diff(done) > 0).all():
            self._keep(steps.layout, steps.numbers)
            self._recent = (done[-2] if len(done) > 1 else self._recent[1], done[-1])
            return
        for number, step in enumerate(done):
            width = steps.layout.width
            self._add_one(steps.layout, steps.numbers[number * width : (number + 1) * width], step)

    def _add_one(self, layout: LineFormat, numbers: array[float], step: float) -> None:
        if step in self._recent:
            self.copies += 1
            return
        if step < self._recent[1]:
            self._begin_attempt()
        self._keep(layout, numbers)
        self._recent = (self._recent[1], step)

    def _begin_attempt(self) -> None:
        self.attempt += 1
        self._pending = False
        self._recent = (-1, -1)
        self._mains.clear()

    def _keep(self, layout: LineFormat, numbers: array[float]) -> None:
        self._tables.setdefault((layout, self.attempt), array("d")).extend(numbers)

    @property
    def dialects(self) -> list[str]:
        return sorted({layout.dialect for layout, _ in self._tables})

    def steps(self) -> pd.DataFrame:
        """One row per printed step and attempt: `step`, `attempt`, `total`, `replayed`, and every field."""
        frame = self._frame(numbered=True)
        if frame.empty:
            return frame
        if not frame["step"].is_monotonic_increasing:
            frame = frame.sort_values(["step", "attempt"], kind="stable", ignore_index=True)
        # A later attempt undoes all steps from its first one on, whether or not it prints the same steps.
        undone = pd.Series(False, index=frame.index)
        firsts = frame.groupby("attempt")["step"].min()
        for attempt, first in firsts.iloc[1:].items():
            undone |= (frame["attempt"] < attempt) & (frame["step"] >= first)
        frame["replayed"] = undone
        return frame

    def speeds(self) -> pd.DataFrame:
        """Lines about a step that they don't name, in order."""
        return self._frame(numbered=False)

    def _frame(self, numbered: bool) -> pd.DataFrame:
        parts = [
            _part(layout, attempt, numbers)
            for (layout, attempt), numbers in self._tables.items()
            if layout.numbered == numbered
        ]
        if len(parts) < 2:
            return parts[0] if parts else pd.DataFrame()
        return pd.concat(parts, ignore_index=True)


def _part(layout: LineFormat, attempt: int, numbers: array[float]) -> pd.DataFrame:
    rows = np.frombuffer(numbers).reshape(-1, layout.width)
    columns = {
        "step": rows[:, 0].astype("int64") + layout.zero_based,
        "attempt": attempt,
        "total": rows[:, 1] + layout.zero_based,
    }
    for place, (name, scale) in enumerate(layout.known()):
        columns[name] = rows[:, place + 2] if scale == 1.0 else rows[:, place + 2] * scale
    if "loss" in columns:
        columns["not_finite"] = ~np.isfinite(columns["loss"])
    return pd.DataFrame(columns, copy=False)
