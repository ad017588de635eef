"""Classifies a failure in more detail than its cause, and gives advice.

The supervisor's cause is refined by patterns in the logs. The advice contains this run's values if preflight knows
them.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from megaboa import formats
from megaboa.causes import CAUSES, GPU_OUT_OF_MEMORY, KERNEL_FAULT, UNREACHABLE
from megaboa.check import costs, fit, memory, table
from megaboa.check.facts import Facts
from megaboa.check.memory import GIB
from megaboa.scheduler.registry import cluster

HUB = (
    r"GatedRepo|gated repo|RepositoryNotFound|401 Client Error|403 Client Error|HF_TOKEN|OfflineMode"
    r"|couldn't connect to 'https://huggingface\.co'|LocalEntryNotFoundError|Invalid user token"
    r"|the hub can't be reached|the hub refuses it|is gated: ask for access|is not on the hub, or is private"
)
NETWORK = "|".join(
    (
        *UNREACHABLE,
        r"libfabric|\bEFA\b|NET/(?:IB|OFI|Socket)|NCCL_SOCKET_IFNAME",
        r"Bootstrap : no socket interface|Connection refused",
    )
)
GPU_MEMORY = "|".join(GPU_OUT_OF_MEMORY)
NO_KERNELS = r"no kernel image is available for execution|device kernel image is invalid"
QUOTA = r"[Qq]uota exceeded"
KEPT = 2  # checkpoints, where there is little room
AVOID = "resources.slurm_extra: --exclude=NODE"
MOST, LENGTH = 3, 300  # number of lines of evidence, characters per line
OURS = "error: "
HEALTHY = "NCCL INFO"  # NCCL_DEBUG=INFO names networks and interfaces even if all is well

# Causes that lines of the logs refine: causes, pattern, name of the trouble.
FINER: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (("out_of_memory",), GPU_MEMORY, "gpu_memory"),
    (("disk_full",), QUOTA, "quota"),
    (("config", "crash", "transient", "import_error"), HUB, "hub"),
    (("config", "crash", "poisoned"), NO_KERNELS, "no_kernels"),
    (("crash", "poisoned"), KERNEL_FAULT, "kernel_fault"),
    (("transient", "hang", "crash", "killed", "poisoned"), NETWORK, "network"),
)
TOTAL = re.compile(r"total capacity of ([\d.]+) GiB")


@dataclass(frozen=True)
class Trouble:
    name: str
    evidence: tuple[str, ...]


def trouble(cause: str, detail: str, logs: Mapping[int | None, str]) -> Trouble:
    """The trouble's name and the lines that show it, the supervisor's first."""
    first = (cut(detail.strip()),) if detail else ()
    for causes, pattern, name in FINER:
        found = _lines(pattern, detail, logs) if cause in causes else ()
        if found:
            return Trouble(name, tuple(dict.fromkeys((*first, *found)))[:MOST])
    return Trouble(CAUSES[cause].trouble if cause in CAUSES else "unknown", first)


def cut(line: str) -> str:
    """A line of evidence. Sentences of ours end with the remedy, so they are kept whole."""
    return line if line.startswith(OURS) else line[:LENGTH]


def _lines(pattern: str, detail: str, logs: Mapping[int | None, str]) -> tuple[str, ...]:
    wanted = re.compile(rf"^.*(?:{pattern}).*$", re.MULTILINE)
    found: dict[str, None] = {}
    for text in itertools.chain([detail], logs.values()):
        lines = (cut(line.strip()) for line in wanted.findall(text))
        found |= dict.fromkeys(line for line in lines if HEALTHY not in line)
        if len(found) > MOST:  # no need to read the remaining logs of thousands of ranks
            break
    return tuple(found)


@dataclass(frozen=True)
class Case:
    """A failed run: preflight's facts, the lines of evidence, and the iteration that it can resume from."""

    facts: Facts | None = None
    evidence: tuple[str, ...] = ()
    iteration: int = 0
    checkpoint_bytes: int | None = None  # of the largest one on disk
    save_interval: int | None = None
    lr: float | None = None
    python: str | None = None  # of its ranks
    in_image: bool = False
    in_job: bool = True  # of a scheduler
    own_data: bool = False  # no corpora: the recipe has its own data
    preflighted: bool = False  # preflight has passed
    preflighted_in_image: bool = False
    refused: str | None = None  # why the same call doesn't resume it


def _begins(case: Case) -> str:
    if case.refused:
        return f"is refused: {case.refused}"
    if case.iteration:
        return f"resumes from iteration {case.iteration}"
    return "starts again from step 0 (no checkpoint was complete)"


def advice(trouble: str, case: Case) -> list[str]:
    return ADVICE[trouble](case)


def gpu_memory(case: Case) -> list[str]:
    f, said = case.facts, TOTAL.search(" ".join(case.evidence))
    if f is None or not memory.is_known(f):
        return ["halve training.micro_batch_size, or set resources.gpu: preflight then refuses what doesn't fit"]
    limit = float(said[1]) * GIB if said else fit.capacity(f.cluster.gpu) if f.cluster.gpu else None
    need = memory.peak(f)
    lines = [
        f"by prediction stage {need.stage} takes {need.total / GIB:.1f} GiB"
        + (f" of {limit / GIB:.1f}" if limit else "")
    ]
    for change in fit.changes(f):
        after = memory.peak(change.facts).total if table.is_legal(change.facts) else None
        if after is not None and (after <= limit if limit else after < 0.8 * need.total):
            return [*lines, f"{change} fits by prediction: {after / GIB:.1f} GiB ({change.price})"]
    return [
        *lines,
        f"{fit.NOTHING_FITS} by prediction: take more GPUs",
    ]


def host_memory(case: Case) -> list[str]:
    return [
        f"raise resources.mem_mb_per_rank: the kernel or {cluster().name} killed a rank for the host's memory, "
        "not the GPU's",
        "data.num_workers: 0 saves the loaders' processes, checkpoint.async_save: false a second copy of weights",
    ]


def nan(case: Case) -> list[str]:
    lower = "" if case.lr is None else f" (optimizer.lr: {case.lr / 2:g} instead of {case.lr:g})"
    return [
        f"halve the learning rate{lower}, or lengthen schedule.warmup_iters",
        "see whether the same step fails again from the same checkpoint: then look at that step's batch "
        "(recovery.loss_spike leaves batches out)"
        if case.iteration
        else "there is no checkpoint, so the next call starts again from step 0: "
        f"{'' if case.save_interval else 'set checkpoint.save_interval, and '}look at the failed step's batch if it "
        "fails there again",
        "under fp16 take bf16_mixed; under FP8 compare with bf16_mixed for a hundred steps",
    ]


def divergence(case: Case) -> list[str]:
    return [*nan(case)[:1], "recovery.loss_spike.limit says how many spikes a run may skip"]


def hang(case: Case) -> list[str]:
    return [
        "the stacks of all ranks are at the end of their logs: look for the rank that doesn't wait in a collective",
        "recovery.no_progress_minutes must be longer than the longest step, save or evaluation",
        "launch.health_check: true looks at every node before ranks start",
    ]


def communication(case: Case) -> list[str]:
    return ["it was retried automatically; if it recurs: launch.health_check: true, and launch.network for your site"]


def network(case: Case) -> list[str]:
    return [
        "set launch.network to your site's kind (infiniband, ethernet, efa, nvlink), and the site's own names under "
        "launch.environment: NCCL_SOCKET_IFNAME, NCCL_IB_HCA",
        "check one node: python workflow/scripts/check_node.py --out /tmp/health --gpus 8",
    ]


def checkpoint(case: Case) -> list[str]:
    back = f"iteration {case.iteration}" if case.iteration else "the beginning"
    return [
        f"the damaged checkpoint was set aside; the run continues from {back} with the next call",
        "checkpoint.verify: true (the default) compares checksums before resuming; check the disk for errors",
    ]


def unsafe_checkpoint(case: Case) -> list[str]:
    return [
        "no checkpoint needs to run commands: find out who wrote it, and what else that user has changed in the store",
        "copy the checkpoint again from where it was trained, or remove it, and call again",
    ]


def data(case: Case) -> list[str]:
    if case.own_data:
        mount = ", and image.mounts must name their folder" if case.in_image else ""
        return [f"correct the paths in the recipe's config.dataset: every rank must find them under these names{mount}"]
    return [
        "remove the corpus's folder in the store and results/<experiment>/data/<corpus>.json, and call `snakemake "
        "data`: it is made again and verified"
    ]


def config(case: Case) -> list[str]:
    checks = [] if case.preflighted else ["`snakemake preflight` checks the same without a GPU"]
    if case.in_image and not case.preflighted_in_image:
        checks.append("`snakemake preflight_in_image` checks the same by the image's packages")
    passed = "preflight has passed, so it is nothing that preflight checks: read the traceback in the rank's log"
    return checks or [passed]


def import_error(case: Case) -> list[str]:
    if case.in_image:
        return [
            "launch.python must be the Python of the image that has Megatron-Bridge",
            "inside the image: python -c 'import megatron.bridge, transformer_engine'",
        ]
    python = case.python or "python"
    return [
        f"ranks run in {python}: install there what is missing, or set launch.python to a Python that has it",
        f"to see it alone: {python} -c 'import megatron.bridge'",
    ]


def no_kernels(case: Case) -> list[str]:
    where = "the image (image.path, or the base of image.build)" if case.in_image else case.python or "python"
    return [
        f"a package in {where} was built for other GPUs: PyTorch's are those of "
        "python -c 'import torch; print(torch.cuda.get_arch_list())'; Transformer Engine and others have their own"
    ]


def node(case: Case) -> list[str]:
    return ["the node is avoided for recovery.exclude_hours; tell the administrators its name"]


def preemption(case: Case) -> list[str]:
    every = "only the last step is saved: set checkpoint.save_interval" if not case.save_interval else ""
    return [f"nothing: the job is queued again and {_begins(case)} automatically", *([every] if every else [])]


def time_limit(case: Case) -> list[str]:
    return [f"nothing: the job goes back into the queue and {_begins(case)}"]


def disk_full(case: Case) -> list[str]:
    f = case.facts
    found = costs.of_run(f) if f is not None else None
    size = formats.size(case.checkpoint_bytes or found.checkpoint_bytes) if found else ""
    room = f": one takes {size}, {found.checkpoints} lie there at one time" if found else ""
    free = f"checkpoint.keep_last: {KEPT} keeps only the newest checkpoints{room}"
    if found and found.checkpoints <= KEPT:
        free = f"free some space: the run keeps {formats.counted(found.checkpoints, 'checkpoint')} of {size}"
    return [free, "`store:` may name a larger file system"]


def quota(case: Case) -> list[str]:
    return [
        "the file system has room, your account hasn't: ask for more, or set `store:` elsewhere",
        *disk_full(case)[:1],
    ]


def permission(case: Case) -> list[str]:
    return [f"let the owner give the right; the same command then {_begins(case)}"]


def hub(case: Case) -> list[str]:
    return [
        "accept the model's licence on its page, then set HF_TOKEN where Snakemake is called",
        "compute nodes often have no internet access: run `snakemake import data` on the login node",
    ]


def kernel_fault(case: Case) -> list[str]:
    graphs = case.facts.kernels.graphs if case.facts else "none"
    off = [f"train a few steps without CUDA graphs: model.cuda_graph_impl: none instead of {graphs}"]
    return [
        *(off if graphs != "none" else []),
        "CUDA reports it late: with launch.environment: {CUDA_LAUNCH_BLOCKING: '1'} the traceback shows who launched "
        "the kernel; a token beyond the vocabulary ends in a device-side assert",
        "launch.environment: {CUDA_ENABLE_COREDUMP_ON_EXCEPTION: '1', CUDA_ENABLE_LIGHTWEIGHT_COREDUMP: '1'}: the core "
        "dump of the GPU, in the working folder, names it, in a graph too: cuda-gdb -batch -ex 'target cudacore FILE'",
        f"on one node only, its GPU may be broken: nvidia-smi -q -d ECC, and {AVOID}",
    ]


def cancelled(case: Case) -> list[str]:
    return [f"nothing: somebody stopped it; with the same command it {_begins(case)}"]


def lost(case: Case) -> list[str]:
    asked = f"ask {cluster().name} what became of the job or the node: {cluster().inquiry}"
    return [
        f"with the same command it {_begins(case)}",
        asked if case.in_job else "if nobody ended it, the kernel may have, for lack of memory: dmesg | grep -i kill",
    ]


def unknown(case: Case) -> list[str]:
    return [
        "read the last lines of the rank named above; `megaboa pretrain` starts this run alone",
        "recovery.actions can say what to do with this cause",
    ]


ADVICE: dict[str, Callable[[Case], list[str]]] = {
    one.__name__: one
    for one in (
        *(gpu_memory, host_memory, nan, divergence, hang, communication, network, checkpoint, data, config),
        unsafe_checkpoint,
        *(import_error, no_kernels, node, preemption, time_limit, disk_full, quota, permission, hub, kernel_fault),
        *(cancelled, lost, unknown),
    )
}
