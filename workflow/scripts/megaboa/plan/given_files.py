"""Files that a user's configuration names: texts, models, and pairs of files that Megatron has tokenized."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from megaboa.config.models.data import Corpus
from megaboa.data import pairs, sources
from megaboa.files import digest
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


def stamp(inputs: Iterable[str], results: str) -> str:
    """A digest of names and sizes of a rule's inputs that aren't results. As a parameter it reruns the rule when a file
    was replaced by an older one (`cp -p`, `rsync -a`, an unpacked archive): Snakemake looks for newer ones only.

    Without times, so that a file that was only touched reruns nothing.
    """
    given = [path for path in inputs if not Path(path).is_relative_to(results)]
    return digest([(path, Path(path).stat().st_size if Path(path).exists() else None) for path in given])[:12]
