"""Tokenizes a shard of a corpus. Memory is bounded by a batch, not by the corpus.

For every text key, a shard has these files: token ids (.bin) and, by document, its length (.lengths), the position of
its record (.origins) and, for finding duplicates, a hash of its text (.hashes).
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megaboa.data.documents import Bad, Format, is_blank
from megaboa.data.encoder import Encoder, Gate, Tokens
from megaboa.data.filters import Dropped, Failed, Judge, Tally
from megaboa.data.indexed import in_pieces
from megaboa.data.largefile import LargeFile
from megaboa.data.pairs import require_unchanged
from megaboa.data.readers import Places, Records, describe, refuse
from megaboa.data.shards import BLOCK, Part
from megaboa.errors import InputError
from megaboa.files import flush
from megaboa.records import BadRecords, Compared, CorpusSpec, Shard, SourceFile
from megaboa.records import Column as ColumnFacts

BATCH_DOCUMENTS = 10_000
BATCH_CHARACTERS = 4_000_000
BAD_SAMPLES = 5
# Bytes at the beginning of a file in which lines are counted, to name records that are left out.
COUNTED_LINES = 1 << 30
LENGTH, ORIGIN = np.dtype("<i4"), np.dtype("<i8")
HASH_BYTES = 16
LENGTH_BINS = 32  # powers of two
COUNTED = 1 << 17  # tokens per batch, which fit into the processor's cache


@dataclass(frozen=True)
class Options:
    """The parts of a specification that determine which documents are used."""

    name: str
    form: Format
    limit: int | None
    min_characters: int
    deduplicate: bool
    skip_bad: bool

    @classmethod
    def of(cls, spec: CorpusSpec, judge: Judge | None = None) -> Options:
        return cls(
            spec.name,
            Format.of(spec, judge),
            spec.limit,
            spec.min_characters,
            spec.deduplicate,
            spec.on_bad_record == "skip",
        )


@dataclass
class Segment:
    """A run of consecutive documents in the source and in a shard: the number for each key."""

    file: int
    begin: int
    documents: list[int]


def tokenize_shard(
    options: Options,
    files: Sequence[SourceFile],
    parts: Sequence[Part],
    encoder: Encoder,
    folder: Path,
    progress: Callable[[float, int, int, int], None] = lambda *_: None,
) -> Shard:
    """Write a shard's files; `progress` gets the completed share, and the numbers of documents, tokens and bytes of
    text."""
    columns = [Column(folder / str(n), encoder.dtype, options.deduplicate) for n in range(len(options.form.keys))]
    shard = _Shard(options, files, encoder, columns, progress)
    try:
        shard.read(parts)
    finally:
        for column in columns:
            column.close()
    return Shard(
        segments=tuple((segment.file, segment.begin, segment.documents) for segment in shard.segments),
        columns=tuple(column.facts() for column in columns),
        dtype=encoder.dtype.name,
        bad=BadRecords(records=shard.bad, samples=tuple(shard.bad_samples)),
        encoder=encoder.name,
        refused=encoder.refused,
        compared=Compared(documents=shard.gate.documents, characters=shard.gate.characters),
        filtered=shard.filtered.record() if options.form.judge else None,
    )


class _Shard:
    """A shard being processed, from records to files."""

    def __init__(
        self, options: Options, files: Sequence[SourceFile], encoder: Encoder, columns: list[Column], progress: Callable
    ) -> None:
        self.options, self.files, self.encoder, self.columns, self.progress = options, files, encoder, columns, progress
        self.segments: list[Segment] = []
        self.bad, self.bad_samples = 0, []
        self.filtered = Tally()
        self.places = Places(options.form, COUNTED_LINES)
        self.waiting = 0  # characters
        self.taken = 0  # number of records, for the limit

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
                elif isinstance(texts, Dropped | Failed):
                    self._drop(file, position, texts)
                elif self._take(file, position, texts) and self.taken == self.options.limit:
                    self._write()
                    self._tell(1.0)
                    require_unchanged(file)
                    return
                if self.waiting >= BATCH_CHARACTERS or len(self.columns[0].texts) >= BATCH_DOCUMENTS:
                    self._write()
                    self._tell((done + records.share * size) / max(1, sum(sizes)))
            require_unchanged(file)  # the file must still be the listed one
            done += size
        self._write()
        self._tell(1.0)

    def _segment(self, part: Part, position: int) -> None:
        """Start a new segment if necessary; in a file that is read in turns, each block is a segment."""
        begin = position // BLOCK * BLOCK if part.turns > 1 else part.begin
        last = self.segments[-1] if self.segments else None
        if last is None or (last.file, last.begin) != (part.file, begin):
            self.segments.append(Segment(part.file, begin, [0] * len(self.columns)))

    def _take(self, file: SourceFile, position: int, texts: Sequence[str]) -> bool:
        """Queue a record's texts; returns False if none of them can be used."""
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
            self.segments[-1].documents[number] += 1
            self.waiting += len(text)
            taken = True
        self.taken += taken
        return taken

    def _refuse(self, file: SourceFile, position: int, record: Bad) -> None:
        if not self.options.skip_bad:
            raise refuse(file, position, self.options.form, record, f"corpora.{self.options.name}")
        self.bad += 1
        if len(self.bad_samples) < BAD_SAMPLES:
            self.bad_samples.append(f"{self.places.describe(file, position)}: {record.reason}")

    def _drop(self, file: SourceFile, position: int, record: Dropped | Failed) -> None:
        if isinstance(record, Failed):
            where = describe(file, position, self.options.form)
            raise InputError(f"corpora.{self.options.name}.filter: {record.why}, at {where}")

        def sample() -> list[str]:
            return [f"{self.places.describe(file, position)}: {record.text}"]

        self.filtered.add(record.reason, 1, sample)

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


@dataclass
class Column:
    """The documents of one text key of a shard, while they are written."""

    path: Path  # without suffix
    dtype: np.dtype
    hashed: bool
    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    empty: int = 0  # documents without any token
    dropped: Counter = field(default_factory=Counter)
    texts: list[str] = field(default_factory=list)
    origins: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._tokens = LargeFile(Path(f"{self.path}.bin"))
        endings = ["lengths", "origins", *(["hashes"] if self.hashed else [])]
        self._files = {
            ending: Path(f"{self.path}.{ending}").open("wb")  # noqa: SIM115
            for ending in endings
        }
        self._counts = np.zeros(0, dtype=np.int64)
        self._histogram = np.zeros(LENGTH_BINS, dtype=np.int64)

    def write(self, tokens: Tokens) -> None:
        """Write the tokens of the queued texts."""
        self._count(tokens)
        self._tokens.write(tokens.ids.astype(self.dtype.newbyteorder("<"), copy=False).data)
        self._files["lengths"].write(tokens.lengths.astype("<i4").tobytes())
        self._files["origins"].write(np.array(self.origins, dtype="<i8").tobytes())
        if self.hashed:
            hashes = (hashlib.blake2b(text.encode(), digest_size=HASH_BYTES).digest() for text in self.texts)
            self._files["hashes"].write(b"".join(hashes))
        self.documents += len(self.texts)
        # The encoder has cached the UTF-8 of every text, so that this is cheap now.
        self.text_bytes += sum(len(text) if text.isascii() else len(text.encode()) for text in self.texts)
        self.tokens += len(tokens.ids)
        self.empty += int(np.count_nonzero(tokens.lengths == 0))
        self.texts, self.origins = [], []

    def _count(self, tokens: Tokens) -> None:
        for piece in in_pieces(tokens.ids, COUNTED):
            counts = np.bincount(piece, minlength=len(self._counts))
            counts[: len(self._counts)] += self._counts
            self._counts = counts
        if (largest := len(self._counts) - 1) > np.iinfo(self.dtype).max:
            raise ValueError(f"token id {largest} does not fit {self.dtype}")
        self._histogram += length_histogram(tokens.lengths)

    def close(self) -> None:
        self._tokens.close()
        for stream in self._files.values():
            flush(stream)
            stream.close()

    def facts(self) -> ColumnFacts:
        with Path(f"{self.path}.counts.npy").open("wb") as stream:
            np.save(stream, self._counts)
            flush(stream)
        return ColumnFacts(
            documents=self.documents,
            tokens=self.tokens,
            text_bytes=self.text_bytes,
            empty=self.empty,
            dropped=dict(self.dropped),
            lengths=tuple(self._histogram.tolist()),
        )


def length_histogram(lengths: NDArray) -> NDArray:
    """Histogram of document lengths by powers of two: 1 token, 2 or 3, 4 to 7 ..."""
    bins = np.floor(np.log2(np.maximum(lengths, 1))).astype(np.int64)
    return np.bincount(np.minimum(bins, LENGTH_BINS - 1), minlength=LENGTH_BINS)
