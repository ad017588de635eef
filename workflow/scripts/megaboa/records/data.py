"""Tokenizers and corpora, and what runs read of them."""

from __future__ import annotations

from dataclasses import dataclass

from megaboa.records.base import Record


@dataclass(frozen=True, kw_only=True)
class Tokenizer(Record):
    """tokenizers/<tokenizer>.json: one that the experiment trained."""

    name: str
    path: str
    digest: str
    vocab_size: int


@dataclass(frozen=True, kw_only=True)
class CorpusRead(Record):
    """What runs read of a corpus of their blend."""

    name: str
    weight: float
    tokens_asked: int
    tokens: int  # that there are for it
    epochs: float


@dataclass(frozen=True, kw_only=True)
class DataIndex(Record):
    """data/indexes/<id>.json: Megatron's index of the data that some runs share."""

    name: str
    cache: str
    samples: dict[str, int]  # by split
    corpora: tuple[CorpusRead, ...]
    max_epochs: float
    warnings: tuple[str, ...] = ()
