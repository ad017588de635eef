"""Why ranks failed: from what they and their launcher wrote to one cause, with the line that shows it."""

from __future__ import annotations

import itertools
import re
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from megaboa.causes import Cause
from megaboa.launch.ranks import Ended

TAIL_BYTES = 65_536
EVIDENCE_LENGTH = 300
# How torch begins the lines of an exception once the ranks know each other.
_BEGIN = r"^(?:\[rank\d+\]: ?)?[ \t]*"
_EXCEPTION = rf"{_BEGIN}(?:\w+\.)*\w*(?:Error|Exception|Refused\w*)(?::|$)"
# Exceptions that Bridge has handled when it looks for optional libraries, and logs.
_HANDLED = re.compile(r"^.*failed with: Traceback \(most recent call last\):\n(?:(?:[ \t].*)?\n)*.*", re.MULTILINE)

# A kernel has reached where it must not.
KERNEL_FAULT = (
    r"(?:CUDA error|Cuda failure).*"
    r"(?:illegal memory access|illegal instruction|misaligned address|device-side assert|invalid program counter)"
)
# By rank of the cause: what is found further up explains what is found below it. When one rank runs out of memory, its
# peers report lost connections; these are victims.
PATTERNS: tuple[tuple[Cause, tuple[str, ...]], ...] = (
    (
        "out_of_memory",
        (
            r"torch\.(?:cuda\.)?OutOfMemoryError",
            r"CUDA out of memory",
            r"CUDA error: out of memory",
            r"Cuda failure.*out of memory",
            rf"{_BEGIN}MemoryError\b",
            r"DefaultCPUAllocator: (?:not enough memory|can't allocate memory)",
            r"[Dd]etected \d+ oom[-_ ]kill",
            r"\boom[-_]kill event",
            r": Out Of Memory\b",
            r"exceeded memory limit",
            r"Cannot allocate memory",
            r"std::bad_alloc",
            r"failed to map segment from shared object",
            r"CUBLAS_STATUS_ALLOC_FAILED",
        ),
    ),
    ("disk_full", (r"No space left on device", r"Disk quota exceeded")),
    (
        "gpu_failure",
        (
            r"uncorrectable ECC error",
            r"GPU has fallen off the bus",
            r"NVRM: Xid",
            r"CUDA error: (?:unspecified launch failure|unknown error|initialization error|device not ready)",
            r"no CUDA-capable device is detected",
            r"CUDA driver initialization failed",
        ),
    ),
    ("nan", (r"found (?:NaN|Inf) in ", r"Unexpected result (?:nan|inf)", r"NaN detected", r"loss is (?:nan|inf)\b")),
    ("import_error", (rf"{_BEGIN}(?:ModuleNotFoundError|ImportError): ", r"error while loading shared libraries")),
    (
        "data",
        (
            r"Index(?:ed)?Dataset.*(?:error|invalid|mismatch)",
            r"bad header.*\.idx",
            r"mmap length is greater than file size",
            r"not a valid index",
            r"buffer is smaller than requested size",
            r"\.idx and \.bin files cannot be found",
            r"(?:\.bin|\.idx)['\"]? does not exist",
        ),
    ),
    (
        "damaged_checkpoint",
        (
            r"PytorchStreamReader failed",
            r"CheckpointingException",
            r"invalid load key",
            r"Ran out of input",
            r"failed finding central directory",
        ),
    ),
    (
        "node_failure",
        (
            r"srun: error: Node failure on ",
            r"Communication connection failure",
            r"NODE FAILURE",
            r"Unable to contact slurmd",
        ),
    ),
    # What reports it is NCCL's watchdog, but no connection is to blame: the same step does the same again.
    ("crash", (KERNEL_FAULT,)),
    (
        "transient",
        (
            r"Watchdog caught collective operation timeout",
            r"NCCL (?:[Ee]rror|failure)",
            r"nccl(?:System|Remote|Internal)Error",
            r"[Cc]onnection (?:was )?(?:reset|refused|closed)",
            r"Gloo connectFullMesh failed",
            r"[Ss]ocket [Tt]imeout",
            r"[Tt]imed out (?:waiting|after|connecting)",
            r"Stale file handle",
            r"Input/output error",
            r"Remote I/O error",
            r"Transport endpoint",
            r"Address already in use|EADDRINUSE",
            r"Resource temporarily unavailable",
            r"failed to connect to all addresses",
            r"Dist(?:Network|Backend|Store)Error",
            r"No route to host",
            r"Network is unreachable",
            r"ibv_\w+ failed",
        ),
    ),
    ("config", (_EXCEPTION, r"^error: .*\s*\Z")),  # the second: our own last words (data/errors.py)
)
# Functions of Bridge's, and of ours, that read a checkpoint before the first step.
_LOADERS = r"(?:_?load_checkpoint\w*|read_train_state|read_run_config|saved_with)"
_LOADING = re.compile(rf'\s+File ".*", line \d+, in {_LOADERS}$')
_RANK = re.compile(r"^\[rank\d+\]: ?", re.MULTILINE)
# Causes of attempts that did no step: who trains has read its settings, and the checkpoint.
_BEFORE_STEPS: frozenset[Cause] = frozenset({"config", "damaged_checkpoint"})
_COMPILED = tuple((cause, re.compile(rf"^.*?(?:{'|'.join(words)}).*$", re.MULTILINE)) for cause, words in PATTERNS)
_LAST_EXCEPTION = re.compile(rf"{_EXCEPTION}.*$", re.MULTILINE)


@dataclass(frozen=True)
class Failure:
    cause: Cause
    evidence: str
    rank: int | None = None
    nodes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.cause.replace('_', ' ')}: {self.evidence}"


def classify(ended: Ended, logs: Mapping[int | None, str], steps: int, resumed_from: int = 0) -> Failure:
    """The cause of an end, from the tails of the logs by rank (None: the launcher's) and the number of steps done.

    What has trained before is not refused by its configuration, whatever exception ends it now.
    """
    logs = {rank: _HANDLED.sub("", text) for rank, text in logs.items()}
    for cause, pattern in _COMPILED:
        if (cause in _BEFORE_STEPS and steps) or (cause == "config" and (ended.killed or resumed_from)):
            continue
        matches = _matches(cause, pattern, logs, ended.rank)
        if cause == "damaged_checkpoint" and resumed_from:
            matches = itertools.chain(matches, _failed_loads(logs, ended.rank))
        for rank, line in matches:
            if cause == "transient" and _is_victim(rank, ended):
                continue
            nodes = _nodes(cause, rank, ended, logs)
            # Without a name nobody can be avoided; the health check before the next attempt finds out who it is.
            return Failure("transient" if cause == "node_failure" and not nodes else cause, line, rank, nodes)
    if ended.killed:
        return Failure("killed", str(ended), ended.rank)
    if ended.ok:
        return Failure("crash", "every rank ended with 0, but before the last step")
    return Failure("crash", _last_words(logs, ended) or str(ended), ended.rank)


def read_tails(logs: Iterable[tuple[int | None, Path]]) -> dict[int | None, str]:
    return {rank: _tail(path) for rank, path in logs if path.exists()}


def _matches(
    cause: Cause, pattern: re.Pattern[str], logs: Mapping[int | None, str], first: int | None
) -> Iterable[tuple[int | None, str]]:
    """Lines that match, those of the rank that failed first before the others'."""
    for rank in _in_order(logs, first):
        if found := pattern.findall(logs[rank]):
            line = found[-1 if cause == "config" else 0]  # exceptions before the last one were dealt with
            yield rank, line.strip()[:EVIDENCE_LENGTH]


def _failed_loads(logs: Mapping[int | None, str], first: int | None) -> Iterable[tuple[int | None, str]]:
    """Exceptions out of the code that reads a checkpoint, whatever their kind, if nothing else explains them.

    A rank that waits there for another one sees lost connections: it is a victim.
    """
    for rank in _in_order(logs, first):
        line = _failed_load(logs[rank])
        if line and not any(pattern.search(line) for cause, pattern in _COMPILED if cause != "config"):
            yield rank, f"{line.strip()[:EVIDENCE_LENGTH]} (while the checkpoint was read)"


def _failed_load(log: str) -> str | None:
    loading, found = False, None
    for line in _RANK.sub("", log).splitlines():
        if line.startswith("Traceback "):
            loading = False
        elif _LOADING.match(line):
            loading = True
        elif loading and line and not line[0].isspace():
            loading, found = False, line
    return found


def _in_order(logs: Mapping[int | None, str], first: int | None) -> list[int | None]:
    """The rank that failed first, then the launcher, then the others."""
    return sorted(logs, key=lambda rank: (rank != first, -1 if rank is None else rank))


def _is_victim(rank: int | None, ended: Ended) -> bool:
    """Lost connections are what its peers saw of a rank that was killed; it leaves words only if it aborted itself."""
    return ended.killed and (rank != ended.rank or ended.returncode == -signal.SIGKILL)


def _nodes(cause: Cause, rank: int | None, ended: Ended, logs: Mapping[int | None, str]) -> tuple[str, ...]:
    """The nodes to blame, as far as the logs name them."""
    if cause == "node_failure":
        return tuple(re.findall(r"Node failure on (\S+)", logs.get(rank, "")))
    return (ended.node,) if cause == "gpu_failure" and rank == ended.rank and ended.node else ()


def _last_words(logs: Mapping[int | None, str], ended: Ended) -> str:
    text = logs.get(ended.rank, "")
    lines = [line.strip() for line in _LAST_EXCEPTION.findall(text) or text.splitlines() if line.strip()]
    return lines[-1][:EVIDENCE_LENGTH] if lines else ""


def _tail(path: Path) -> str:
    with path.open("rb") as stream:
        size = stream.seek(0, 2)
        stream.seek(max(size - TAIL_BYTES, 0))
        return stream.read().decode(errors="replace")
