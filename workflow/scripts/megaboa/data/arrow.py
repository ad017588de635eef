"""Reads rows of Parquet files, and of the Arrow files that `datasets` writes, a few megabytes at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import pyarrow
import pyarrow.parquet

from megaboa.data.documents import Bad, Format, Record, text_getter
from megaboa.data.shards import Part
from megaboa.errors import InputError
from megaboa.records import SourceFile

ROWS = 1000  # maximum number of rows read at once
BYTES = 16 << 20


class Progress(Protocol):
    """Told how much of a part is read."""

    share: float


def rows(file: SourceFile, part: Part, form: Format, progress: Progress) -> Iterator[Record]:
    """The rows of a part: tables are cut in proportion to their bytes."""
    read = _parquet if file.kind == "parquet" else _arrow
    try:
        yield from read(file, part, form, progress)
    except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError) as error:
        raise InputError(f"{file.path}: not a readable {file.kind} file ({str(error).splitlines()[0]})") from error


def span(part: Part, size: int, count: int) -> tuple[int, int]:
    """First row of a part, and the row after its last."""
    return part.begin * count // size, part.end * count // size


def few(rows: int, size: int) -> int:
    """Number of rows to read at once, for so many rows in total with so many bytes."""
    return max(1, min(ROWS, BYTES * rows // max(1, size)))


def _parquet(file: SourceFile, part: Part, form: Format, progress: Progress) -> Iterator[Record]:
    with pyarrow.parquet.ParquetFile(file.path, buffer_size=1 << 20) as table:
        columns = _columns(table.schema_arrow.names, form, file.path)
        first, last = span(part, file.size, table.metadata.num_rows)
        begin = 0
        for group in range(table.num_row_groups):
            size = table.metadata.row_group(group)
            end = begin + size.num_rows
            if begin < last and first < end:
                position = begin
                for batch in table.iter_batches(
                    few(size.num_rows, size.total_byte_size), row_groups=[group], columns=columns
                ):
                    yield from _rows(batch, position, first, last, form, progress)
                    position += batch.num_rows
            begin = end


def _arrow(file: SourceFile, part: Part, form: Format, progress: Progress) -> Iterator[Record]:
    with pyarrow.memory_map(file.path) as stream:
        count = sum(batch.num_rows for batch in _batches(stream))
        first, last = span(part, file.size, count)
        stream.seek(0)
        position = 0
        for batch in _batches(stream):
            if position == 0:
                columns = _columns(batch.schema.names, form, file.path)
            chosen = batch.select(columns)
            step = few(chosen.num_rows, chosen.nbytes)
            for begin in range(0, chosen.num_rows, step):
                yield from _rows(chosen.slice(begin, step), position + begin, first, last, form, progress)
            position += batch.num_rows


def _batches(stream: Any) -> Iterator[pyarrow.RecordBatch]:
    """The batches of a stream, as written by `datasets`, or of a file in Arrow's file format."""
    try:
        reader = pyarrow.ipc.open_stream(stream)
    except pyarrow.ArrowInvalid:
        stream.seek(0)
        reader = pyarrow.ipc.open_file(stream)
        yield from (reader.get_batch(number) for number in range(reader.num_record_batches))
        return
    yield from reader


def _columns(names: Sequence[str], form: Format, path: str) -> list[str]:
    """The columns to read: those with texts, or all if there is a filter."""
    wanted = dict.fromkeys(key if key in names else key.split(".")[0] for key in form.keys)
    for name in wanted:
        if name not in names:
            raise InputError(f"{path}: no column {name!r}; set the corpus's `{form.named}` to one of {sorted(names)}")
    return list(wanted if form.judge is None else names)


def _rows(
    batch: pyarrow.RecordBatch, position: int, first: int, last: int, form: Format, progress: Progress
) -> Iterator[Record]:
    begin, end = max(first - position, 0), min(last - position, batch.num_rows)
    if begin >= end:
        return
    texts = text_getter(form)
    progress.share = (position + begin - first) / (last - first)
    for number, record in enumerate(_records(batch.slice(begin, end - begin)), start=position + begin):
        yield number, _decoded(record, texts, form)


def _records(batch: pyarrow.RecordBatch) -> list[dict[str, Any] | Bad]:
    try:
        return batch.to_pylist()
    except UnicodeDecodeError:  # a string column with invalid text: find the rows
        return [_record(batch.slice(number, 1)) for number in range(batch.num_rows)]


def _record(row: pyarrow.RecordBatch) -> dict[str, Any] | Bad:
    try:
        return row.to_pylist()[0]
    except UnicodeDecodeError as error:
        return Bad(f"not UTF-8 text (byte {error.start})")


def _decoded(record: dict[str, Any] | Bad, texts: Any, form: Format) -> Any:
    if isinstance(record, Bad):
        return record
    for key, value in record.items():
        if isinstance(value, bytes):
            try:
                record[key] = value.decode()
            except UnicodeDecodeError as error:
                if key in form.keys or any(name.startswith(f"{key}.") for name in form.keys):
                    return Bad(f"{key!r} is not UTF-8 text (byte {error.start})")  # other columns may be images
    return texts(record)
