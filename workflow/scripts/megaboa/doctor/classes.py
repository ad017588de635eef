"""Finer than causes: what a person would call the trouble. The supervisor's cause decides, then what the logs say."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass

from megaboa.causes import CAUSES, KERNEL_FAULT

HUB = (
    r"GatedRepo|gated repo|RepositoryNotFound|401 Client Error|403 Client Error|HF_TOKEN|OfflineMode"
    r"|couldn't connect to 'https://huggingface\.co'|LocalEntryNotFoundError|Invalid user token"
    r"|the hub can't be reached|is gated: ask for access|is not on the hub, or is private"
)
NETWORK = (
    r"ibv_\w+ failed|libfabric|\bEFA\b|NET/(?:IB|OFI|Socket)|No route to host|Network is unreachable|NCCL_SOCKET_IFNAME"
    r"|Bootstrap : no socket interface|failed to connect to all addresses|Connection refused"
)
GPU_MEMORY = (
    r"CUDA out of memory|OutOfMemoryError|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED"
    r"|Cuda failure.*out of memory"
)
QUOTA = r"[Qq]uota exceeded"
MOST, LENGTH = 3, 300  # lines of evidence, characters of a line
HEALTHY = "NCCL INFO"  # NCCL_DEBUG=INFO names networks and interfaces when all is well

# Where the cause leaves it open: what a line of the logs makes of it.
FINER: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (("out_of_memory",), GPU_MEMORY, "gpu_memory"),
    (("disk_full",), QUOTA, "quota"),
    (("config", "crash", "transient", "import_error"), HUB, "hub"),
    (("crash", "poisoned"), KERNEL_FAULT, "kernel_fault"),
    (("transient", "hang", "crash", "killed", "poisoned"), NETWORK, "network"),
)


@dataclass(frozen=True)
class Trouble:
    name: str
    evidence: tuple[str, ...]


def trouble(cause: str, detail: str, logs: Mapping[int | None, str]) -> Trouble:
    """What it is called, and the lines that show it: that of the supervisor first."""
    first = (detail.strip()[:LENGTH],) if detail else ()
    for causes, pattern, name in FINER:
        found = _lines(pattern, detail, logs) if cause in causes else ()
        if found:
            return Trouble(name, tuple(dict.fromkeys((*first, *found)))[:MOST])
    return Trouble(CAUSES[cause].trouble if cause in CAUSES else "unknown", first)


def _lines(pattern: str, detail: str, logs: Mapping[int | None, str]) -> tuple[str, ...]:
    wanted = re.compile(rf"^.*(?:{pattern}).*$", re.MULTILINE)
    found: dict[str, None] = {}
    for text in itertools.chain([detail], logs.values()):
        lines = (line.strip()[:LENGTH] for line in wanted.findall(text))
        found |= dict.fromkeys(line for line in lines if HEALTHY not in line)
        if len(found) > MOST:  # the others of thousands of ranks need not be read
            break
    return tuple(found)
