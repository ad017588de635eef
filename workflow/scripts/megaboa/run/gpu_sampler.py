"""GPU samples during an attempt: readings of a node's GPUs every few seconds, in a file of the attempt.

The first rank of every node starts a separate process for it, so that a driver that hangs or a library that crashes
can't affect the training; the kernel ends that process together with the rank. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from megaboa import files
from megaboa.paths import RunFolder
from megaboa.records import Event, GpuFound, GpuSample, GpusFound, NotSampled, every_so_many, line
from megaboa.records.gpus import COUNTS
from megaboa.run import gpus
from megaboa.run.nvml import Gpu, Nvml, NvmlError
from megaboa.scheduler.ranks import STACKS_SIGNAL
from megaboa.store_paths import AttemptFolder

SCRIPT = Path(__file__).parents[2] / "sample_gpus.py"
MOST_BYTES = 4 << 20  # of a file; a larger one loses every second sample, and the interval is doubled
MEASURED = ("utilisation", "watts", "celsius", "memory_celsius", "sm_mhz", "memory_mhz", "used_mib", "reasons")


def start(folder: RunFolder, attempt: AttemptFolder, environment: Mapping[str, str] = os.environ) -> None:
    """Start the sampler, if this is the first rank of a node that trains on GPUs.

    Called by every rank; never raises.
    """
    how = folder.launch.start
    if folder.run.device != "cuda" or not how.gpu_sampling_seconds or environment.get("LOCAL_RANK") != "0":
        return
    command = [
        sys.executable,
        str(SCRIPT),
        f"--out={attempt.gpus(socket.gethostname())}",
        f"--seconds={how.gpu_sampling_seconds}",
        f"--ranks={folder.launch.gpus_per_node}",
        f"--parent={os.getpid()}",
    ]
    quiet = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    with contextlib.suppress(OSError):
        subprocess.Popen(command, **quiet)


def ignore_signals() -> None:
    """Ignore signals that a scheduler sends to all processes of a job: they are meant for the ranks, which may save
    now."""
    for number in (signal.SIGTERM, signal.SIGINT, STACKS_SIGNAL):
        signal.signal(number, signal.SIG_IGN)


def sample(out: Path, seconds: float, ranks: int, shown: str | None) -> None:
    """Sample GPUs until this process ends. `ranks`: number of ranks on this node; `shown`: CUDA_VISIBLE_DEVICES."""
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        _sample(out, seconds, ranks, shown)
    except NvmlError as error:
        _append(out, NotSampled(host=socket.gethostname(), detail=str(error)))
    except Exception as error:
        _append(out, NotSampled(host=socket.gethostname(), detail=f"{type(error).__name__}: {error}"))
        raise


def _sample(out: Path, seconds: float, ranks: int, shown: str | None) -> None:
    nvml = Nvml()
    if not (chosen := ours(nvml.gpus(), ranks, shown)):
        raise NvmlError("the driver shows no GPU")
    found = tuple(map(_found, chosen))
    _append(out, GpusFound(host=socket.gethostname(), seconds=seconds, driver=nvml.driver, gpus=found))
    counts, due = None, time.monotonic()
    while True:
        taken = take(chosen)
        # Counts that don't change aren't repeated.
        _append(out, taken if taken.counts != counts else _without_counts(taken))
        counts = taken.counts
        with contextlib.suppress(OSError):
            if out.stat().st_size > MOST_BYTES:
                thin(out)
                seconds *= 2
        due = max(due + seconds, time.monotonic())
        time.sleep(max(0.0, due - time.monotonic()))


def ours(there: Sequence[Gpu], ranks: int, shown: str | None) -> list[Gpu]:
    """The GPUs that the node's ranks use: the first ones that CUDA_VISIBLE_DEVICES shows.

    All GPUs, if it shows fewer than there are ranks: then each rank has a variable of its own, or a part of a GPU.
    `ranks`: 0 if unknown.
    """
    names = [{"index": str(gpu.index), "uuid": gpu.uuid} for gpu in there]
    listed = [name for name in (shown or "").split(",") if name.strip()]
    mine = [gpu["index"] for name in listed for gpu in gpus.visible(names, name)] if listed else None
    if mine is None:
        return list(there[:ranks] if ranks else there)
    if len(mine) < max(ranks, 1):
        return list(there)
    wanted = mine[:ranks] if ranks else mine
    return [gpu for gpu in there if str(gpu.index) in wanted]


def take(chosen: Sequence[Gpu]) -> GpuSample:
    for gpu in chosen:
        gpu.error = None
    values = {name: tuple(getattr(gpu, name) for gpu in chosen) for name in (*MEASURED, *COUNTS)}
    return GpuSample(**values, errors={str(place): gpu.error for place, gpu in enumerate(chosen) if gpu.error})


def thin(path: Path) -> None:
    lines = list(filter(None, path.read_text(encoding="utf-8").split("\n")))
    kept = every_so_many(lines, 2)
    if 4 * len(kept) > 3 * len(lines):  # counts rise with every sample: they are sums, so fewer will do
        kept = [*lines[:-1:2], lines[-1]]
    files.write_text(path, "\n".join(kept) + "\n")


def _without_counts(taken: GpuSample) -> GpuSample:
    return GpuSample(**{name: getattr(taken, name) for name in (*MEASURED, "time", "errors")})


def _found(gpu: Gpu) -> GpuFound:
    names = ("index", "uuid", "name", "pci", "limit_watts", "default_limit_watts", "most_sm_mhz")
    return GpuFound(**{name: getattr(gpu, name) for name in names})


def _append(out: Path, event: Event) -> None:
    """Append a line. Errors are ignored: on a full disk, the next sample may have room again."""
    with contextlib.suppress(OSError):
        files.append_line(out, line(event), durable=False)
