"""Captures of Nsight Systems, from the SQLite files that `nsys export` writes.

Their schema changes from version to version, and tables without rows may be absent: what is there is looked up in
every file, and a table that lacks a column that is needed becomes a finding. The file is opened read-only, and rows are
taken in blocks, so that a large one needs little more memory than the columns that are kept.
"""

from __future__ import annotations

import array
from contextlib import closing
from pathlib import Path

import numpy as np

from megaboa.observe.traces import nsys_about as about
from megaboa.observe.traces.events import EMPTY, EMPTY_SIZED, UNKNOWN, Capture, Events, Names, events
from megaboa.observe.traces.findings import Finding
from megaboa.observe.traces.nvtx_payload import message_sizes, with_sizes
from megaboa.observe.traces.sqlite_file import Database

RANGE_TYPES = (59, 60, 70, 71)  # of NVTX: push and pop, start and end
SMALL = 0x7FFFFFFF  # of a thread's global id these bits tell threads apart; correlations have no more
PROCESS_BITS = 24  # below which a global thread id has the thread
COPY_KINDS = {1: "Host-to-Device", 2: "Device-to-Host", 8: "Device-to-Device", 10: "Peer-to-Peer"}


def read(path: Path) -> list[Capture]:
    """One capture for every process and device that ran kernels: mostly one.

    Raises sqlite3.DatabaseError where the file is torn, or none of SQLite's.
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
    """Reads what one process did on one device; without an owner everything."""

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
        version, newer = about.version(database, where)
        variables = about.variables(database)
        return Capture(
            path=self.path,
            kind="nsys",
            version=version,
            # The variables are those of the program that was started, here one that started several ranks.
            rank=None if self.owner else about.integer(about.first(variables, about.RANK_VARIABLES)),
            owner=f"device {self.owner[0]}" if self.owner else None,
            world_size=about.integer(about.first(variables, about.WORLD_VARIABLES)),
            host=about.host(database),
            device_name=about.device(database),
            epoch=about.epoch(database),
            session=about.first(variables, about.JOB_VARIABLES),
            names=self.names.all(),
            kernels=kernels,
            copies=copies,
            ranges=ranges,
            calls=calls,
            network=tuple(about.network(database)),
            missing=tuple(self.missing),
            findings=(*newer, *self.findings, *about.diagnostics(database, where)),
        )

    def _strings(self) -> None:
        if self.database.lacks("StringIds", "id", "value"):
            self.missing.append("StringIds")
            return
        for number, value in self.database.rows("SELECT id, value FROM StringIds"):
            self._of_string[number] = self.names.number(plain(value))

    def _named(self, strings: np.ndarray) -> np.ndarray:
        """Numbers of StringIds as numbers of names."""
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
        """The condition that a row is the owner's."""
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
        """Graphs that were traced as a whole (`--cuda-graph-trace=graph`) hide the kernels in them."""
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
        """`Host-to-Device (Pageable to Device)`, by the capture's own labels."""
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
        """Ranges, and beside them the bytes that NCCL's own ranges name."""
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
    """`aten::mm, op_id = 12` as `aten::mm`: PyTorch numbers the ranges that it emits, and each would be a name."""
    return name.split(", op_id = ", 1)[0].split(", seq = ", 1)[0]
