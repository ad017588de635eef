"""Captures with known answers: one story, told as an export of Nsight Systems and as a trace of PyTorch.

Times are microseconds. Stream 7 computes, stream 20 communicates, process 1 is the one that trains.
"""

from __future__ import annotations

import gzip
import json
import sqlite3
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SCHEMA = (Path(__file__).parent / "nsys-3.7.sql").read_text()
GEMM = "sm90_xmma_gemm_bf16bf16_bf16f32_tn"
NORM = "void layer_norm::ln_fwd_kernel<float>(Params)"
ADD = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int)"
ADAM = "void multi_tensor_apply_kernel<AdamFunctorMaster<float>>(int)"
ATTENTION = "flash_fwd_kernel<Flash_fwd_kernel_traits<128>>"
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
SEND = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
COMPUTE, NCCL = 7, 20
MEMORY = {0: "Pageable", 1: "Pinned", 2: "Device"}


@dataclass
class Story:
    rank: int = 0
    world_size: int = 1
    host: str = "node-1"
    epoch: int = 1_700_000_000_000_000_000
    clock: int = 0  # added to every time: where the capture's clock begins
    kernels: list[dict[str, Any]] = field(default_factory=list)
    copies: list[dict[str, Any]] = field(default_factory=list)
    ranges: list[tuple[str, float, float, int]] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)

    def kernel(self, name, start, duration, stream=COMPUTE, launch=None, size=None, group=None, process=1, device=0):
        """`launch`: when the host's call began, 2 µs long; default: 5 µs before."""
        launch = start - 5 if launch is None else launch
        row = {"name": name, "start": start, "duration": duration, "stream": stream, "launch": launch}
        self.kernels.append({**row, "size": size, "group": group, "thread": process << 24 | 1, "device": device})

    def copy(self, start, duration, size, kind=1, source=0, target=2, stream=30):
        row = {"start": start, "duration": duration, "size": size, "kind": kind, "stream": stream}
        self.copies.append({**row, "source": source, "target": target})

    def range(self, name, start, end, thread=1 << 24 | 1):
        self.ranges.append((name, start, end, thread))

    def write(self, folder: Path, form: str) -> Path:
        return {"nsys": self.nsys, "pytorch": self.pytorch}[form](folder)

    def nsys(self, folder: Path, name: str | None = None, schema: str = SCHEMA, version=(3, 7)) -> Path:
        path = folder / (name or f"rank-{self.rank}.sqlite")
        connection = sqlite3.connect(path)
        connection.executescript(schema)
        strings: dict[str, int] = {}
        write = Tables(connection).write
        number = lambda text: strings.setdefault(text, len(strings))  # noqa: E731
        for index, kernel in enumerate(self.kernels):
            launched, name_id = self._ns(kernel["launch"]), number(kernel["name"])
            place = {"deviceId": kernel["device"], "globalPid": kernel["thread"] >> 24 << 24}
            ids = {"demangledName": name_id, "shortName": name_id, "streamId": kernel["stream"]}
            write("CUPTI_ACTIVITY_KIND_KERNEL", **self._times(kernel), **ids, correlationId=index, **place)
            row = {"nameId": number("cudaLaunchKernel"), "globalTid": kernel["thread"], "correlationId": index}
            write("CUPTI_ACTIVITY_KIND_RUNTIME", start=launched, end=launched + 2000, **row)
            if kernel["size"]:
                payload = json.dumps({"Message size [bytes]": kernel["size"]})
                row = {"text": "ncclAllReduce", "eventType": 59, "globalTid": kernel["thread"], "jsonText": payload}
                write("NVTX_EVENTS", start=launched - 100, end=launched + 2100, **row)
        for index, copy in enumerate(self.copies):
            row = {"globalPid": 1 << 24, "bytes": copy["size"], "copyKind": copy["kind"], "streamId": copy["stream"]}
            row |= {"srcKind": copy["source"], "dstKind": copy["target"], "correlationId": 10_000_000 + index}
            write("CUPTI_ACTIVITY_KIND_MEMCPY", **self._times(copy), **row)
        for text, start, end, thread in self.ranges:
            row = {"textId": number(text), "eventType": 59, "globalTid": thread}
            write("NVTX_EVENTS", start=self._ns(start), end=self._ns(end), **row)
        for text, key in strings.items():
            write("StringIds", id=key, value=text)
        for key, label in ((1, "Host-to-Device"), (2, "Device-to-Host")):
            write("ENUM_CUDA_MEMCPY_OPER", id=key, label=label)
        for key, label in MEMORY.items():
            write("ENUM_CUDA_MEM_KIND", id=key, label=label)
        write("TARGET_INFO_SESSION_START_TIME", utcEpochNs=self.epoch - self.clock * 1000)
        write("TARGET_INFO_SYSTEM_ENV", name="Hostname", value=self.host)
        write("META_DATA_EXPORT", name="EXPORT_PRODUCT_VERSION", value="2023.4.4.54")
        for part, value in zip(("MAJOR", "MINOR"), version, strict=True):
            write("META_DATA_EXPORT", name=f"EXPORT_SCHEMA_VERSION_{part}", value=str(value))
        environment = {"RANK": self.rank, "WORLD_SIZE": self.world_size, **self.environment}
        for key, value in environment.items():
            write("META_DATA_CAPTURE", name="PROCESS_0:ENVIRONMENT_VARIABLE", value=f'{key}="{value}"')
        connection.commit()
        for (table,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
            if not connection.execute(f"SELECT 1 FROM {table} LIMIT 1").fetchone():
                connection.execute(f"DROP TABLE {table}")  # `nsys export` is lazy by default: no rows, no table
        connection.commit()
        connection.close()
        return path

    def pytorch(self, folder: Path, name: str | None = None) -> Path:
        path = folder / (name or f"rank-{self.rank}.json.gz")
        found = []
        for index, kernel in enumerate(self.kernels):
            values = {"stream": kernel["stream"], "correlation": index, "device": 0}
            if kernel["size"]:
                elements = kernel["size"] // 2
                values |= {"In msg nelems": elements, "Out msg nelems": elements, "dtype": "BFloat16"}
                values |= {"Group size": kernel["group"] or 2, "Collective name": "allreduce"}
            found.append(self._event("kernel", kernel["name"], kernel["start"], kernel["duration"], 0, values))
            call = {"correlation": index}
            found.append(self._event("cuda_runtime", "cudaLaunchKernel", kernel["launch"], 2, kernel["thread"], call))
        for copy in self.copies:
            label = f"Memcpy HtoD ({MEMORY[copy['source']]} -> {MEMORY[copy['target']]})"
            values = {"stream": copy["stream"], "bytes": copy["size"], "correlation": -1}
            found.append(self._event("gpu_memcpy", label, copy["start"], copy["duration"], 0, values))
        for text, start, end, thread in self.ranges:
            found.append(self._event("user_annotation", text, start, end - start, thread, {}))
        document = {
            "schemaVersion": 1,
            "deviceProperties": [{"id": 0, "name": "NVIDIA H200"}],
            "distributedInfo": {"backend": "nccl", "rank": self.rank, "world_size": self.world_size},
            "host_name": self.host,
            "baseTimeNanoseconds": self.epoch - self.clock * 1000,
            "traceEvents": found,
            "traceName": "x",
        }
        opener = gzip.open if path.suffix == ".gz" else open
        with opener(path, "wt") as stream:
            json.dump(document, stream)
        return path

    def _event(self, category, name, start, duration, thread, values):
        event = {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": thread, "ts": start + self.clock}
        return {**event, "dur": duration, "args": values}

    def _ns(self, time: float) -> int:
        return round((time + self.clock) * 1000)

    def _times(self, row: dict[str, Any]) -> dict[str, int]:
        return {"start": self._ns(row["start"]), "end": self._ns(row["start"] + row["duration"])}


class Tables:
    """Rows by the names of their columns; what a story doesn't say, but the schema wants, is 0."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.connection = connection
        self.columns: dict[str, dict[str, Any]] = {}

    def write(self, table: str, **row: Any) -> None:
        if table not in self.columns:
            found = self.connection.execute(f"PRAGMA table_info({table})").fetchall()
            required = {
                name: (0 if kind == "INTEGER" else "") if wanted else None for _, name, kind, wanted, *_ in found
            }
            self.columns[table] = required
        known = self.columns[table]
        row = {**known, **{name: value for name, value in row.items() if name in known}}
        names = ", ".join(f'"{name}"' for name in row)
        marks = ", ".join("?" * len(row))
        self.connection.execute(f"INSERT INTO {table} ({names}) VALUES ({marks})", tuple(row.values()))
