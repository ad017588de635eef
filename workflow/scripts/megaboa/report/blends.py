"""What the runs read: their blends, how often each corpus is read, and the losses of further validation sets."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaboa.observe.steps import VALIDATION_SET
from megaboa.paths import ExperimentFolder
from megaboa.records import CorpusRead, DataIndex, read
from megaboa.report.runs import RunResult


@dataclass(frozen=True)
class DataRead:
    """An index, which some runs share."""

    runs: list[str]
    corpora: list[CorpusRead]
    max_epochs: float


def load_data(results: Path, runs: list[RunResult]) -> list[DataRead]:
    """The indexes of the runs' data, in the order of the first run of each."""
    sharing: dict[str, list[str]] = {}
    for run in runs:
        folder = ExperimentFolder(results).run(run.name)
        if folder.file("launch").exists() and (name := folder.launch.index):
            sharing.setdefault(name, []).append(run.name)
    manifests = {name: ExperimentFolder(results).index(name) for name in sharing}
    found = {name: read(DataIndex, path) for name, path in manifests.items() if path.exists()}
    return [DataRead(sharing[name], list(index.corpora), index.max_epochs) for name, index in found.items()]


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
