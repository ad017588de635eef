"""A shard of a corpus to tokens. Memory is bounded by a batch, not by the corpus."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaboa.data.column import Column, Facts
from megaboa.data.encoder import Encoder, Gate
from megaboa.data.readers import Bad, Format, Records, describe, is_blank, refuse
from megaboa.data.shards import BLOCK, Part
from megaboa.data.sources import File, require_unchanged

BATCH_DOCUMENTS = 10_000
BATCH_CHARACTERS = 4_000_000
BAD_SAMPLES = 5


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


def tokenize_shard(
    options: Options,
    files: Sequence[File],
    parts: Sequence[Part],
    encoder: Encoder,
    folder: Path,
    progress: Callable[[float, int, int, int], None] = lambda *_: None,
) -> Facts:
    """Write a shard's files; `progress` hears the share that is done, documents, tokens and bytes of text."""
    columns = [Column(folder / str(n), encoder.dtype, options.deduplicate) for n in range(len(options.form.keys))]
    shard = _Shard(options, files, encoder, columns, progress)
    try:
        shard.read(parts)
    finally:
        for column in columns:
            column.close()
    return {
        "segments": [[segment.file, segment.begin, segment.documents] for segment in shard.segments],
        "columns": [column.facts() for column in columns],
        "dtype": encoder.dtype.name,
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
