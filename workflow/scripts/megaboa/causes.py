"""Why attempts end: one table of causes, with everything that depends only on the cause. Standard library only.

The supervisor determines the cause (`run/failures.py`) and the response (`run/recovery.py`); readers of the ledger take
its name from here, and it is the doctor's starting point.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

# resume: restart the ranks in this allocation. requeue: give up the nodes and wait for others.
Action = Literal["stop", "resume", "requeue"]
ACTIONS = get_args(Action)

RANK = r"\[rank\d+\]: ?"  # the prefix that torch puts before lines of an exception once the ranks know each other
_BEGIN = rf"^(?:{RANK})?[ \t]*"
EXCEPTION = rf"{_BEGIN}(?:\w+\.)*\w*(?:Error|Exception|Refused\w*)(?::|$)"
INTERRUPT = rf"{_BEGIN}KeyboardInterrupt"  # SIGINT, whoever sent it
# A kernel's own fault, such as access to memory that isn't its own.
KERNEL_FAULT = (
    r"(?:CUDA error|Cuda failure).*"
    r"(?:illegal memory access|illegal instruction|misaligned address|device-side assert|invalid program counter)"
)
# How CUDA, its libraries and NCCL say that a GPU's memory is full.
GPU_OUT_OF_MEMORY = (
    r"torch\.(?:cuda\.)?OutOfMemoryError",
    r"CUDA out of memory",
    r"CUDA (?:driver )?error: out of memory",  # the driver's: expandable segments
    r"Cuda failure.*out of memory",
    r"CUBLAS_STATUS_ALLOC_FAILED",
    r"CUDNN_STATUS_(?:ALLOC|INTERNAL_ERROR_DEVICE_ALLOCATION)_FAILED",  # before cuDNN 9, and since
)
UNREACHABLE = (
    r"failed to connect to all addresses",
    r"No route to host",
    r"Network is unreachable",
    r"ibv_\w+ failed",
)


@dataclass(frozen=True)
class End:
    """A cause of an attempt's end. `noun`: its name for people. `action`: the default response. `trouble`: the doctor's
    class, unless logs are more specific. `patterns`: of log lines."""

    noun: str
    action: Action
    trouble: str
    patterns: tuple[str, ...] = ()
    free: bool = False  # not a failure: it doesn't use up the budget
    repeatable: bool = False  # if the same step fails twice for this cause, the failure is reproducible
    node: bool = False  # the node is to blame
    before_first_step: bool = False  # only before the first step: whoever trains has read its settings and checkpoint
    second_hand: bool = False  # may be a consequence of another rank's failure
    may_lack_evidence: bool = False  # the fallback for ranks that may have died before they could write the reason
    interrupts: bool = False  # a person or the scheduler ended the attempt, which hasn't failed
    spoils_state: bool = False  # the run's state is bad, and so may be its copies
    can_save: bool = True  # whether ranks that are ended for this cause can save first


# Causes found in logs come first, in order of rank: an earlier one explains a later one. For example, when one rank
# runs out of memory, its peers are victims that report lost connections.
CAUSES: dict[str, End] = {
    "out_of_memory": End(
        "lack of memory",
        "stop",
        "host_memory",
        (
            *GPU_OUT_OF_MEMORY,
            rf"{_BEGIN}MemoryError\b",
            r"DefaultCPUAllocator: (?:not enough memory|can't allocate memory)",
            r"etected \d+ oom[-_ ]kill",
            r"oom[-_]kill event",
            r": Out Of Memory\b",
            r"exceeded memory limit",
            r"Cannot allocate memory",
            r"std::bad_alloc",
            r"failed to map segment from shared object",
            r"CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED",
        ),
    ),
    "disk_full": End("full disk", "resume", "disk_full", (r"No space left on device", r"Disk quota exceeded")),
    # a GPU or its memory is broken
    "gpu_failure": End(
        "GPU failure",
        "requeue",
        "node",
        (
            r"uncorrectable ECC error",
            r"GPU has fallen off the bus",
            r"NVRM: Xid",
            r"CUDA error: (?:unspecified launch failure|unknown error|initialization error|device not ready)",
            r"no CUDA-capable device is detected",
            r"CUDA driver initialization failed",
            r"uncorrectable NVLink error",
            r"system not yet initialized",  # error 802: the node's fabric manager doesn't run
        ),
        node=True,
    ),
    "nan": End(
        "NaN",
        "stop",
        "nan",
        (r"found (?:NaN|Inf) in ", r"Unexpected result (?:nan|inf)", r"NaN detected", r"loss is (?:nan|inf)\b"),
        spoils_state=True,
    ),
    "import_error": End(
        "import error",
        "stop",
        "import_error",
        (rf"{_BEGIN}(?:ModuleNotFoundError|ImportError): ", r"error while loading shared libraries"),
    ),
    # a corpus that can't be read
    "data": End(
        "unreadable data",
        "stop",
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
    "unsafe_checkpoint": End("unsafe checkpoint", "stop", "unsafe_checkpoint", (r": asks for \S+, which isn't data",)),
    "damaged_checkpoint": End(
        "damaged checkpoint",
        "resume",
        "checkpoint",
        (
            r"PytorchStreamReader failed",
            r"CheckpointingException: (?!Global shape mismatch)",  # these are weights of another model
            r"invalid load key",
            r"Ran out of input",
            r"failed finding central directory",
        ),
        before_first_step=True,
        can_save=False,
    ),
    # a node died, or doesn't respond
    "node_failure": End(
        "node failure",
        "requeue",
        "node",
        (
            r"srun: error: Node failure on ",
            r"Communication connection failure",
            r"NODE FAILURE",
            r"Unable to contact slurmd",
        ),
        free=True,
        node=True,
    ),
    # anything else. Kernel faults are here because NCCL's watchdog reports them, although no connection is to blame:
    # the same step fails in the same way again
    "crash": End("crash", "resume", "unknown", (KERNEL_FAULT,), repeatable=True, may_lack_evidence=True),
    # connections, time-outs, file systems
    "transient": End(
        "transient failure",
        "resume",
        "communication",
        (
            r"Watchdog caught collective operation timeout",
            r"NCCL (?:[Ee]rror|failure)",
            r"nccl(?:System|Remote|Internal)Error",
            r"onnection (?:was )?(?:reset|refused|closed)",
            r"Gloo connectFullMesh failed",
            r"ocket [Tt]imeout",
            r"imed out (?:waiting|after|connecting)",
            r"Stale file handle",
            r"Input/output error",
            r"Remote I/O error",
            r"Transport endpoint",
            r"Address already in use|EADDRINUSE",
            r"Resource temporarily unavailable",
            r"Dist(?:Network|Backend|Store)Error",
            *UNREACHABLE,
        ),
        second_hand=True,
        may_lack_evidence=True,
    ),
    # refused before the first step; the second pattern is our own error line (errors.py)
    "config": End(
        "refused configuration",
        "stop",
        "config",
        (EXCEPTION, r"^error: .*\s*\Z"),
        before_first_step=True,
        second_hand=True,
        may_lack_evidence=True,
    ),
    # a rank may not use a file: trying again changes nothing
    "no_permission": End("lack of permission", "stop", "permission"),
    # a job with a higher priority takes the nodes
    "preempted": End("preemption", "requeue", "preemption", free=True, interrupts=True),
    # the job's wall time is used up
    "time_limit": End("time limit", "requeue", "time_limit", free=True, interrupts=True),
    # the administrator, or the scheduler itself, has put the job back into the queue
    "requeued": End("requeue", "requeue", "preemption", free=True, interrupts=True),
    # the job was cancelled, or Ctrl-C pressed in Snakemake
    "cancelled": End("cancellation", "stop", "cancelled", interrupts=True),
    # the user asked for an orderly stop
    "stopped": End("stop", "stop", "cancelled", interrupts=True),
    # a rank was killed by a signal, for an unknown reason
    "killed": End("killed rank", "resume", "unknown", repeatable=True, may_lack_evidence=True),
    # ranks are alive, but complete no step
    "hang": End("hang", "resume", "hang", repeatable=True, can_save=False),
    # between the nodes NCCL chose another network than the requested one
    "wrong_network": End("wrong network", "stop", "network", can_save=False),
    "loss_spike": End("loss spike", "resume", "divergence", can_save=False, spoils_state=True),
    # a rank was slower than the others for several saves; ranks are killed right after a save
    "slow": End("slow node", "requeue", "node", free=True, node=True, can_save=False),
    # the same step failed twice
    "poisoned": End("poisoned step", "stop", "unknown"),
    # the supervisor itself was killed for an unknown reason
    "lost": End("loss of the supervisor", "resume", "lost", free=True),
}
Cause = Literal[tuple(CAUSES)]
FREE, REPEATABLE, NODE_CAUSES = (
    frozenset(cause for cause, end in CAUSES.items() if getattr(end, trait)) for trait in ("free", "repeatable", "node")
)


@dataclass(frozen=True)
class Failure:
    cause: Cause
    evidence: str
    rank: int | None = None
    nodes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.cause.replace('_', ' ')}: {self.evidence}"
