"""The data card: every corpus of the experiment, and how often runs read it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megaboa.paths import CorpusFolder, ExperimentFolder
from megaboa.records import (
    Corpus,
    CorpusRead,
    DataIndex,
    ExamplesRead,
    Filtered,
    Verification,
    read,
    read_if_there,
)
from megaboa.report.runs import RunResult

SHOWN_TOKENS = 12


@dataclass(frozen=True)
class CorpusCard:
    """One text key of a corpus, or one pair of files."""

    name: str
    documents: int
    tokens: int
    bytes_per_token: float | None
    lengths: list[int]  # number of documents by power of two: the largest one up to their length
    frequent: list[str]
    dropped: str
    encoder: str
    verified: str
    whole_documents: int = 0  # which consist of several sequences each, counted as `documents`
    unknown: float = 0.0  # share of tokens that stand for text which the tokenizer doesn't know
    is_given: bool = False  # as tokens, of whose text nothing is known
    samples: tuple[str, ...] = ()  # records dropped by the user's filter


def load_corpora(results: Path) -> list[CorpusCard]:
    """The cards of all existing corpora in the experiment's specifications."""
    experiment = ExperimentFolder(results)
    folders = [experiment.corpus(path.stem) for path in experiment.specs.all("corpora")]
    made = [folder for folder in folders if folder.manifest.exists()]
    return [card for folder in made for card in _cards(folder)]


def _cards(folder: CorpusFolder) -> list[CorpusCard]:
    corpus, verification = read(Corpus, folder.manifest), read_if_there(Verification, folder.verification)
    return [
        CorpusCard(
            name=corpus.name if len(corpus.datasets) == 1 else f"{corpus.name}: {dataset.key}",
            documents=dataset.documents,
            tokens=dataset.tokens,
            bytes_per_token=dataset.bytes_per_token,
            lengths=list(dataset.lengths),
            frequent=[_shown(*one) for one in dataset.frequent[:SHOWN_TOKENS]],
            dropped=left_out(dataset.dropped, corpus.bad.records, corpus.filtered),
            samples=_samples(corpus.filtered) if corpus.filtered and number == 0 else (),
            encoder=", ".join(corpus.encoders) or "–",
            verified=f"{verification.compared:,} documents" if verification and not corpus.is_given else "–",
            is_given=corpus.is_given,
            whole_documents=dataset.whole_documents,
            unknown=dataset.unknown / max(1, dataset.tokens),
        )
        for number, dataset in enumerate(corpus.datasets)
    ]


def _samples(filtered: Filtered) -> tuple[str, ...]:
    return tuple(f"{reason}: {sample}" for reason, shown in filtered.samples.items() for sample in shown)


def left_out(dropped: dict[str, int], bad: int, filtered: Filtered | None = None) -> str:
    """The dropped records as text: `1,204 blank, 17 duplicate, 310 by the filter: German`."""
    by_filter = {f"by the filter: {reason}": count for reason, count in (filtered.reasons if filtered else {}).items()}
    reasons = {**dropped, "unusable": bad, **by_filter}
    return ", ".join(f"{count:,} {reason}" for reason, count in reasons.items() if count) or "none"


def _shown(token: int | str, count: int | str, text: str | None = None) -> str:
    """A token as text, or its number if no tokenizer is known."""
    return str(token) if text is None else visible(text)


def visible(text: str) -> str:
    """A token's text with visible whitespace."""
    return text.replace(" ", "␣").replace("\n", "⏎").replace("\t", "⇥").replace("\r", "␍")


@dataclass(frozen=True)
class DataRead:
    """An index, and the runs that share it."""

    runs: list[str]
    corpora: list[CorpusRead]
    max_epochs: float
    examples: ExamplesRead | None = None  # for fine-tuned runs


def load_data(results: Path, runs: list[RunResult]) -> list[DataRead]:
    """The indexes of the runs' data, in the order of the first run of each."""
    sharing: dict[str, list[str]] = {}
    for run in runs:
        folder = ExperimentFolder(results).run(run.name)
        if folder.file("launch").exists() and (name := folder.launch.index):
            sharing.setdefault(name, []).append(run.name)
    manifests = {name: ExperimentFolder(results).index(name) for name in sharing}
    found = {name: read(DataIndex, path) for name, path in manifests.items() if path.exists()}
    return [
        DataRead(sharing[name], list(index.corpora), index.max_epochs, index.examples) for name, index in found.items()
    ]
