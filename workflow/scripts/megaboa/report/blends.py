"""What the runs read: their blends, how often each corpus is read, and the losses of further validation sets."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaboa.files import read_json
from megaboa.observe.steps import VALIDATION_SET
from megaboa.report.runs import RunResult
from megaboa.results import RunFolder


@dataclass(frozen=True)
class DataRead:
    """An index, which some runs share."""

    runs: list[str]
    corpora: list[dict[str, Any]]
    max_epochs: float


def load_data(results: Path, runs: list[RunResult]) -> list[DataRead]:
    """The indexes of the runs' data, in the order of the first run of each."""
    sharing: dict[str, list[str]] = {}
    for run in runs:
        launch = RunFolder(results / "runs" / run.name).path / "launch.json"
        if launch.exists() and (name := read_json(launch).get("index")):
            sharing.setdefault(name, []).append(run.name)
    manifests = {name: results / "data" / "indexes" / f"{name}.json" for name in sharing}
    found = {name: read_json(path) for name, path in manifests.items() if path.exists()}
    return [DataRead(sharing[name], index["corpora"], index["max_epochs"]) for name, index in found.items()]


def last_validation(runs: list[RunResult]) -> list[tuple[str, dict[str, Any]]]:
    """Of every run with further validation sets its last validation losses by name, the main one first."""
    found = []
    for run in runs:
        losses = run.summary["validation"][-1]["losses"] if run.summary and run.summary["validation"] else {}
        further = {
            name.removeprefix(VALIDATION_SET): v for name, v in losses.items() if name.startswith(VALIDATION_SET)
        }
        if further:
            found.append((run.name, {"main": losses.get("lm loss"), **further}))
    return found
