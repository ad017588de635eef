"""Files that a user's configuration names: texts, models, and pairs of files that Megatron has tokenized."""

from __future__ import annotations

import os

from megaboa.config.models.data import Corpus
from megaboa.data import pairs, sources
from megaboa.records import Pair


def expanded(path: str) -> str:
    """A path with `~` expanded; anything else unchanged."""
    return os.path.expanduser(path)  # noqa: PTH111 (a pattern or an id is no path)


def expanded_source(source: str | list[str]) -> list[str]:
    return [one if sources.hub_id(one) else expanded(one) for one in sources.as_list(source)]


def pairs_of(corpus: Corpus) -> tuple[Pair, ...]:
    return tuple(pairs.pairs_of(corpus.megatron, corpus.split)) if corpus.megatron is not None else ()


def files_of(corpus: Corpus) -> list[str]:
    """The files of a corpus; empty if its source isn't a file."""
    if corpus.source is None:
        return pairs.paths(pairs_of(corpus))
    return sources.paths(expanded_source(corpus.source))
