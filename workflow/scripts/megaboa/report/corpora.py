"""The data card: what every corpus of the experiment is, how often runs read it, and their losses by validation set."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaboa.files import read_json
from megaboa.observe.steps import VALIDATION_SET
from megaboa.paths import ExperimentFolder
from megaboa.records import CorpusRead, DataIndex, read
from megaboa.report.runs import RunResult

SHOWN_TOKENS = 12


@dataclass(frozen=True)
class CorpusCard:
    """One text key of a corpus."""

    name: str
    documents: int
    tokens: int
    bytes_per_token: float
    lengths: list[int]  # documents by the power of two below their length
    frequent: list[str]
    dropped: str
    encoder: str
    verified: str


def load_corpora(results: Path) -> list[CorpusCard]:
    """Every corpus that the experiment's specifications name, and that is there."""
    experiment = ExperimentFolder(results)
    folders = [experiment.corpus(path.stem) for path in experiment.specs.all("corpora")]
    made = [folder for folder in folders if folder.manifest.exists()]
    return [card for folder in made for card in cards(read_json(folder.manifest), _verification(folder.verification))]


def cards(manifest: dict[str, Any], verification: dict[str, Any] | None) -> list[CorpusCard]:
    datasets = manifest["datasets"]
    return [
        CorpusCard(
            name=manifest["name"] if len(datasets) == 1 else f"{manifest['name']}: {dataset['key']}",
            documents=dataset["documents"],
            tokens=dataset["tokens"],
            bytes_per_token=dataset["bytes_per_token"],
            lengths=dataset["lengths"],
            frequent=[visible(text) for _, _, text in dataset["frequent"][:SHOWN_TOKENS]],
            dropped=left_out(dataset["dropped"], manifest["bad"]["records"]),
            encoder=", ".join(manifest["encoders"]),
            verified=f"{verification['compared']:,} documents" if verification else "–",
        )
        for dataset in datasets
    ]


def left_out(dropped: dict[str, int], bad: int) -> str:
    """`1,204 blank, 17 duplicate`."""
    reasons = {**dropped, "unusable": bad}
    return ", ".join(f"{count:,} {reason}" for reason, count in reasons.items() if count) or "none"


def visible(text: str) -> str:
    """A token whose blanks can be seen."""
    return text.replace(" ", "␣").replace("\n", "⏎").replace("\t", "⇥").replace("\r", "␍")


def _verification(path: Path) -> dict[str, Any] | None:
    return read_json(path) if path.exists() else None


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
