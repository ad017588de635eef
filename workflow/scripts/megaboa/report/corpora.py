"""The data card: what every corpus of the experiment is, from its manifest and its verification."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaboa.files import read_json
from megaboa.paths import ExperimentFolder

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
