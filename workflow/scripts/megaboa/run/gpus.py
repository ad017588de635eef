"""What the driver and the kernel say about this node's GPUs: nvidia-smi and Xid lines. Standard library only."""

from __future__ import annotations

import contextlib
import csv
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

SMI_SECONDS = 15.0
# Answers without a value: the driver has none for this GPU, or withholds it from this user. The memory of a GPU in MIG
# mode is only shown to root.
UNTOLD = frozenset({"", "N/A", "[N/A]", "[Not Supported]", "[Not Found]", "[Insufficient Permissions]"})
OCCUPIED_GIB = 2.0  # drivers and monitors use some hundred MiB of an idle GPU
MEMORY_SLACK = 0.92  # an H100's "80 GB" are 79.6 GiB, a B200's "192 GB" are 179 GiB
# Faults of the GPU, its memory, its links or its firmware. Others (13, 31, 43, 45 ...) come from a failed program,
# mostly of other users, and say nothing about the node.
HARDWARE_XIDS = frozenset({46, 48, 62, 64, 74, 79, 95, 119, 120, 140, 143})
XID_SECONDS = 24 * 3600.0  # older lines may precede a reset that repaired the GPU
FIELDS = ("index", "uuid", "name", "pci.bus_id", "memory.total", "memory.used")
# Fields that depend on driver and GPU: nvidia-smi refuses a whole query because of a single unknown field.
OPTIONAL_FIELDS = (
    "driver_version",
    "ecc.errors.uncorrected.volatile.total",
    "retired_pages.pending",
    "remapped_rows.pending",
    "remapped_rows.failure",
    "gpu_recovery_action",
)

Gpu = dict[str, str | None]


def query() -> list[Gpu]:
    """nvidia-smi's values for all GPUs; fields that this driver doesn't know are left out."""
    fields = [*FIELDS, *OPTIONAL_FIELDS]
    while True:
        command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=SMI_SECONDS, check=False)
        unknown = unknown_field(done.stdout + done.stderr)
        if unknown in OPTIONAL_FIELDS and unknown in fields:
            fields.remove(unknown)
            continue
        if done.returncode:
            said = (done.stdout + done.stderr).strip() or "no message"
            raise ValueError(f"exit code {done.returncode}: {said.splitlines()[0]}")
        return parse(done.stdout, fields)


def name() -> str | None:
    """Name of this host's first GPU."""
    return _of_first("name")


def driver() -> str | None:
    """Version of the driver."""
    return _of_first("driver_version")


def _of_first(field: str) -> str | None:
    """A field of the first GPU; None if there is no GPU, or nvidia-smi fails or doesn't report it."""
    try:
        return query()[0].get(field)
    except (OSError, ValueError, IndexError, subprocess.SubprocessError):
        return None


def unknown_field(said: str) -> str | None:
    match = re.search(r'Field "([^"]+)" is not a valid field to query', said)
    return match and match[1]


def parse(said: str, fields: list[str]) -> list[Gpu]:
    """One GPU per line of output; None for values that the driver doesn't tell."""
    lines = [line for line in csv.reader(said.splitlines(), skipinitialspace=True) if line]
    for line in lines:
        if len(line) != len(fields):
            raise ValueError(f"unexpected answer {', '.join(line)!r}")
    return [dict(zip(fields, map(_value, line), strict=True)) for line in lines]


def _value(text: str) -> str | None:
    text = text.strip()
    return None if text in UNTOLD else text


def visible(gpus: list[Gpu], chosen: str | None) -> list[Gpu]:
    """The GPUs that CUDA shows to this job. nvidia-smi shows all of the node, unless others are fenced off.

    `chosen`: CUDA_VISIBLE_DEVICES. If it is set but empty, CUDA shows none.
    """
    if chosen is None:
        return gpus
    names = [name.strip() for name in chosen.split(",")]
    return [gpu for gpu in gpus if any(gpu["index"] == name or _is_uuid(gpu, name) for name in names)]


def count(gpus: list[Gpu], chosen: str | None) -> int:
    """Number of GPUs that CUDA shows to this job, or of MIG instances, which nvidia-smi doesn't list here."""
    parts = [name for name in (chosen or "").split(",") if name.strip().startswith("MIG-")]
    return len(visible(gpus, chosen)) + len(parts)


def _is_uuid(gpu: Gpu, name: str) -> bool:
    return name.startswith("GPU-") and (gpu["uuid"] or "").startswith(name)


def problems(gpu: Gpu, memory_gib: float | None) -> list[str]:
    """Problems of a GPU that the driver reports."""
    name = f"GPU {gpu['index']}"
    odd = [f"{name}: {field} reads {value}" for field, value in gpu.items() if value and value.startswith("[")]
    if odd:  # "[Unknown Error]", "[GPU requires reset]", "[GPU is lost]"
        return odd
    found = []
    total = _number(gpu["memory.total"])
    if memory_gib is not None and total is not None and total / 1024 < memory_gib * MEMORY_SLACK:
        found.append(f"{name}: {total / 1024:.1f} GiB of memory instead of {memory_gib:g}")
    if occupied := occupied_gib(gpu):
        found.append(f"{name}: {occupied:.1f} GiB of memory are in use by other processes")
    if errors := _number(gpu.get("ecc.errors.uncorrected.volatile.total")):
        found.append(f"{name}: {errors:.0f} uncorrected memory errors since the driver was loaded")
    for key, text in (
        ("retired_pages.pending", "pages of its memory wait to be retired: it needs a reset"),
        ("remapped_rows.pending", "rows of its memory wait to be remapped: it needs a reset"),
        ("remapped_rows.failure", "rows of its memory couldn't be remapped: it must be replaced"),
    ):
        if (gpu.get(key) or "no").lower() not in ("no", "0"):
            found.append(f"{name}: {text}")
    if (action := gpu.get("gpu_recovery_action") or "None") != "None":
        found.append(f"{name}: the driver asks for its recovery: {action}")
    return found


def occupied_gib(gpu: Gpu) -> float:
    """Memory in use by other processes; 0 if it is no more than an idle GPU's."""
    used = (_number(gpu["memory.used"]) or 0.0) / 1024
    return used if used > OCCUPIED_GIB else 0.0


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


@dataclass(frozen=True)
class Xid:
    """A fault report of the driver in the kernel's log."""

    age: float  # seconds
    pci: str
    number: int
    text: str

    def __str__(self) -> str:
        return f"{self.pci}: {self.number}"


def read_xids() -> list[Xid] | None:
    """The driver's fault reports since boot; None if the kernel's log can't be read."""
    try:
        done = subprocess.run(["dmesg"], capture_output=True, text=True, errors="replace", timeout=5, check=True)
        uptime = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
    except (subprocess.SubprocessError, OSError, ValueError):
        return None
    return parse_xids(done.stdout, uptime)


def parse_xids(log: str, uptime: float) -> list[Xid]:
    """Parse lines such as `[ 1234.5] NVRM: Xid (PCI:0000:3b:00): 79, pid=..., GPU has fallen off the bus.`"""
    pattern = re.compile(r"^(?:\[\s*(\d+\.\d+)\])?.*NVRM: Xid \(PCI:([0-9a-fA-F:.]+)[^)]*\): (\d+)[,\s]*(.*)$", re.M)
    return [
        Xid(
            age=max(0.0, uptime - float(match[1])) if match[1] else 0.0,
            pci=match[2],
            number=int(match[3]),
            text=match[4].strip(),
        )
        for match in pattern.finditer(log)
    ]


def xid_problems(xids: list[Xid], gpus: list[Gpu]) -> list[str]:
    """Recent hardware faults of these GPUs. Others on the node are ignored, as they may be other users'."""
    index = {_pci(gpu["pci.bus_id"] or ""): gpu["index"] for gpu in gpus}
    found = {
        f"GPU {index[_pci(xid.pci)]}: Xid {xid.number} in the kernel's log: {xid.text}": None
        for xid in xids
        if xid.number in HARDWARE_XIDS and xid.age < XID_SECONDS and _pci(xid.pci) in index
    }
    return list(found)


def _pci(address: str) -> tuple[int, ...]:
    """Domain, bus and device as numbers, so that `00000000:3B:00.0` equals `0000:3b:00`."""
    with contextlib.suppress(ValueError):
        return tuple(int(part, 16) for part in address.partition(".")[0].split(":"))
    return ()
