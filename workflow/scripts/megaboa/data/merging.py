"""Merges the shards of a corpus: documents are concatenated in the order of the source, whichever shard they are in, so
that the number of shards doesn't matter. Memory is bounded by a piece, not by the corpus."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from megaboa.data import filters
from megaboa.data.indexed import PIECE, in_pieces, mapped, write_index
from megaboa.data.largefile import LargeFile
from megaboa.data.sources import file_stem
from megaboa.data.tokenizing import BAD_SAMPLES, HASH_BYTES, LENGTH, ORIGIN, Options, length_histogram
from megaboa.errors import InputError
from megaboa.files import file_digest, flush
from megaboa.records import BadRecords, Column, Compared, CorpusFacts, Dataset, Shard

COPY_BYTES = 8 << 20
FREQUENT = 20  # number of tokens shown in the data card
HASHES_AT_ONCE = 4_000_000  # about 200 MB during the sort

Runs = list[tuple[int, int]]  # shard, and how many documents come from it next


def merge(options: Options, shards: Sequence[tuple[Path, Shard]], out: Path, unknown: int | None = None) -> CorpusFacts:
    """Merge the shards below `out`, and return the facts. `unknown`: the tokenizer's token for text that it doesn't
    know."""
    order = sorted(
        (file, begin, number, documents)
        for number, (_, facts) in enumerate(shards)
        for file, begin, documents in facts.segments
    )
    keys, dtype = options.form.keys, np.dtype(shards[0][1].dtype)
    datasets = []
    for number, key in enumerate(keys):
        runs = [(shard, documents[number]) for _, _, shard, documents in order if documents[number]]
        by_file = [(file, documents[number]) for file, _, _, documents in order if documents[number]]
        stem = out / file_stem(options.name, keys, key)
        sources = [folder / str(number) for folder, _ in shards]
        facts = [shard.columns[number] for _, shard in shards]
        datasets.append(_merge_column(options, key, sources, facts, runs, by_file, dtype, stem, unknown))
    filtered = filters.together(facts.filtered for _, facts in shards)
    if not any(dataset.documents for dataset in datasets):
        if filtered and filtered.records:
            raise InputError(f"corpora.{options.name}.filter: it drops all of the text, {filtered.records:,} records")
        raise InputError(f"corpora.{options.name}.source: there is no text in it")
    return CorpusFacts(
        datasets=tuple(datasets),
        dtype=dtype.name,
        documents=sum(dataset.documents for dataset in datasets),
        tokens=sum(dataset.tokens for dataset in datasets),
        bad=BadRecords(
            records=sum(facts.bad.records for _, facts in shards),
            samples=tuple(sample for _, facts in shards for sample in facts.bad.samples)[:BAD_SAMPLES],
        ),
        encoders=tuple(sorted({facts.encoder for _, facts in shards})),
        refused=shards[0][1].refused,
        compared=Compared(
            documents=sum(facts.compared.documents for _, facts in shards),
            characters=sum(facts.compared.characters for _, facts in shards),
        ),
        filtered=filtered,
    )


def _merge_column(
    options: Options,
    key: str,
    sources: list[Path],
    facts: list[Column],
    runs: Runs,
    by_file: list[tuple[int, int]],
    dtype: np.dtype,
    stem: Path,
    unknown: int | None,
) -> Dataset:
    """Merge one text key of all shards into `stem`.bin, .idx and .origins."""
    kept = None
    if options.deduplicate:
        kept = first_ones(lambda: _in_order(sources, runs, "hashes", np.dtype(f"V{HASH_BYTES}")))
    duplicate = 0 if kept is None else int(np.count_nonzero(~kept))
    if any(fact.empty for fact in facts):
        filled = np.concatenate([piece > 0 for piece in _in_order(sources, runs, "lengths", LENGTH)])
        kept = filled if kept is None else kept & filled
    data, index, origins, lengths = (Path(f"{stem}.{ending}") for ending in ("bin", "idx", "origins", "lengths"))
    with lengths.open("wb") as stream:
        for piece in _kept(_in_order(sources, runs, "lengths", LENGTH), kept):
            stream.write(piece.tobytes())
    with origins.open("wb") as stream:
        for piece in _kept(_in_order(sources, runs, "origins", ORIGIN), kept):
            stream.write(piece.tobytes())
        flush(stream)
    sha256 = _copy_tokens(sources, runs, dtype, kept, data)
    kept_lengths = mapped(lengths, LENGTH)
    documents = write_index(index, dtype, lambda: in_pieces(kept_lengths))
    if kept is None:
        counts = _sum(np.load(f"{source}.counts.npy") for source in sources)
        histogram = _sum(np.array(fact.lengths) for fact in facts)
    else:
        counts = _sum(np.bincount(piece) for piece in in_pieces(mapped(data, dtype)))
        histogram = _sum(length_histogram(piece) for piece in in_pieces(kept_lengths))
    lengths.unlink()
    dropped = sum((Counter(fact.dropped) for fact in facts), Counter())
    dropped += Counter(duplicate=duplicate)
    if kept is not None:
        dropped += Counter(untokenizable=len(kept) - documents - duplicate)
    before = sum(fact.tokens for fact in facts)
    return Dataset(
        key=key,
        documents=documents,
        tokens=data.stat().st_size // dtype.itemsize,
        bytes_per_token=round(sum(fact.text_bytes for fact in facts) / max(1, before), 4),
        largest_token=len(counts) - 1,
        dropped=dict(sorted(dropped.items())),
        sizes={path.name: path.stat().st_size for path in (data, index)},
        sha256={data.name: sha256, index.name: file_digest(index)},
        lengths=tuple(histogram.tolist()),
        frequent=frequent(counts),
        unknown=count_of(unknown, counts),
        by_file=_documents_by_file(by_file, kept),
    )


def first_ones(hashes: Callable[[], Iterator[NDArray]], at_once: int = HASHES_AT_ONCE) -> NDArray:
    """True for the first document with each hash. `hashes` yields pieces, and is called repeatedly.

    Hashes are processed in groups between which there can be no duplicates; only one byte per document stays in memory.
    """
    total = sum(len(piece) for piece in hashes())
    kept = np.ones(total, dtype=bool)
    groups = -(-total // at_once)
    for group in range(groups):
        numbers, values = _group(hashes(), group, groups)
        order = np.lexsort((numbers, values[:, 1], values[:, 0]))
        same = (values[order[1:]] == values[order[:-1]]).all(axis=1)
        kept[numbers[order[1:][same]]] = False
    return kept


def _group(pieces: Iterator[NDArray], group: int, groups: int) -> tuple[NDArray, NDArray]:
    """Numbers and hashes of the documents whose hash belongs to the group."""
    numbers, values, begin = [], [], 0
    for piece in pieces:
        pairs = np.ascontiguousarray(piece).view("<u8").reshape(-1, 2)
        mine = np.flatnonzero(pairs[:, 0] % np.uint64(groups) == group)
        numbers.append(mine + begin)
        values.append(pairs[mine])
        begin += len(piece)
    return np.concatenate(numbers), np.concatenate(values)


def _in_order(sources: list[Path], runs: Runs, ending: str, dtype: np.dtype) -> Iterator[NDArray]:
    """Per-document data of the shards, in the order of the corpus, which each shard follows too."""
    with _Streams([Path(f"{source}.{ending}") for source in sources]) as streams:
        for shard, documents in runs:
            for begin in range(0, documents, PIECE):
                yield _read(streams.of(shard), dtype, min(PIECE, documents - begin))


class _Streams:
    """One file of each shard, read sequentially. Only one is open at a time, because there may be thousands."""

    def __init__(self, paths: list[Path]) -> None:
        self._paths, self._places = paths, [0] * len(paths)
        self._open: tuple[int, IO[bytes]] | None = None

    def __enter__(self) -> _Streams:
        return self

    def __exit__(self, *_: object) -> None:
        if self._open:
            number, stream = self._open
            self._places[number] = stream.tell()
            stream.close()
        self._open = None

    def of(self, number: int) -> IO[bytes]:
        if not self._open or self._open[0] != number:
            self.__exit__()
            self._open = number, self._paths[number].open("rb")
            self._open[1].seek(self._places[number])
        return self._open[1]


def _kept(pieces: Iterator[NDArray], kept: NDArray | None) -> Iterator[NDArray]:
    begin = 0
    for piece in pieces:
        yield piece if kept is None else piece[kept[begin : begin + len(piece)]]
        begin += len(piece)


def _copy_tokens(sources: list[Path], runs: Runs, dtype: np.dtype, kept: NDArray | None, data: Path) -> str:
    """Copy the tokens of kept documents; return the SHA-256 of the file."""
    with LargeFile(data, hashed=True) as out, _Streams([Path(f"{source}.bin") for source in sources]) as streams:
        begin = 0
        lengths = _in_order(sources, runs, "lengths", LENGTH)
        for shard, documents in runs:
            for _ in range(0, documents, PIECE):
                piece = next(lengths)
                mask = None if kept is None else kept[begin : begin + len(piece)]
                for wanted, tokens in _stretches(piece, mask):
                    if wanted:
                        _copy(streams.of(shard), out, tokens * dtype.itemsize)
                    else:
                        streams.of(shard).seek(tokens * dtype.itemsize, os.SEEK_CUR)
                begin += len(piece)
    return out.sha256()


def _stretches(lengths: NDArray, mask: NDArray | None) -> Iterator[tuple[bool, int]]:
    """Stretches of documents that are all kept or all left out, with their numbers of tokens."""
    if mask is None:
        yield True, int(lengths.sum(dtype=np.int64))
        return
    borders = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(mask)]
    for first, last in pairwise(borders):
        yield bool(mask[first]), int(lengths[first:last].sum(dtype=np.int64))


def _copy(source: IO[bytes], out: LargeFile, size: int) -> None:
    while size:
        piece = source.read(min(COPY_BYTES, size))
        if not piece:
            raise EOFError(f"{source.name} is shorter than its documents")
        out.write(piece)
        size -= len(piece)


def _read(stream: IO[bytes], dtype: np.dtype, count: int) -> NDArray:
    content = stream.read(count * dtype.itemsize)
    if len(content) != count * dtype.itemsize:
        raise EOFError(f"{stream.name} is shorter than its documents")
    return np.frombuffer(content, dtype)


def _sum(arrays: Iterable[NDArray]) -> NDArray:
    """Elementwise sum; shorter arrays are padded with zeros."""
    total = np.zeros(0, dtype=np.int64)
    for array in arrays:
        total = np.pad(total, (0, max(0, len(array) - len(total))))
        total[: len(array)] += array
    return total


def frequent(counts: NDArray) -> tuple[tuple[int, int], ...]:
    most = np.argsort(-counts, kind="stable")[:FREQUENT]
    return tuple((int(token), int(counts[token])) for token in most if counts[token])


def count_of(token: int | None, counts: NDArray) -> int:
    return int(counts[token]) if token is not None and token < len(counts) else 0


def _documents_by_file(by_file: list[tuple[int, int]], kept: NDArray | None) -> tuple[tuple[int, int], ...]:
    """The number of documents from every file, in order."""
    found: Counter = Counter()
    begin = 0
    for file, documents in by_file:
        found[file] += documents if kept is None else int(np.count_nonzero(kept[begin : begin + documents]))
        begin += documents
    return tuple(sorted(found.items()))
