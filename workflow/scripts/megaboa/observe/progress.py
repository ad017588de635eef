"""How far a run has come, told by the files in its store. Standard library only: the supervisor prints it too."""

from __future__ import annotations

import json
import math
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaboa.files import read_json, read_jsonl
from megaboa.results import RunStore

# Long enough for the last hundred steps or so, whatever the length of steps.jsonl.
TAIL_BYTES = 32_768
# Steps over which the speed is measured: enough to be calm, few enough to follow a change.
SPEED_WINDOW = 20


@dataclass(frozen=True)
class Progress:
    """One run at one moment. `state` is waiting, running, done, failed or interrupted."""

    run: str
    state: str
    step: int = 0
    total: int | None = None
    loss: float | None = None
    steps_per_second: float | None = None
    attempt: int = 0
    host: str | None = None
    pid: int | None = None
    age_seconds: float | None = None
    detail: str | None = None

    @property
    def eta_seconds(self) -> float | None:
        if self.state != "running" or not self.total or not self.steps_per_second:
            return None
        return max(self.total - self.step, 0) / self.steps_per_second


def read_progress(run_store: str | Path, run: str | None = None, now: float | None = None) -> Progress:
    """Read a run's state from its store; `now` (unix seconds) is only for the age of the last event."""
    store = RunStore(Path(run_store))
    run = run or store.path.parent.name
    total = last_step(store)
    attempts = read_jsonl(store.ledger)
    starts = [event for event in attempts if event["event"] == "start"]
    if not starts:
        return Progress(run, "waiting", total=total)
    start = starts[-1]
    number = start["attempt"]
    end = next((e for e in reversed(attempts) if e["event"] == "end" and e["attempt"] == number), None)
    events = read_tail(store.attempt(number).steps)
    steps = [event for event in events if event["event"] == "step"]
    state, detail = _state(start, end)
    last_time = max(event["time"] for event in [start, *events, *([end] if end else [])])
    return Progress(
        run=run,
        state=state,
        step=_step(start, end, events),
        total=total,
        loss=steps[-1].get("loss") if steps else None,
        steps_per_second=speed(steps),
        attempt=number,
        host=start.get("host"),
        pid=start.get("pid"),
        age_seconds=max((time.time() if now is None else now) - last_time, 0.0),
        detail=detail,
    )


def last_step(store: RunStore) -> int | None:
    """The step at which the run is over: from its identity or, for a recipe, as its ranks found it."""
    asked = read_json(store.identity)["run"]["training"].get("train_iters") if store.identity.exists() else None
    if asked is None and store.found.exists():
        return read_json(store.found)["train_iters"]
    return asked


def read_tail(path: str | Path, size: int = TAIL_BYTES) -> list[dict[str, Any]]:
    """The last complete lines of a JSON-lines file, without reading the rest of it."""
    path = Path(path)
    if not path.exists():
        return []
    with path.open("rb") as stream:
        start = max(stream.seek(0, os.SEEK_END) - size, 0)
        # One byte more, to see whether the tail begins at the beginning of a line.
        stream.seek(max(start - 1, 0))
        text = stream.read()
    lines = text.split(b"\n")[1 if start else 0 : -1]
    return [json.loads(line) for line in lines if line.strip()]


def speed(steps: list[dict[str, Any]]) -> float | None:
    """Steps per second by the clock, pauses for saving and evaluation included, because an ETA includes them."""
    window = steps[-SPEED_WINDOW:]
    if len(window) > 1 and window[-1]["time"] > window[0]["time"]:
        return (len(window) - 1) / (window[-1]["time"] - window[0]["time"])
    if window and window[-1].get("seconds"):
        return 1 / window[-1]["seconds"]
    return None


def describe(progress: Progress) -> str:
    """For people: `12/30  loss 5.213  8.1 steps/s  ETA 0:02`."""
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
    """Two digits that say something, also for a step that takes minutes."""
    return f"{value:.1f}" if value >= 1 else f"{value:.2g}"


def format_duration(seconds: float) -> str:
    """`0:02`, `12:05`, `3:07:00`, `2d 03:07`."""
    whole = math.ceil(seconds)
    minutes, second = divmod(whole, 60)
    hours, minute = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24}d {hours % 24:02d}:{minute:02d}"
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def _step(start: dict[str, Any], end: dict[str, Any] | None, events: list[dict[str, Any]]) -> int:
    reached = [event["step"] for event in events if "step" in event]
    if reached:
        return reached[-1]
    return (end or {}).get("iteration") or start.get("resumed_from") or 0


def _state(start: dict[str, Any], end: dict[str, Any] | None) -> tuple[str, str | None]:
    if end:
        outcome = end["outcome"]
        return ("done", None) if outcome == "completed" else (outcome, end.get("detail"))
    if start.get("host") != socket.gethostname():
        return "running", None
    if _alive(start["pid"]):
        return "running", None
    return "interrupted", f"process {start['pid']} is gone"


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
