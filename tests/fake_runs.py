"""Result trees as real runs leave them, made in milliseconds: several attempts, torn lines, NaN, many runs."""

from __future__ import annotations

import json
import math
import os
import random
import socket
from pathlib import Path
from typing import Any

import made

from megaboa.files import digest, link, write_json, write_text
from megaboa.observe.goodput import goodput
from megaboa.observe.steps import read_attempts, read_events, step_rows, write_steps
from megaboa.observe.summary import summarize
from megaboa.records import TrainRecord, read, read_ledger, write
from megaboa.store_paths import RunStore

START = 1_700_000_000.0
LAYOUT = {"tp": 1, "pp": 1, "vpp": "-", "cp": 1, "ep": 1, "sp": "false"}


def loss_at(step: int, model: str = "dense", noise: float = 0.0) -> float:
    """A loss curve as a small model has it; `noise` is the difference that another layout's rounding makes."""
    rng = random.Random(f"{model}-{step}")
    start = 6.25 if model == "dense" else 6.31
    smooth = 3.1 + (start - 3.1) * math.exp(-step / 18)
    return smooth + rng.gauss(0, 0.03) + noise * random.Random(f"{model}-{step}-{noise}").uniform(-1, 1)


def step_event(step: int, time: float, **values: Any) -> dict[str, Any]:
    loss = values.get("loss", loss_at(step))
    event = {
        "event": "step",
        "step": step,
        "time": time,
        "seconds": 0.125,
        "loss": loss,
        "grad_norm": 1.5,
        "lr": 3e-4,
        "tokens": 1024,
        "skipped": False,
        "losses": {"lm loss": loss},
    }
    return {**event, **values}


def write_attempt(store: Path, number: int, events: list[dict[str, Any]], torn: str = "") -> None:
    """One attempt's steps.jsonl; `torn` is what a killed writer left of its last line."""
    lines = "".join(json.dumps(event) + "\n" for event in events)
    write_text(store / "attempts" / f"{number:02d}" / "steps.jsonl", lines + torn)


def start_event(attempt: int, time: float = START, **values: Any) -> dict[str, Any]:
    event = {"event": "start", "attempt": attempt, "host": socket.gethostname(), "pid": os.getpid(), "time": time}
    return {**event, "resumed_from": 0, "world_size": 1, **values}


def end_event(attempt: int, iteration: int, time: float = START + 60, **values: Any) -> dict[str, Any]:
    event = {"event": "end", "attempt": attempt, "time": time, "outcome": "completed", "iteration": iteration}
    return {**event, "detail": None, **values}


def write_attempts(store: Path, events: list[dict[str, Any]], torn: str = "") -> None:
    write_text(store / "attempts.jsonl", "".join(json.dumps(event) + "\n" for event in events) + torn)


class FakeExperiment:
    """An experiment's results below `root`, filled run by run."""

    def __init__(self, root: Path, name: str = "tiny") -> None:
        self.root = root
        self.results = root / "results" / name
        self.name = name
        self.plan: list[dict[str, Any]] = []
        self.write_plan()

    def write_plan(self) -> None:
        columns = ["run", "model", *LAYOUT, "dp", "gbs", "train_iters", "tokens"]
        lines = ["\t".join(columns), *("\t".join(str(row[column]) for column in columns) for row in self.plan)]
        write_text(self.results / "plan.tsv", "\n".join(lines) + "\n")

    def plan_run(self, run: str, model: str = "dense", dp: int = 1, steps: int = 30, **layout: object) -> Path:
        """A run that is planned and has not begun; returns the store where it will train."""
        asked = {"model": {"name": model}, "training": {"train_iters": steps}, "world_size": dp, "parallel": layout}
        write_json(self.results / "runs" / run / "run.json", asked)
        row = {"run": run, "model": model, **LAYOUT, **layout, "dp": dp, "gbs": 8, "train_iters": steps}
        self.plan = [*(old for old in self.plan if old["run"] != run), {**row, "tokens": steps * 1024}]
        self.write_plan()
        identity = {"run": asked, "model": digest(model), "tokenizer": None, "corpora": {}}
        store = self.root / "store" / "runs" / self.name / run / digest(identity)[:12]
        write_json(store / "identity.json", identity)
        return store

    def begin(self, run: str, store: Path, attempts: list[dict[str, Any]]) -> None:
        write_attempts(store, attempts)
        link(store / "attempts.jsonl", self.results / "runs" / run / "attempts.jsonl")

    def finish(self, run: str, store: Path, steps: int, world_size: int = 1) -> Path:
        """The train manifest of a run that came to its end."""
        path = self.results / "runs" / run / "train.json"
        identity = json.loads((store / "identity.json").read_text())
        train = {
            "run": run,
            "identity": digest(identity),
            "store": str(store),
            "iteration": steps,
            "train_iters": steps,
        }
        write_json(path, {**train, "checkpoint": str(store / "checkpoints"), "world_size": world_size})
        return path

    def completed_run(
        self,
        run: str,
        model: str = "dense",
        dp: int = 1,
        steps: int = 30,
        noise: float = 0.0,
        seconds: float = 0.125,
        losses: dict[int, float] | None = None,
        world_size: int = 1,
        **layout: object,
    ) -> Path:
        """A run of one attempt that reached its end; returns its train.json."""
        store = self.plan_run(run, model, dp, steps, **layout)
        rng = random.Random(run)
        time, events = START, [{"event": "train_start", "time": START, "step": 0}]
        for step in range(1, steps + 1):
            took = seconds * (8 if step == 1 else rng.uniform(0.95, 1.2))
            time += took
            loss = (losses or {}).get(step, loss_at(step, model, noise))
            further = {"load_balancing_loss": 1.0 + loss / 100} if model == "moe" else {}
            events.append(step_event(step, time, seconds=took, loss=loss, losses={"lm loss": loss, **further}))
            if step % 10 == 0:
                events.append({"event": "eval", "step": step, "time": time, "losses": {"lm loss": loss + 0.05}})
                events.append({"event": "save", "step": step, "time": time})
        write_attempt(store, 1, [*events, {"event": "end", "step": steps, "time": time}])
        self.begin(run, store, [start_event(1, world_size=world_size), end_event(1, steps, time)])
        return self.finish(run, store, steps, world_size)

    def export(self, run: str, **given: Any) -> Path:
        """An export of the run's last checkpoint; returns its export.json."""
        folder = self.results / "runs" / run
        train = read(TrainRecord, folder / "train.json")
        checkpoint = Path(train.store) / "checkpoints" / f"iter_{train.iteration:07d}"
        write(folder / "export.json", made.export(**{"run": run, "checkpoint": str(checkpoint), **given}))
        return folder / "export.json"

    def measure(self, run: str) -> None:
        """What `megaboa summarize` writes for a run."""
        folder = self.results / "runs" / run
        train = read(TrainRecord, folder / "train.json")
        store = RunStore(Path(train.store))
        events = read_events(store)
        rows = step_rows(events)
        write_steps(folder / "metrics" / "steps.parquet", rows)
        write(folder / "metrics" / "goodput.json", goodput(read_ledger(store.ledger), events, rows))
        write(folder / "metrics" / "summary.json", summarize(run, train, read_attempts(store), events, rows))
