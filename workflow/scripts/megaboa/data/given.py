"""Existing pairs of `.bin` and `.idx`: they are checked and counted, but never changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from megaboa.data import tokenizer
from megaboa.data.indexed import Index, in_pieces, mapped
from megaboa.data.merging import count_of, frequent
from megaboa.data.pairs import require_same
from megaboa.data.tokenizing import COUNTED, length_histogram
from megaboa.data.verify import Verdict
from megaboa.errors import InputError
from megaboa.files import digest
from megaboa.index_file import AGAIN, other_data
from megaboa.records import BadRecords, Compared, Corpus, CorpusFacts, Dataset, FrozenTokenizer, Pair, SourceFile

NO_VOCABULARY = 1 << 24  # an id beyond any vocabulary: the .bin has another type than its .idx says


def count(key: str, pairs: Sequence[Pair], words: FrozenTokenizer | None = None) -> CorpusFacts:
    """The facts about pairs that are known without their text. `key`: used in error messages; `words`: the tokenizer
    that wrote them, if it is known."""
    unknown = tokenizer.unknown(words) if words else None
    datasets = tuple(
        _count(f"{key}.megatron", number, pair, words and words.size, unknown) for number, pair in enumerate(pairs)
    )
    return CorpusFacts(
        datasets=datasets,
        dtype=datasets[0].dtype,
        documents=sum(dataset.documents for dataset in datasets),
        tokens=sum(dataset.tokens for dataset in datasets),
        bad=BadRecords(),
        encoders=(),
        refused=None,
        compared=Compared(documents=0, characters=0),
    )


def described(facts: CorpusFacts, pairs: Sequence[Pair], files: Sequence[SourceFile]) -> tuple[Dataset, ...]:
    """The datasets for a manifest: the counted facts, plus the files. `files`: .bin and .idx alternating."""
    names = [Path(pair.prefix).name for pair in pairs]
    keys = names if len(set(names)) == len(names) else [pair.prefix for pair in pairs]
    return tuple(
        replace(
            dataset,
            key=name,
            prefix=pair.prefix,
            weight=pair.weight,
            sizes={Path(file.path).name: file.size for file in two},
            sha256={Path(file.path).name: file.sha256 for file in two},
        )
        for dataset, pair, name, *two in zip(facts.datasets, pairs, keys, files[::2], files[1::2], strict=True)
    )


def identity(datasets: Sequence[Dataset]) -> str:
    """Digest of what is read, regardless of paths: tokens, index and weight of each dataset."""
    return digest([[*(one.sha256[name] for name in sorted(one.sha256)), one.weight] for one in datasets])


def check(manifest: Corpus, files: Sequence[SourceFile], problems: Callable[[Dataset, int], list[str]]) -> Verdict:
    """Check that the files are still the counted ones, and that Megatron reads them correctly."""
    for file in files:
        require_same(file)
    return Verdict(
        problems=[one for dataset in manifest.datasets for one in problems(dataset, dataset.largest_token + 1)]
    )


def _count(key: str, number: int, pair: Pair, vocab_size: int | None, unknown: int | None) -> Dataset:
    data = Path(f"{pair.prefix}.bin")
    index = _index(key, pair.prefix)
    counts = np.zeros(0, dtype=np.int64)
    for piece in in_pieces(mapped(data, index.dtype), COUNTED):
        lowest, largest = int(piece.min()), int(piece.max())
        if lowest < 0 or largest >= NO_VOCABULARY:
            raise InputError(
                f"{key}: {data} holds token {lowest if lowest < 0 else largest:,}, which is in no vocabulary: it isn't "
                f"of the type {index.dtype.name} that {data.with_suffix('.idx').name} says: {AGAIN}"
            )
        found = np.bincount(piece, minlength=len(counts))
        found[: len(counts)] += counts
        counts = found
    if vocab_size is not None and len(counts) > vocab_size:
        raise InputError(
            f"{key}: {data} holds token {len(counts) - 1}, and its tokenizer has {vocab_size} tokens: set "
            f"{key.removesuffix('.megatron')}.tokenizer to the one that wrote it"
        )
    documents = len(index.documents) - 1
    return Dataset(
        key=str(number),
        documents=len(index.lengths),
        tokens=index.bytes // index.dtype.itemsize,
        bytes_per_token=None,
        largest_token=len(counts) - 1,
        dropped={},
        sizes={},
        sha256={},
        lengths=tuple(sum(map(length_histogram, in_pieces(index.lengths))).tolist()),
        frequent=frequent(counts),
        unknown=count_of(unknown, counts),
        whole_documents=documents if documents != len(index.lengths) else 0,
        by_file=((2 * number, len(index.lengths)),),
        dtype=index.dtype.name,
    )


def _index(key: str, prefix: str) -> Index:
    """The index of a pair, if it is valid and fits the data."""
    path = f"{prefix}.idx"
    try:
        index = Index.open(Path(path))
    except (OSError, ValueError) as error:
        raise InputError(f"{key}: {error}: {AGAIN}") from error
    if not len(index.lengths) or not index.bytes:
        raise InputError(f"{key}: {prefix} has no tokens: remove it")
    if wrong := index.wrong_pointers(shortest=0):
        raise InputError(f"{key}: {path}: {wrong[0]}: {AGAIN}")
    if torn := other_data(prefix, index.bytes):
        raise InputError(f"{key}: {torn}")
    return index
