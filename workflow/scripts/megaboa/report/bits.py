"""Validation losses in bits per byte of text, which can be compared between tokenizers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from megaboa.blends import MAIN, Blend, corpora, split_blends, split_of_set, validation_sets
from megaboa.paths import ExperimentFolder
from megaboa.records import Corpus, Preflight, Tree, Verification, read_if_there

GPT = "gpt"
# A loss with these counts other tokens than those of the text.
OTHER_TOKENS = ("eod_mask_loss", "fim")


@dataclass(frozen=True)
class SetText:
    """The text of a validation set. `documents` is equal where the documents are, whatever the tokenizer."""

    bytes_per_token: float
    documents: tuple[object, ...]
    restored: float = 1.0  # share of compared documents that their tokens restore


@dataclass(frozen=True)
class Text:
    """What a run's validation losses are losses of: the text of each set, if it is known, and the tokenizers."""

    sets: dict[str, SetText] = field(default_factory=dict)
    tokenizers: frozenset[str] = frozenset()  # digests

    @property
    def restored(self) -> float:
        """The least share of a set's documents that its tokens restore. Below 1 the tokens hold less than the text, and
        bits per byte are too few."""
        return min((one.restored for one in self.sets.values()), default=1.0)

    def bits(self, name: str, loss: float) -> float | None:
        """A set's loss, in nats per token, as bits per byte."""
        found = self.sets.get(name)
        return loss / math.log(2) / found.bytes_per_token if found else None


NO_TEXT = Text()


def has_several_tokenizers(texts: Iterable[Text]) -> bool:
    """Whether runs have different ones, so that their losses, which are per token, can't be compared."""
    return len({one.tokenizers for one in texts if one.tokenizers}) > 1


def alike(texts: Iterable[Text]) -> set[str]:
    """The sets that have the same documents in all runs that have them."""
    found: dict[str, set[tuple[object, ...]]] = {}
    for one in texts:
        for name, known in one.sets.items():
            found.setdefault(name, set()).add(known.documents)
    return {name for name, documents in found.items() if len(documents) == 1}


class Texts:
    """The texts of an experiment's runs; each corpus is read once."""

    def __init__(self, results: Path) -> None:
        self.folder = ExperimentFolder(results)
        self.corpora: dict[str, Corpus | None] = {}
        found = read_if_there(Preflight, self.folder.preflight)
        self.checked = found.runs if found else {}

    def of(self, run: str, asked: Tree) -> Text:
        """`asked`: run.json."""
        data, checked = asked.get("data", {}), self.checked.get(run)
        kind = ((checked and checked.facts) or {}).get("model", {}).get("kind", GPT)
        if asked.get("task") or kind != GPT or any(data.get(key) for key in OTHER_TOKENS):
            return NO_TEXT
        held_out = (asked.get("parent") or {}).get("held_out", {})
        blends = {MAIN: split_blends(data).get("valid", {}), **validation_sets(data)}
        known = {name: self._set(data, blend, held_out) for name, blend in blends.items()}
        digests = (one.tokenizer_digest for name in corpora(data) if (one := self._corpus(name)))
        return Text({name: one for name, one in known.items() if one}, frozenset(filter(None, digests)))

    def _set(self, data: Tree, blend: Blend, held_out: Mapping[str, str]) -> SetText | None:
        """Weights of a blend are shares of tokens; end-of-text tokens count."""
        found = {name: self._corpus(name) for name in blend}
        sizes = {name: _size(corpus) for name, corpus in found.items() if corpus}
        if not blend or None in map(sizes.get, blend):
            return None
        mean = sum(weight * sizes[name] for name, weight in blend.items()) / sum(blend.values())
        documents = tuple((*_documents(found[name]), weight) for name, weight in blend.items())
        return SetText(mean, (split_of_set(data, blend, held_out), *documents), min(map(self._restored, blend)))

    def _corpus(self, name: str) -> Corpus | None:
        if name not in self.corpora:
            self.corpora[name] = read_if_there(Corpus, self.folder.corpus(name).manifest)
        return self.corpora[name]

    def _restored(self, name: str) -> float:
        found = read_if_there(Verification, self.folder.corpus(name).verification)
        return found.decoded_exactly / found.compared if found and found.compared else 1.0


def _size(corpus: Corpus) -> float | None:
    """Bytes of text for each token of a corpus; None if nothing is known of its text."""
    tokens = sum(one.tokens for one in corpus.datasets)
    if not tokens or any(one.bytes_per_token is None for one in corpus.datasets):
        return None
    return sum(one.bytes_per_token * one.tokens for one in corpus.datasets) / tokens


def _documents(corpus: Corpus) -> tuple[object, ...]:
    sources = tuple(one.sha256 for one in corpus.sources)
    return sources, tuple((one.key, one.documents) for one in corpus.datasets)
