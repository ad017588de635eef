"""Preparation of a process for Megatron, before any of it is imported."""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from megaboa.bridge import flight
from megaboa.errors import InputError
from megaboa.layout import Layout
from megaboa.scheduler import adopt_rank
from megaboa.scheduler.local import ADDRESS, die_with_parent
from megaboa.scheduler.ranks import FORKED

reached: dict[str, float] = {}  # phases that this process has completed, and when (unix seconds)
_forked_for: str | None = None


def forked_for(device: str) -> None:
    """Note that processes forked from this one have Bridge imported, prepared for a device."""
    global _forked_for
    _forked_for = device
    reached["keeper"] = time.time()


def prepare(device: str, threads: int = 1) -> None:
    """Prepare the process, and import Bridge without garbage collection. Checkpoints can execute nothing in it.

    Imported objects are never garbage, and collection took a quarter of every job's start.
    """
    if _forked_for is not None and not (_forked_for == device and (device == "cpu" or _reaches_gpu())):
        _begin_again()
    gc.disable()
    make_fit(device, threads)
    import megatron.bridge  # noqa: F401

    from megaboa.bridge import untrusted

    untrusted.install()
    listen_on_loopback()
    gc.freeze()
    gc.enable()


def make_fit(device: str, threads: int = 1) -> None:
    """Set the number of threads, and activate the CPU backend if that is asked for."""
    warnings.simplefilter("ignore")
    from megaboa.bridge import latent_attention, post_norms, profilers

    profilers.add_field()
    latent_attention.complete()
    post_norms.complete()
    import torch

    torch.set_num_threads(threads)
    if device == "cpu":
        from megaboa.bridge import cpu

        cpu.activate()
    else:  # its wheels need glibc 2.39, and Bridge needs the import; with a stand-in it saves in the foreground
        from megaboa.bridge.cpu import imports

        imports.stand_in("nvidia_resiliency_ext")


def listen_on_loopback() -> None:
    """Let rank 0 of a run on one machine listen for the other ranks on loopback alone: PyTorch listens on all
    interfaces, and whoever reaches the port can alter the run."""
    from torch.distributed import TCPStore

    def opened(host_name: str, port: int, *arguments: Any, is_master: bool = False, **named: Any) -> Any:
        if is_master and host_name == ADDRESS:
            with socket.socket() as listening:
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listening.bind((ADDRESS, port))
                listening.listen(socket.SOMAXCONN)
                named |= {"master_listen_fd": listening.detach(), "use_libuv": True}
        return TCPStore(host_name, port, *arguments, is_master=is_master, **named)

    importlib.import_module("torch.distributed.rendezvous").TCPStore = opened  # the attribute is a function


def started() -> float:
    """Unix time at which this process started or, if it was forked, was forked."""
    ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])  # proc(5): starttime
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")


def _reaches_gpu() -> bool:
    """Whether CUDA can be opened here; not after a fork from a process that has opened it."""
    import torch

    try:
        return torch._C._cuda_getDeviceCount() > 0
    except RuntimeError:
        return False


def _begin_again() -> None:
    """Restart this process without forking, so that it does the imports itself."""
    sys.stderr.write("megaboa: imports for itself: what was forked is not fit for this\n")
    sys.stderr.flush()
    os.environ[FORKED] = "0"
    flags = subprocess._args_from_interpreter_flags()
    os.execv(sys.executable, [sys.executable, *flags, *sys.argv])


def require_converter(device: str) -> None:
    """Check that a model for GPUs can be converted here: it is built from Transformer Engine's modules."""
    if device == "cpu":
        return
    import torch

    if importlib.util.find_spec("transformer_engine") is None or not torch.cuda.is_available():
        raise InputError(
            f"device: cuda: a conversion needs a GPU and Transformer Engine, and {sys.executable} has not both. Call "
            "this stage on a machine with a GPU, with a Python that has them; to train without Hugging Face stages, "
            "set init: scratch and export.runs: []"
        )


def join_ranks(layout: Layout) -> int:
    """Join the ranks of a conversion, if it has several, and return this rank's number. Must precede the import of
    torch."""
    if layout.world_size == 1:
        return 0
    die_with_parent()
    adopt_rank()
    return int(os.environ["RANK"])


def leave_in_time(pretrain: ModuleType, seconds: float = 60.0) -> None:
    """End the process after a failure even if Bridge's shutdown of NCCL hangs (seen on two H200s)."""
    clean_up = pretrain._cleanup_after_pretrain_failure

    def in_time(*arguments: Any) -> None:
        timer = threading.Timer(seconds, os._exit, (1,))
        timer.daemon = True
        timer.start()
        flight.answer()  # while the process groups still exist
        clean_up(*arguments)

    pretrain._cleanup_after_pretrain_failure = in_time


def save_in_foreground() -> None:
    """Keep the results of a save in this process, because no other process writes.

    Megatron uses a queue between processes, for which it starts a Python that imports torch: five CPU seconds in every
    rank's first save.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    filesystem_async._results_queue = _OwnQueue()


class _OwnQueue(queue.SimpleQueue):
    """A queue with the interface to end its process, which Bridge calls after a failure: an error there would hide the
    cause."""

    _manager = SimpleNamespace(shutdown=lambda: None)


def ignore_stop_signal() -> None:
    """Ignore SIGTERM in processes that write a checkpoint: if the whole job gets it, they must finish first."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def playing_rank_0_of(world_size: int) -> contextlib.AbstractContextManager[None]:
    return playing(0, world_size)


@contextlib.contextmanager
def playing(rank: int, world_size: int) -> Iterator[None]:
    """Act as another rank, because Bridge reads rank and world size from the environment.

    The whole environment is restored, because Megatron sets variables depending on a model's attention, and refuses the
    next model if they don't match.
    """
    before = dict(os.environ)
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(world_size)})
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
