"""Calls functions in processes in which the CPU backend is active. It changes a process for good, so never in pytest's."""

import multiprocessing
import os
import socket
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

ACTIVE = "cpu_backend_active"
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload([ACTIVE])


def _as_rank(function: Callable, args: tuple, rank: int, world_size: int, port: int) -> Any:
    __import__(ACTIVE)  # at no cost where the fork server has done it
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    return function(*args)


def on_cpu(function: Callable, *args: Any, world_size: int = 1) -> list[Any]:
    """Call `function(*args)` in as many ranks as `world_size` says, each a fresh process; give each rank's result."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with ProcessPoolExecutor(world_size, mp_context=_context, max_tasks_per_child=1) as pool:
        ranks = [pool.submit(_as_rank, function, args, rank, world_size, port) for rank in range(world_size)]
        return [rank.result() for rank in ranks]
