"""Calls functions in processes in which the CPU backend is active.

It changes a process for good, so never in pytest's own. The processes are forked from a server that has activated the
backend and imported Megatron once.
"""

import contextlib
import functools
import importlib
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from typing import Any
from unittest.mock import patch

from megaboa.scheduler.ranks import ReservedPort

ACTIVE = "cpu_backend_active"
TIMEOUT_S = 600


@functools.cache
def _server() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([ACTIVE])
    # The server imports its modules before it is told sys.path. It may use a GPU, which the backend leaves alone.
    own = {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "0"}
    with patch.dict(os.environ, own):
        forkserver.ensure_running()
    return context


def _as_rank(report: Connection, function: Callable, args: tuple, rank: int, world_size: int, port: int) -> None:
    os.setsid()  # so that a rank is ended together with the checkpoint writers that it starts
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    try:
        importlib.import_module(ACTIVE)  # at no cost: the fork server has done it
        report.send((function(*args), None))
    except BaseException:
        report.send((None, traceback.format_exc()))


def on_cpu(function: Callable, *args: Any, world_size: int = 1) -> list[Any]:
    """Call `function(*args)` in as many ranks as `world_size` says, each a fresh process; give each rank's result."""
    context = _server()
    port = ReservedPort("127.0.0.1")
    processes, reports, results = [], {}, {}
    try:
        for rank in range(world_size):
            report, to_parent = context.Pipe(duplex=False)
            reports[report] = rank
            given = (to_parent, function, args, rank, world_size, port.number)
            processes.append(context.Process(target=_as_rank, args=given))
            processes[-1].start()
            to_parent.close()
        while len(results) < world_size:
            ready = wait([report for report, rank in reports.items() if rank not in results], TIMEOUT_S)
            assert ready, f"{world_size - len(results)} of {world_size} ranks took longer than {TIMEOUT_S} s"
            for report in ready:
                results[reports[report]], error = report.recv()
                assert error is None, f"rank {reports[report]}: {error}"
    finally:
        for process in processes:
            process.join(10 if len(results) == world_size else 0)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.join()
        port.close()
    return [results[rank] for rank in range(world_size)]


@contextlib.contextmanager
def running(function: Callable, *args: Any) -> Iterator[None]:
    """`function(*args)` in one rank, which is killed at the end, together with what it has started."""
    context = _server()
    port = ReservedPort("127.0.0.1")
    report, to_parent = context.Pipe(duplex=False)
    process = context.Process(target=_as_rank, args=(to_parent, function, args, 0, 1, port.number))
    process.start()
    to_parent.close()
    try:
        yield
        assert not report.poll(), report.recv()[1]
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.join()
        port.close()
