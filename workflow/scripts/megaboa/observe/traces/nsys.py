"""Reads captures of Nsight Systems, from the SQLite files that `nsys export` writes.

Their schema changes between versions, and tables without rows may be absent. So every file is inspected first, and a
table that lacks a needed column becomes a finding. The file is opened read-only. Rows are read in blocks, so that a
large file needs little more memory than the columns that are kept.
"""

from __future__ import annotations

import array
import re
import struct
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from megaboa.observe.traces.captures import (
    EMPTY,
    EMPTY_SIZED,
    UNKNOWN,
    Capture,
    Events,
    Finding,
    Names,
    events,
    launch_rows,
)
from megaboa.observe.traces.sqlite_file import Database

RANGE_TYPES = (59, 60, 70, 71)  # NVTX event types: push/pop and start/end ranges
SMALL = 0x7FFFFFFF  # mask of the bits that distinguish threads in a global thread id; correlation ids fit into it
PROCESS_BITS = 24  # number of low bits of a global thread id that hold the thread, below the process
COPY_KINDS = {1: "Host-to-Device", 2: "Device-to-Host", 8: "Device-to-Device", 10: "Peer-to-Peer"}
# The newest schema that was tested, of Nsight Systems 2026.2 (2023.4 writes 3.7).
KNOWN_SCHEMA = (3, 25)
RANK_VARIABLES = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
WORLD_VARIABLES = ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE")
JOB_VARIABLES = ("SLURM_JOB_ID",)
SIZE_FIELD = "Message size [bytes]"
_IN_JSON = re.compile(r'"message size[^"]*"\s*:\s*"?(\d+)', re.IGNORECASE)
# Header of a payload: domain, flags, schema, flags, payload size, total size. nsys-ai 0.3 reads exports of 2026.2 this
# way. A payload that doesn't match its schema gives no number.
_HEAD = struct.Struct("<IIIIQQ")
_SIZE = struct.Struct("<Q")


def read(path: Path) -> list[Capture]:
    """Read one capture for every process and device that ran kernels, usually only one.

    Raises sqlite3.DatabaseError if the file is torn, or not an SQLite file.
    """
    with closing(Database(path)) as database:
        owners = _owners(database)
        if len(owners) < 2:
            return [_Reader(path, database).capture()]
        return [_Reader(path, database, owner).capture() for owner in owners]


def _owners(database: Database) -> list[tuple[int, int]]:
    if database.lacks("CUPTI_ACTIVITY_KIND_KERNEL", "deviceId", "globalPid"):
        return []
    query = "SELECT DISTINCT deviceId, COALESCE(globalPid, 0) FROM CUPTI_ACTIVITY_KIND_KERNEL ORDER BY 1, 2"
    return database.rows(query)


class _Reader:
    """Reads the events of one process on one device; without an owner all events."""

    def __init__(self, path: Path, database: Database, owner: tuple[int, int] | None = None) -> None:
        self.path, self.database, self.owner = path, database, owner
        self.findings: list[Finding] = []
        self.missing: list[str] = []
        self.names = Names()
        self._of_string: dict[int, int] = {}

    def capture(self) -> Capture:
        database, where = self.database, self.path.name
        self._strings()
        calls = self._table("CUPTI_ACTIVITY_KIND_RUNTIME", "nameId", "globalTid")
        ranges, sizes = self._ranges()
        kernels, copies = self._kernels(), self._copies()
        if sizes is not None and len(kernels):
            kernels = with_sizes(kernels, calls, ranges, sizes)
        version, newer = _version(database, where)
        variables = _variables(database)
        return Capture(
            path=self.path,
            kind="nsys",
            version=version,
            # the variables are those of the started program, which here has started several ranks
            rank=None if self.owner else _integer(_first(variables, RANK_VARIABLES)),
            owner=f"device {self.owner[0]}" if self.owner else None,
            world_size=_integer(_first(variables, WORLD_VARIABLES)),
            host=_host(database),
            device_name=_device(database),
            epoch=_epoch(database),
            session=_first(variables, JOB_VARIABLES),
            names=self.names.all(),
            kernels=kernels,
            copies=copies,
            ranges=ranges,
            calls=calls,
            network=tuple(_network(database)),
            gpu_metrics=tuple(_gpu_metrics(database)),
            missing=tuple(self.missing),
            findings=(*newer, *self.findings, *_diagnostics(database, where)),
        )

    def _strings(self) -> None:
        if self.database.lacks("StringIds", "id", "value"):
            self.missing.append("StringIds")
            return
        for number, value in self.database.rows("SELECT id, value FROM StringIds"):
            self._of_string[number] = self.names.number(plain(value))

    def _named(self, strings: np.ndarray) -> np.ndarray:
        """Convert ids of StringIds to numbers of names."""
        used, inverse = np.unique(strings, return_inverse=True)
        numbers = [self._of_string[key] if key in self._of_string else self.names.number(f"<{key}>") for key in used]
        return np.array(numbers, dtype=np.int64)[inverse] if len(used) else strings

    def _usable(self, table: str, *needed: str) -> bool:
        if table not in self.database.tables:
            self.missing.append(table)
            return False
        if lacking := self.database.lacks(table, *needed):
            text = f"table {table} has no column {', '.join(lacking)} in this version: it is left out"
            self._find("unknown_table", "warning", text)
            self.missing.append(table)
            return False
        return True

    def _table(self, table: str, name: str, place: str) -> Events:
        if not self._usable(table, "start", "end", name, place):
            return EMPTY
        what = f"start, end, {name}, COALESCE({place} & {SMALL}, 0), {self._correlation(table)}"
        query = f"SELECT {what} FROM {table} WHERE end IS NOT NULL{self._mine(table)}"
        start, end, names, places, correlation = self.database.columns(query, [np.int64, np.int64, *[np.int32] * 3])
        return Events(start, end, self._named(names).astype(np.int32), places, correlation).sorted()

    def _correlation(self, table: str) -> str:
        return (
            f"COALESCE(correlationId & {SMALL}, {UNKNOWN})"
            if "correlationId" in self.database.tables[table]
            else str(UNKNOWN)
        )

    def _mine(self, table: str) -> str:
        """The SQL condition that selects the owner's rows."""
        if self.owner is None:
            return ""
        device, process = self.owner
        columns = self.database.tables[table]
        if {"deviceId", "globalPid"} <= columns:
            return f" AND deviceId = {device} AND COALESCE(globalPid, 0) = {process}"
        return f" AND globalTid >> {PROCESS_BITS} = {process >> PROCESS_BITS}"

    def _kernels(self) -> Events:
        columns = self.database.tables.get("CUPTI_ACTIVITY_KIND_KERNEL", set())
        name = "demangledName" if "demangledName" in columns else "shortName"
        found = self._table("CUPTI_ACTIVITY_KIND_KERNEL", name, "streamId")
        if len(found) and "graphNodeId" in columns:
            of_graphs = (
                "SELECT COUNT(*) FROM CUPTI_ACTIVITY_KIND_KERNEL WHERE COALESCE(graphNodeId, 0) != 0"
                + self._mine("CUPTI_ACTIVITY_KIND_KERNEL")
            )
            count = self.database.rows(of_graphs)[0][0]
            if count:
                text = (
                    f"{count / len(found):.0%} of the kernels were launched by CUDA graphs: "
                    f"one launch stands for many, and launch times say little"
                )
                self._find("cuda_graphs", "note", text)
        return self._with_graphs(found)

    def _with_graphs(self, kernels: Events) -> Events:
        """Add CUDA graphs that were traced as a whole (`--cuda-graph-trace=graph`), which hides their kernels."""
        table = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
        if self.database.lacks(table, "start", "end", "streamId"):
            return kernels
        label = self.names.number("CUDA graph")
        what = f"start, end, {label}, streamId, {self._correlation(table)}, {UNKNOWN}, {UNKNOWN}"
        query = f"SELECT {what} FROM {table} WHERE 1{self._mine(table)}"
        rows = self.database.integers(query, 7)
        if not len(rows):
            return kernels
        text = f"{len(rows)} CUDA graphs were traced as a whole: what ran inside is unknown"
        self._find("graphs_whole", "warning", text)
        return events(np.concatenate([kernels.rows(), rows]), sized=True)

    def _copies(self) -> Events:
        parts = []
        if "CUPTI_ACTIVITY_KIND_MEMCPY" not in self.database.tables:
            self.missing.append("CUPTI_ACTIVITY_KIND_MEMCPY")
        for table, kind in (("CUPTI_ACTIVITY_KIND_MEMCPY", "copyKind"), ("CUPTI_ACTIVITY_KIND_MEMSET", "-1")):
            if self.database.lacks(table, "start", "end", "streamId", "bytes"):
                continue
            columns = self.database.tables[table]
            kind = kind if kind in columns or kind == "-1" else "0"
            kinds = ", ".join(f"COALESCE({side}, -1)" if side in columns else "-1" for side in ("srcKind", "dstKind"))
            what = f"start, end, {kind}, streamId, {self._correlation(table)}, bytes, {UNKNOWN}, {kinds}"
            query = f"SELECT {what} FROM {table} WHERE 1{self._mine(table)}"
            rows = self.database.integers(query, 9)
            rows[:, 2] = self._copy_names(rows[:, [2, 7, 8]])
            parts.append(rows[:, :7])
        return events(np.concatenate(parts), sized=True) if parts else EMPTY_SIZED

    def _copy_names(self, kinds: np.ndarray) -> np.ndarray:
        """Numbers of the copies' names, such as `Host-to-Device (Pageable to Device)`, by the capture's labels."""
        copies = {**COPY_KINDS, **self.database.pairs("ENUM_CUDA_MEMCPY_OPER", "id", "label")}
        memory = self.database.pairs("ENUM_CUDA_MEM_KIND", "id", "label")
        used, inverse = np.unique(kinds, axis=0, return_inverse=True)
        numbers = []
        for kind, source, target in used.tolist():
            name = "Memset" if kind == -1 else copies.get(kind, f"copy of kind {kind}")
            if source in memory and target in memory:
                name += f" ({memory[source]} to {memory[target]})"
            numbers.append(self.names.number(name))
        return np.array(numbers, dtype=np.int64)[inverse.ravel()] if len(used) else kinds[:, 0]

    def _ranges(self) -> tuple[Events, np.ndarray | None]:
        """The NVTX ranges, and the message sizes in NCCL's own ranges."""
        if not self._usable("NVTX_EVENTS", "start", "end", "eventType", "globalTid"):
            return EMPTY, None
        columns = self.database.tables["NVTX_EVENTS"]
        texts = ("text", "textId", "jsonText", "binaryData")
        wanted = [column if column in columns else "NULL" for column in texts]
        size_of = message_sizes(self.database)
        types = ", ".join(map(str, RANGE_TYPES))
        query = (
            f"SELECT start, end, COALESCE(globalTid & {SMALL}, 0), {', '.join(wanted)} FROM NVTX_EVENTS "
            f"WHERE eventType IN ({types}) AND end IS NOT NULL{self._mine('NVTX_EVENTS')}"
        )
        flat = array.array("q")
        for start, end, thread, text, string, payload, binary in self.database.each(query):
            name = self._of_string.get(string) if text is None else self.names.number(plain(text))
            name = self.names.number("<no name>") if name is None else name
            flat.extend((start, end, name, thread, UNKNOWN, size_of(payload, binary)))
        rows = np.frombuffer(flat, dtype=np.int64).reshape(-1, 6)
        rows = rows[np.argsort(rows[:, 0], kind="stable")]
        return events(rows[:, :5]), rows[:, 5] if (rows[:, 5] != UNKNOWN).any() else None

    def _find(self, code: str, level: str, text: str) -> None:
        self.findings.append(Finding(code, level, self.path.name, text))


def plain(name: str) -> str:
    """A name without PyTorch's numbering (`aten::mm, op_id = 12`), which would make each range's name unique."""
    return name.split(", op_id = ", 1)[0].split(", seq = ", 1)[0]


def _version(database: Database, where: str) -> tuple[str, list[Finding]]:
    meta = database.pairs("META_DATA_EXPORT")
    product = meta.get("EXPORT_PRODUCT_VERSION", "unknown")
    schema = tuple(_integer(meta.get(f"EXPORT_SCHEMA_VERSION_{part}")) or 0 for part in ("MAJOR", "MINOR"))
    if schema <= KNOWN_SCHEMA:
        return product, []
    text = (
        f"written by Nsight Systems {product} (schema {schema[0]}.{schema[1]}), newer than the newest known "
        f"({KNOWN_SCHEMA[0]}.{KNOWN_SCHEMA[1]}): tables and columns were found by their names"
    )
    return product, [Finding("newer_version", "warning" if schema[0] > KNOWN_SCHEMA[0] else "note", where, text)]


def _variables(database: Database) -> dict[str, str]:
    """Environment variables of the profiled process that give its rank.

    The capture holds all, but no others are kept.
    """
    if database.lacks("META_DATA_CAPTURE", "name", "value"):
        return {}
    wanted = (*RANK_VARIABLES, *WORLD_VARIABLES, *JOB_VARIABLES)
    rows = database.rows("SELECT value FROM META_DATA_CAPTURE WHERE name LIKE '%ENVIRONMENT_VARIABLE'")
    pairs = (value.partition("=") for (value,) in rows if value)
    return {name: text.strip('"') for name, _, text in pairs if name in wanted}


def _first(found: dict[str, str], names: tuple[str, ...]) -> str | None:
    return next((found[name] for name in names if name in found), None)


def _epoch(database: Database) -> int | None:
    """The time of day at 0 of the capture's clock, in nanoseconds."""
    if database.lacks("TARGET_INFO_SESSION_START_TIME", "utcEpochNs"):
        return None
    rows = database.rows("SELECT utcEpochNs FROM TARGET_INFO_SESSION_START_TIME")
    return rows[0][0] if rows else None


def _host(database: Database) -> str | None:
    named = database.pairs("TARGET_INFO_SYSTEM_ENV").get("Hostname")
    return named or database.pairs("META_DATA_CAPTURE").get("DEVICE_DISPLAY_NAME")


def _device(database: Database) -> str | None:
    if database.lacks("TARGET_INFO_GPU", "name"):
        return None
    return " / ".join(sorted({name for (name,) in database.rows("SELECT name FROM TARGET_INFO_GPU") if name})) or None


def _network(database: Database) -> list[dict[str, Any]]:
    """Mean and maximum of every counter of the network cards."""
    metrics = ("TARGET_INFO_NETWORK_METRICS", "metricsListId", "metricsIdx", "name", "unit")
    if database.lacks("NET_NIC_METRIC", "globalId", "value") or database.lacks(*metrics):
        return []
    query = (
        "SELECT m.globalId, t.name, t.unit, COUNT(*), AVG(m.value), MAX(m.value) FROM NET_NIC_METRIC m "
        "JOIN TARGET_INFO_NETWORK_METRICS t USING (metricsListId, metricsIdx) "
        "GROUP BY m.globalId, t.name, t.unit ORDER BY t.name, m.globalId"
    )
    return _counters(database, query)


def _gpu_metrics(database: Database) -> list[dict[str, Any]]:
    """Mean and maximum of every metric of the GPUs.

    A GPU's number is the low byte of the type; names include the unit.
    """
    named = ("TARGET_INFO_GPU_METRICS", "typeId", "metricId", "metricName")
    if database.lacks("GPU_METRICS", "typeId", "metricId", "value") or database.lacks(*named):
        return []
    query = (
        "SELECT m.typeId & 255, t.metricName, NULL, COUNT(*), AVG(m.value), MAX(m.value) FROM GPU_METRICS m "
        "JOIN (SELECT DISTINCT typeId, metricId, metricName FROM TARGET_INFO_GPU_METRICS) t USING (typeId, metricId) "
        "GROUP BY m.typeId & 255, t.metricName ORDER BY t.metricName, m.typeId & 255"
    )
    return _counters(database, query)


def _counters(database: Database, query: str) -> list[dict[str, Any]]:
    columns = ("card", "metric", "unit", "n", "mean", "max")
    return [dict(zip(columns, row, strict=True)) for row in database.rows(query)]


def _diagnostics(database: Database, where: str) -> list[Finding]:
    """Warnings of Nsight Systems itself."""
    if database.lacks("DIAGNOSTIC_EVENT", "severity", "text"):
        return []
    texts = database.rows("SELECT DISTINCT text FROM DIAGNOSTIC_EVENT WHERE severity > 1 LIMIT 5")
    return [Finding("diagnostic", "warning", where, f"Nsight Systems said: {text}") for (text,) in texts]


def _integer(text: Any) -> int | None:
    try:
        return int(text)
    except (TypeError, ValueError):
        return None


def message_sizes(database: Database) -> Callable[[str | None, bytes | str | None], int]:
    """A function that returns the message size in a range's two kinds of payload; -1 if neither has one.

    NCCL attaches message sizes to its NVTX ranges: as JSON in older exports, as bytes in newer ones.
    """
    schemas = _schemas(database)

    def size(text: str | None, binary: bytes | str | None) -> int:
        if text and (found := _IN_JSON.search(text)):
            return int(found.group(1))
        return _in_bytes(binary, schemas) if binary and schemas else UNKNOWN

    return size


def _schemas(database: Database) -> dict[int, tuple[int, int]]:
    """The offset of the message size and the length of the payload, by schema."""
    if database.lacks("NVTX_PAYLOAD_SCHEMAS", "schemaId", "payloadSize") or database.lacks(
        "NVTX_PAYLOAD_SCHEMA_ENTRIES", "schemaId", "name", "offset"
    ):
        return {}
    lengths = dict(database.rows("SELECT schemaId, payloadSize FROM NVTX_PAYLOAD_SCHEMAS"))
    entries = database.rows(f"SELECT schemaId, offset FROM NVTX_PAYLOAD_SCHEMA_ENTRIES WHERE name = '{SIZE_FIELD}'")
    return {schema: (offset or 0, lengths[schema]) for schema, offset in entries if lengths.get(schema)}


def _in_bytes(binary: bytes | str, schemas: dict[int, tuple[int, int]]) -> int:
    content = binary.encode("latin-1", "replace") if isinstance(binary, str) else binary
    if len(content) < _HEAD.size:
        return UNKNOWN
    _, _, schema, _, length, total = _HEAD.unpack_from(content)
    offset, expected = schemas.get(schema, (0, None))
    if length != expected or total != len(content) or _HEAD.size + offset + _SIZE.size > total:
        return UNKNOWN
    return _SIZE.unpack_from(content, _HEAD.size + offset)[0]


def with_sizes(kernels: Events, calls: Events, ranges: Events, sizes: np.ndarray) -> Events:
    """Give each kernel the size in the NVTX range in which it was launched, if that has one."""
    size = kernels.sizes
    launches = launch_rows(kernels, calls)
    for thread in np.unique(ranges.place[sizes != UNKNOWN]):
        rows = np.flatnonzero((sizes != UNKNOWN) & (ranges.place == thread))
        launched = np.flatnonzero((launches != UNKNOWN) & (calls.place[launches] == thread))
        times = calls.start[launches[launched]]
        index = np.searchsorted(ranges.start[rows], times, side="right") - 1
        inside = (index >= 0) & (times < ranges.end[rows[index]])
        size[launched[inside]] = sizes[rows[index[inside]]]
    return replace(kernels, size=size)
