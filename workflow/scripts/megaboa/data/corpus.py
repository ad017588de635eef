"""A shard of a corpus to tokens, and the shards to one corpus. Memory is bounded by a batch, not by the corpus.

A shard's folder holds, for every text key, token ids (.bin), and by document its length (.lengths), where its record
was (.origins) and, to find duplicates, a hash of its text (.hashes). Merging puts these one behind the other in the
order of the source, whichever shard they came from: so the number of shards changes nothing.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from megaboa.data import duplicates
from megaboa.data.encoder import Encoder, Gate, Tokens
from megaboa.data.errors import InputError
from megaboa.data.indexed import PIECE, in_pieces, mapped, token_dtype, write_index
from megaboa.data.readers import Records, describe, is_blank, refuse
from megaboa.data.records import Bad, Format
from megaboa.data.shards import BLOCK, Part
from megaboa.data.sources import File, require_unchanged
from megaboa.files import file_digest, flush

BATCH_DOCUMENTS = 10_000
BATCH_CHARACTERS = 4_000_000
COPY_BYTES = 8 << 20
BAD_SAMPLES = 5
HASH_BYTES = 16
LENGTH_BINS = 32  # powers of two
FREQUENT = 20  # tokens that the data card shows
LENGTH, ORIGIN = np.dtype("<i4"), np.dtype("<i8")

Facts = dict[str, Any]
Runs = list[tuple[int, int]]  # shard, and how many documents come from it next


@dataclass(frozen=True)
class Options:
    """Of a specification what decides which documents are taken."""

    name: str
    form: Format
    limit: int | None
    min_characters: int
    deduplicate: bool
    skip_bad: bool

    @classmethod
    def of(cls, spec: dict[str, Any]) -> Options:
        return cls(
            spec["name"],
            Format.of(spec),
            spec["limit"],
            spec["min_characters"],
            spec["deduplicate"],
            spec["on_bad_record"] == "skip",
        )


@dataclass
class Segment:
    """Documents that stand one behind the other in the source and in a shard: how many, of each key."""

    file: int
    begin: int
    documents: list[int]


@dataclass
class Column:
    """The documents of one text key of a shard, as they are written."""

    path: Path  # without an ending
    dtype: np.dtype
    hashed: bool
    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    largest: int = 0
    empty: int = 0  # documents that the tokenizer makes nothing of
    dropped: Counter = field(default_factory=Counter)
    texts: list[str] = field(default_factory=list)
    origins: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        endings = ["bin", "lengths", "origins", *(["hashes"] if self.hashed else [])]
        self._files = {
            ending: Path(f"{self.path}.{ending}").open("wb")  # noqa: SIM115
            for ending in endings
        }
        self._counts = np.zeros(0, dtype=np.int64)
        self._histogram = np.zeros(LENGTH_BINS, dtype=np.int64)

    def write(self, tokens: Tokens) -> None:
        """The tokens of the texts that wait."""
        largest = int(tokens.ids.max(initial=0))
        if largest > np.iinfo(self.dtype).max:
            raise ValueError(f"token id {largest} does not fit {self.dtype}")
        self._files["bin"].write(tokens.ids.astype(self.dtype.newbyteorder("<"), copy=False).tobytes())
        self._files["lengths"].write(tokens.lengths.astype("<i4").tobytes())
        self._files["origins"].write(np.array(self.origins, dtype="<i8").tobytes())
        if self.hashed:
            hashes = (hashlib.blake2b(text.encode(), digest_size=HASH_BYTES).digest() for text in self.texts)
            self._files["hashes"].write(b"".join(hashes))
        self._count(tokens)
        self.documents += len(self.texts)
        self.tokens += len(tokens.ids)
        self.empty += int(np.count_nonzero(tokens.lengths == 0))
        self.largest = max(self.largest, largest)
        self.texts, self.origins = [], []

    def _count(self, tokens: Tokens) -> None:
        counts = np.bincount(tokens.ids, minlength=len(self._counts))
        counts[: len(self._counts)] += self._counts
        self._counts = counts
        self._histogram += length_histogram(tokens.lengths)

    def close(self) -> None:
        for stream in self._files.values():
            flush(stream)
            stream.close()

    def facts(self) -> Facts:
        with Path(f"{self.path}.counts.npy").open("wb") as stream:
            np.save(stream, self._counts)
            flush(stream)
        return {
            "documents": self.documents,
            "tokens": self.tokens,
            "text_bytes": self.text_bytes,
            "largest_token": self.largest,
            "empty": self.empty,
            "dropped": dict(self.dropped),
            "lengths": self._histogram.tolist(),
        }


def tokenize_shard(
    options: Options,
    files: Sequence[File],
    parts: Sequence[Part],
    encoder: Encoder,
    folder: Path,
    progress: Callable[[float, int, int, int], None] = lambda *_: None,
) -> Facts:
    """Write a shard's files; `progress` hears the share that is done, documents, tokens and bytes of text."""
    dtype = token_dtype(encoder.vocab_size)
    columns = [Column(folder / str(n), dtype, options.deduplicate) for n in range(len(options.form.keys))]
    shard = _Shard(options, files, encoder, columns, progress)
    try:
        shard.read(parts)
    finally:
        for column in columns:
            column.close()
    return {
        "segments": [[segment.file, segment.begin, segment.documents] for segment in shard.segments],
        "columns": [column.facts() for column in columns],
        "dtype": dtype.name,
        "bad": shard.bad,
        "encoder": encoder.name,
        "refused": encoder.refused,
        "compared": {"documents": shard.gate.documents, "characters": shard.gate.characters},
    }


class _Shard:
    """What is on its way from records to files."""

    def __init__(
        self, options: Options, files: Sequence[File], encoder: Encoder, columns: list[Column], progress: Callable
    ) -> None:
        self.options, self.files, self.encoder, self.columns, self.progress = options, files, encoder, columns, progress
        self.segments: list[Segment] = []
        self.bad: Facts = {"records": 0, "samples": []}
        self.waiting = 0  # characters
        self.taken = 0  # records, for the limit

    def read(self, parts: Sequence[Part]) -> None:
        sizes = [(part.end - part.begin) // part.turns for part in parts]
        seed = f"{self.options.name} {parts[0] if parts else ''}"
        self.gate = Gate(self.encoder, sum(sizes), seed)
        done = 0
        for part, size in zip(parts, sizes, strict=True):
            file = self.files[part.file]
            require_unchanged(file)
            records = Records(file, part, self.options.form)
            for position, texts in records:
                self._segment(part, position)
                if isinstance(texts, Bad):
                    self._refuse(file, position, texts)
                elif self._take(file, position, texts) and self.taken == self.options.limit:
                    self._write()
                    self._tell(1.0)
                    require_unchanged(file)
                    return
                if self.waiting >= BATCH_CHARACTERS or len(self.columns[0].texts) >= BATCH_DOCUMENTS:
                    self._write()
                    self._tell((done + records.share * size) / max(1, sum(sizes)))
            require_unchanged(file)  # what was read is what was listed
            done += size
        self._write()
        self._tell(1.0)

    def _segment(self, part: Part, position: int) -> None:
        """Of a file read in turns, each block is a segment of its own."""
        begin = position // BLOCK * BLOCK if part.turns > 1 else part.begin
        last = self.segments[-1] if self.segments else None
        if last is None or (last.file, last.begin) != (part.file, begin):
            self.segments.append(Segment(part.file, begin, [0] * len(self.columns)))

    def _take(self, file: File, position: int, texts: Sequence[str]) -> bool:
        """Put a record's texts among those that wait; False if none of them is of use."""
        taken = False
        for number, (column, text) in enumerate(zip(self.columns, texts, strict=True)):
            if is_blank(text):
                column.dropped["blank"] += 1
                continue
            if len(text) < self.options.min_characters:
                column.dropped["short"] += 1
                continue
            if self.gate.wants():
                self.gate.check(text, lambda: describe(file, position, self.options.form))
            column.texts.append(text)
            column.origins.append(position)
            column.text_bytes += len(text) if text.isascii() else len(text.encode())
            self.segments[-1].documents[number] += 1
            self.waiting += len(text)
            taken = True
        self.taken += taken
        return taken

    def _refuse(self, file: File, position: int, record: Bad) -> None:
        if not self.options.skip_bad:
            raise refuse(file, position, self.options.form, record, f"corpora.{self.options.name}")
        self.bad["records"] += 1
        if len(self.bad["samples"]) < BAD_SAMPLES:
            where = describe(file, position, self.options.form, by_line=False)
            self.bad["samples"].append(f"{where}: {record.reason}")

    def _write(self) -> None:
        for column in self.columns:
            if column.texts:
                column.write(self.encoder.encode(column.texts))
        self.waiting = 0

    def _tell(self, share: float) -> None:
        totals = [
            sum(getattr(column, name) for column in self.columns) for name in ("documents", "tokens", "text_bytes")
        ]
        self.progress(share, *totals)


def length_histogram(lengths: NDArray) -> NDArray:
    """Documents by the power of two below their length: of 1 token, 2 or 3, 4 to 7, ..."""
    bins = np.floor(np.log2(np.maximum(lengths, 1))).astype(np.int64)
    return np.bincount(np.minimum(bins, LENGTH_BINS - 1), minlength=LENGTH_BINS)


def file_stem(name: str, keys: Sequence[str], key: str) -> str:
    """How the files of a key are called: with several keys as Megatron's own tool does it."""
    return name if len(keys) == 1 else f"{name}_{re.sub(r'[^A-Za-z0-9]+', '_', key)}"


def merge(options: Options, shards: Sequence[tuple[Path, Facts]], out: Path) -> Facts:
    """Put the shards together below `out`, and say what came out."""
    order = sorted(
        (file, begin, number, documents)
        for number, (_, facts) in enumerate(shards)
        for file, begin, documents in facts["segments"]
    )
    keys, dtype = options.form.keys, np.dtype(shards[0][1]["dtype"])
    datasets = []
    for number, key in enumerate(keys):
        runs = [(shard, documents[number]) for _, _, shard, documents in order if documents[number]]
        by_file = [(file, documents[number]) for file, _, _, documents in order if documents[number]]
        stem = out / file_stem(options.name, keys, key)
        sources = [folder / str(number) for folder, _ in shards]
        facts = [shard["columns"][number] for _, shard in shards]
        datasets.append({"key": key, **_merge_column(options, sources, facts, runs, by_file, dtype, stem)})
    if not any(dataset["documents"] for dataset in datasets):
        raise InputError(f"corpora.{options.name}.source: there is no text in it")
    return {
        "datasets": datasets,
        "dtype": dtype.name,
        "documents": sum(dataset["documents"] for dataset in datasets),
        "tokens": sum(dataset["tokens"] for dataset in datasets),
        "bad": {
            "records": sum(facts["bad"]["records"] for _, facts in shards),
            "samples": [sample for _, facts in shards for sample in facts["bad"]["samples"]][:BAD_SAMPLES],
        },
        "encoders": sorted({facts["encoder"] for _, facts in shards}),
        "refused": shards[0][1]["refused"],
        "compared": {name: sum(facts["compared"][name] for _, facts in shards) for name in ("documents", "characters")},
    }


def _merge_column(
    options: Options,
    sources: list[Path],
    facts: list[Facts],
    runs: Runs,
    by_file: list[tuple[int, int]],
    dtype: np.dtype,
    stem: Path,
) -> Facts:
    """One text key of all shards, as `stem`.bin, .idx and .origins."""
    kept = None
    if options.deduplicate:
        kept = duplicates.first_ones(lambda: _in_order(sources, runs, "hashes", np.dtype(f"V{HASH_BYTES}")))
    duplicate = 0 if kept is None else int(np.count_nonzero(~kept))
    if any(fact["empty"] for fact in facts):
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
        histogram = _sum(np.array(fact["lengths"]) for fact in facts)
    else:
        counts = _sum(np.bincount(piece) for piece in in_pieces(mapped(data, dtype)))
        histogram = _sum(length_histogram(piece) for piece in in_pieces(kept_lengths))
    lengths.unlink()
    dropped = sum((Counter(fact["dropped"]) for fact in facts), Counter())
    dropped += Counter(duplicate=duplicate)
    if kept is not None:
        dropped += Counter(untokenizable=len(kept) - documents - duplicate)
    before = sum(fact["tokens"] for fact in facts)
    return {
        "documents": documents,
        "tokens": data.stat().st_size // dtype.itemsize,
        "bytes_per_token": round(sum(fact["text_bytes"] for fact in facts) / max(1, before), 4),
        "largest_token": len(counts) - 1,
        "dropped": dict(sorted(dropped.items())),
        "sizes": {path.name: path.stat().st_size for path in (data, index)},
        "sha256": {data.name: sha256, index.name: file_digest(index)},
        "lengths": histogram.tolist(),
        "frequent": _frequent(counts),
        "by_file": _documents_by_file(by_file, kept),
    }


def _in_order(sources: list[Path], runs: Runs, ending: str, dtype: np.dtype) -> Iterator[NDArray]:
    """What the shards hold by document, in the order of the corpus. A shard's own order is the same."""
    with _Streams([Path(f"{source}.{ending}") for source in sources]) as streams:
        for shard, documents in runs:
            for begin in range(0, documents, PIECE):
                yield _read(streams.of(shard), dtype, min(PIECE, documents - begin))


class _Streams:
    """A file of every shard, each read on from where it was left. One is open at a time, as thousands can't be."""

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
    """Copy the tokens of the documents that are kept; return the SHA-256 of the file."""
    sha256 = hashlib.sha256()
    with data.open("wb") as out, _Streams([Path(f"{source}.bin") for source in sources]) as streams:
        begin = 0
        lengths = _in_order(sources, runs, "lengths", LENGTH)
        for shard, documents in runs:
            for _ in range(0, documents, PIECE):
                piece = next(lengths)
                mask = None if kept is None else kept[begin : begin + len(piece)]
                for wanted, tokens in _stretches(piece, mask):
                    if wanted:
                        _copy(streams.of(shard), out, tokens * dtype.itemsize, sha256)
                    else:
                        streams.of(shard).seek(tokens * dtype.itemsize, os.SEEK_CUR)
                begin += len(piece)
        flush(out)
    return sha256.hexdigest()


def _stretches(lengths: NDArray, mask: NDArray | None) -> Iterator[tuple[bool, int]]:
    """Stretches of documents that are all kept or all left out, and their tokens."""
    if mask is None:
        yield True, int(lengths.sum(dtype=np.int64))
        return
    borders = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(mask)]
    for first, last in pairwise(borders):
        yield bool(mask[first]), int(lengths[first:last].sum(dtype=np.int64))


def _copy(source: IO[bytes], out: IO[bytes], size: int, sha256: Any) -> None:
    while size:
        piece = source.read(min(COPY_BYTES, size))
        if not piece:
            raise EOFError(f"{source.name} is shorter than its documents")
        out.write(piece)
        sha256.update(piece)
        size -= len(piece)


def _read(stream: IO[bytes], dtype: np.dtype, count: int) -> NDArray:
    content = stream.read(count * dtype.itemsize)
    if len(content) != count * dtype.itemsize:
        raise EOFError(f"{stream.name} is shorter than its documents")
    return np.frombuffer(content, dtype)


def _sum(arrays: Iterable[NDArray]) -> NDArray:
    """Element by element; shorter ones end in zeros."""
    total = np.zeros(0, dtype=np.int64)
    for array in arrays:
        total = np.pad(total, (0, max(0, len(array) - len(total))))
        total[: len(array)] += array
    return total


def _frequent(counts: NDArray) -> list[list[int]]:
    most = np.argsort(-counts, kind="stable")[:FREQUENT]
    return [[int(token), int(counts[token])] for token in most if counts[token]]


def _documents_by_file(by_file: list[tuple[int, int]], kept: NDArray | None) -> list[list[int]]:
    """How many documents every file gave, in their order."""
    found: Counter = Counter()
    begin = 0
    for file, documents in by_file:
        found[file] += documents if kept is None else int(np.count_nonzero(kept[begin : begin + documents]))
        begin += documents
    return [[file, documents] for file, documents in sorted(found.items())]
