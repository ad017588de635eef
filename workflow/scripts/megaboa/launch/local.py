"""Ranks as processes of this machine, started one by one as SLURM would start them.

Every rank has a process group and a log file of its own. When one fails, the others (which would wait for it for ever
in a collective) are ended within seconds.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megaboa.launch.environment import free_port, rank_environment, threads_environment

GRACE_SECONDS = 3.0
POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Ended:
    """How the ranks ended: every rank with 0, or the first one that didn't."""

    rank: int | None
    returncode: int

    @property
    def ok(self) -> bool:
        return self.returncode == 0

    def __str__(self) -> str:
        if self.ok:
            return "every rank ended with 0"
        if self.returncode < 0:
            names = {number.value: number.name for number in signal.Signals}
            return f"rank {self.rank} was killed by {names.get(-self.returncode, f'signal {-self.returncode}')}"
        return f"rank {self.rank} ended with exit code {self.returncode}"


def start(command: Sequence[str], world_size: int, logs: Path, cpus_per_rank: int = 1) -> list[subprocess.Popen]:
    """Start the ranks; rank K writes to `logs/rank-K.log`."""
    port = free_port()
    ranks: list[subprocess.Popen] = []
    try:
        for rank in range(world_size):
            environment = {
                **os.environ,
                **threads_environment(cpus_per_rank),
                **rank_environment(rank, rank, world_size, "127.0.0.1", port),
                "PYTHONUNBUFFERED": "1",
                "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),  # not what the host's name leads to
            }
            with open(logs / f"rank-{rank}.log", "ab") as log:
                ranks.append(
                    subprocess.Popen(
                        command,
                        env=environment,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
    except BaseException:
        stop(ranks)
        raise
    return ranks


def wait(ranks: list[subprocess.Popen], each_poll: Callable[[], None] = lambda: None) -> Ended:
    """Wait until all ranks have ended well or one has failed; in the second case end the others."""
    while True:
        codes = [rank.poll() for rank in ranks]
        failed = [(number, code) for number, code in enumerate(codes) if code not in (None, 0)]
        if failed:
            stop(ranks)
            return Ended(*min(failed, key=lambda rank: rank[1] > 0))  # one that was killed is the cause, not a victim
        if all(code == 0 for code in codes):
            return Ended(None, 0)
        each_poll()
        time.sleep(POLL_SECONDS)


def stop(ranks: list[subprocess.Popen], grace: float = GRACE_SECONDS) -> None:
    """Ask every rank still alive to end, then make it; with it goes whatever it started."""
    for rank in ranks:
        if rank.poll() is None:
            _signal_group(rank, signal.SIGTERM)
    deadline = time.monotonic() + grace
    for rank in ranks:
        with contextlib.suppress(subprocess.TimeoutExpired):
            rank.wait(max(0.0, deadline - time.monotonic()))
        _signal_group(rank, signal.SIGKILL)
        rank.wait()


def _signal_group(rank: subprocess.Popen, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(rank.pid, number)
