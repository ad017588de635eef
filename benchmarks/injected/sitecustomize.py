"""In a rank that has this folder in PYTHONPATH: does what a file in $INJECTED_FAULTS with its rank's number names.

The names are those of nvidia-resiliency-ext's `inject_fault`; each is done once, and the file is removed before.
"""

import ctypes
import os
import signal
import sys
import threading
import time
from pathlib import Path

FOLDER = os.environ.get("INJECTED_FAULTS")


class InjectedError(Exception):
    pass


def raise_on_signal(*_: object) -> None:
    raise InjectedError("by a handler of a signal")


def raise_in_a_collective(*_: object, **__: object) -> None:
    raise InjectedError("in the workload")


def workload_exception() -> None:
    import torch

    torch.distributed.all_reduce = raise_in_a_collective


def raise_in_main_thread() -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(threading.main_thread().ident), ctypes.py_object(InjectedError)
    )


def gpu_error() -> None:
    import torch

    torch.zeros(1, device="cuda")[torch.ones(1, dtype=torch.int64, device="cuda")] = 0


def gpu_sleep() -> None:
    import torch

    torch.cuda._sleep(1 << 62)


FAULTS = {
    "GPU_ERROR": gpu_error,
    "GPU_SLEEP": gpu_sleep,
    "WORKLOAD_EXC": workload_exception,
    "ASYNC_EXC": raise_in_main_thread,
    "SIGNAL_EXC": lambda: os.kill(os.getpid(), signal.SIGRTMIN),
    "OS_ABORT": os.abort,
    "LOCK_GIL": lambda: ctypes.PyDLL(None).pause(),  # a PyDLL doesn't release the GIL
    "SEGFAULT": lambda: ctypes.string_at(0),
    "SIGINT": lambda: os.kill(os.getpid(), signal.SIGINT),
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGTERM": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "SIGSTOP": lambda: os.kill(os.getpid(), signal.SIGSTOP),
}


def wait_for_a_fault(named: Path) -> None:
    while not named.exists():
        time.sleep(0.05)
    fault = named.read_text()
    named.unlink()
    FAULTS[fault]()


if FOLDER and any("train_rank" in word for word in sys.orig_argv):
    signal.signal(signal.SIGRTMIN, raise_on_signal)
    threading.Thread(target=wait_for_a_fault, args=[Path(FOLDER, os.environ["RANK"])], daemon=True).start()
