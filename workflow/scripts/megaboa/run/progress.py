"""A run's progress, from the files in its store. Standard library only, because the supervisor prints it too."""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megaboa import files
from megaboa.records import (
    STEPS,
    AttemptEnd,
    AttemptStart,
    Called,
    Cancelled,
    Evaluated,
    Found,
    GaveUp,
    Identity,
    Phase,
    Saved,
    Step,
    StepEvent,
    events,
    read,
    read_ledger,
)
from megaboa.run import ledger
from megaboa.store import is_running
from megaboa.store_paths import AttemptFolder, RunStore

# Enough for about the last hundred steps, whatever the length of steps.jsonl.
TAIL_BYTES = 32_768
# Steps for measuring the speed: enough to be steady, few enough to follow a change.
SPEED_WINDOW = 20
SAVES_FROM_ATTEMPTS = 3
LIFE = (Called, AttemptStart, AttemptEnd, Cancelled, GaveUp)
SAVES_BYTES = 4_194_304  # about ten thousand steps


@dataclass(frozen=True)
class Progress:
    """A run's progress at one moment. `state` is waiting, queued, running, done, failed, interrupted, lost or
    unknown, if its files may not be read.

    Files alone yield lost only if the run's store is gone, and queued only if the run requeued its own job; the rest
    comes from a scheduler.
    """

    run: str
    state: str
    step: int = 0
    total: int | None = None
    loss: float | None = None
    checkpoints: int = 0  # complete ones
    checkpoint_bytes: int = 0  # in total
    steps_per_second: float | None = None
    tokens_per_second: float | None = None
    attempt: int = 0
    host: str | None = None
    pid: int | None = None
    job: str | None = None
    nodes: tuple[str, ...] = ()
    age_seconds: float | None = None
    detail: str | None = None
    event: str | None = None  # the last event that isn't a step
    event_time: float | None = None
    goes_on: bool = False  # by the ledger: the run is being trained, or about to be
    job_state: str | None = None  # the scheduler's word for it
    job_reason: str | None = None  # why it waits
    job_stuck: bool = False  # it never starts unless somebody does what the reason says
    job_starts: float | None = None  # when the scheduler expects that it starts
    job_ends: float | None = None  # when its wall time is used up
    scheduler_silent: bool = False  # it could not be asked
    holder: str | None = None  # holder of the run, if the scheduler doesn't show its job
    slow: str | None = None  # the worst of the ranks that were slow at each of the last saves, and its score
    jobs_left: int | None = None  # estimated number of further jobs that the run needs

    @property
    def eta_seconds(self) -> float | None:
        if self.state != "running" or not self.total or not self.steps_per_second:
            return None
        return max(self.total - self.step, 0) / self.steps_per_second


def read_progress(run_store: str | Path, run: str | None = None, now: float | None = None) -> Progress:
    """Read a run's progress from its store; `now` (unix seconds) is only used for the age of the last event."""
    store = RunStore(Path(run_store))
    run = run or store.path.parent.name
    now = time.time() if now is None else now
    total = last_step(store)
    entries = read_ledger(store.ledger)
    event, event_time = ledger.last_event(entries) or (None, None)
    told = {"event": event, "event_time": event_time}
    job = next((entry.job for entry in reversed(entries) if isinstance(entry, AttemptStart | Called)), None)
    starts = ledger.starts(entries)
    # A call, a cancellation or a failure, between two attempts or before the first.
    between = next((entry for entry in reversed(entries) if isinstance(entry, LIFE)), None)
    stopped = {Cancelled: "interrupted", GaveUp: "failed"}.get(type(between))
    if not starts:
        state = stopped or ("running" if job else "waiting")  # called in a job: about to start
        goes_on, detail = job is not None and not stopped, between.detail if stopped else None
        return Progress(run, state, total=total, job=job, goes_on=goes_on, detail=detail, **told)
    start = starts[-1]
    number = start.attempt
    ends = (entry for entry in reversed(entries) if isinstance(entry, AttemptEnd) and entry.attempt == number)
    end = next(ends, None)
    called = any(isinstance(entry, Called) and entry.job for entry in entries[entries.index(end or start) :])
    newest = read_tail(store.attempt(number).steps)
    steps = [event for event in newest if isinstance(event, Step)]
    state, detail, goes_on = ("running", None, True) if called else _state(start, end)
    if stopped:
        state, detail, goes_on = stopped, between.detail, False
    last_time = max(event.time for event in [start, *newest, *([end] if end else [])])
    rate = speed(steps)
    return Progress(
        run=run,
        state=state,
        step=_step(start, end, newest),
        total=total,
        loss=steps[-1].loss if steps else None,
        steps_per_second=rate,
        tokens_per_second=rate * tokens if rate and (tokens := tokens_per_step(steps)) else None,
        attempt=number,
        host=start.host,
        pid=start.pid,
        job=job,
        nodes=start.nodes,
        age_seconds=max(now - last_time, 0.0),
        detail=detail,
        goes_on=goes_on,
        **told,
    )


def last_step(store: RunStore) -> int | None:
    """The run's last step, from its identity or, for a recipe, from what its ranks found; None if unknown."""
    asked = read(Identity, store.identity).run["training"].get("train_iters") if store.identity.exists() else None
    if asked is None and store.found.exists():
        return read(Found, store.found).train_iters
    return asked


def slowest_save(store: RunStore) -> float | None:
    """Seconds of the slowest save in the newest attempts; None if none was measured."""
    saves = [event for event in _recent(store) if isinstance(event, Saved) and not event.local]
    return max((event.seconds for event in saves if event.seconds), default=None)


def slowest_background_save(store: RunStore, completed: Mapping[int, float]) -> float | None:
    """Seconds of the slowest background save in the newest attempts, from a step's last event to the checkpoint's
    completion.

    `completed`: unix time of each checkpoint's completion. A step may have been done more than once.
    """
    begun = [(event.step, event.time) for event in _recent(store) if isinstance(event, Step | Evaluated)]
    found = []
    for iteration, moment in completed.items():
        before = [time for step, time in begun if step == iteration and time <= moment]
        found += [moment - max(before)] if before else []
    return max(found, default=None)


def _recent(store: RunStore) -> list[StepEvent]:
    """The events of the newest attempts."""
    newest = store.attempts[-SAVES_FROM_ATTEMPTS:]
    return [event for attempt in newest for event in read_tail(attempt.steps, SAVES_BYTES)]


def seconds_per_step(attempt: AttemptFolder) -> float | None:
    rate = speed([event for event in read_tail(attempt.steps) if isinstance(event, Step)])
    return 1 / rate if rate else None


def usual_seconds_per_step(store: RunStore) -> float | None:
    """Seconds per step in the newest attempt whose speed is known."""
    newest = reversed(store.attempts[-SAVES_FROM_ATTEMPTS:])
    return next((seconds for attempt in newest if (seconds := seconds_per_step(attempt))), None)


def has_steps(attempt: AttemptFolder) -> bool:
    """Whether the attempt has done a step."""
    return any(isinstance(event, Step) for event in read_tail(attempt.steps))


def read_tail(path: str | Path, size: int = TAIL_BYTES) -> list[StepEvent]:
    """The events in the last complete lines of a steps.jsonl, without reading the rest of it."""
    return events(STEPS, files.read_jsonl_tail(path, size), path)


def speed(steps: Sequence[Step]) -> float | None:
    """Steps per second of wall time. This includes pauses for saving and evaluation, because an ETA must."""
    window = steps[-SPEED_WINDOW:]
    if len(window) > 1 and window[-1].time > window[0].time:
        return (len(window) - 1) / (window[-1].time - window[0].time)
    if window and window[-1].seconds:
        return 1 / window[-1].seconds
    return None


def tokens_per_step(steps: Sequence[Step]) -> float | None:
    counts = [event.tokens for event in steps[-SPEED_WINDOW:] if event.tokens]
    return sum(counts) / len(counts) if counts else None


def describe(progress: Progress) -> str:
    """One line for people: `12/30  loss 5.213  8.1 steps/s  ETA 0:02`."""
    parts = [format_steps(progress)]
    if progress.loss is not None:
        parts.append(f"loss {progress.loss:.3f}")
    if progress.steps_per_second is not None:
        parts.append(f"{format_speed(progress.steps_per_second)} steps/s")
    if progress.eta_seconds is not None:
        parts.append(f"ETA {format_duration(progress.eta_seconds)}")
    if progress.state != "running":
        parts.append(progress.state if progress.detail is None else f"{progress.state}: {progress.detail}")
    return "  ".join(parts)


def format_steps(progress: Progress) -> str:
    return f"{progress.step}/{progress.total}" if progress.total else f"{progress.step}"


def format_speed(value: float) -> str:
    """Two significant digits below 1, so that it works for steps that take minutes."""
    return f"{value:.1f}" if value >= 1 else f"{value:.2g}"


def format_age(seconds: float) -> str:
    """`12 s`, `3 min`, `5 h`, `2 d`."""
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds // size:.0f} {unit}"
    return f"{seconds:.0f} s"


def format_duration(seconds: float) -> str:
    """`0:02`, `12:05`, `3:07:00`, `2d 03:07`."""
    whole = math.ceil(seconds)
    minutes, second = divmod(whole, 60)
    hours, minute = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24}d {hours % 24:02d}:{minute:02d}"
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def _step(start: AttemptStart, end: AttemptEnd | None, events: Sequence[StepEvent]) -> int:
    reached = [event.step for event in events if not isinstance(event, Phase) and event.step is not None]
    if reached:
        return reached[-1]
    return (end.iteration if end else 0) or start.resumed_from


def _state(start: AttemptStart, end: AttemptEnd | None) -> tuple[str, str | None, bool]:
    """The run's state, a detail, and whether it continues by itself."""
    action = end.action if end else None
    if end and end.outcome == "completed":
        return "done", None, False
    if action == "requeue":
        return "queued", end.detail, True
    here = start.host == socket.gethostname()
    if (not end or action == "resume") and (not here or is_running(start.pid)):
        return "running", None, True
    if not end:
        return "interrupted", f"process {start.pid} is gone", True
    return end.outcome, ledger.why(end), action == "resume"
