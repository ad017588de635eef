"""The environment that tells a process which rank it is: the one place that knows these names."""

from __future__ import annotations

import socket


def rank_environment(rank: int, local_rank: int, world_size: int, address: str, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
    }


def threads_environment(cpus_per_rank: int) -> dict[str, str]:
    """Ranks that share a machine must not each start a thread per core."""
    return {"OMP_NUM_THREADS": str(cpus_per_rank), "MKL_NUM_THREADS": str(cpus_per_rank)}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
