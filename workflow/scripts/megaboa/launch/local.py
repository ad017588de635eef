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
from collections.abc import Mapping, Sequence
from pathlib import Path

from megaboa.launch.environment import ReservedPort, rank_environment, rendezvous_environment
from megaboa.launch.ranks import STACKS_SIGNAL, Ended

GRACE_SECONDS = 3.0
POLL_SECONDS = 0.1
ADDRESS = "127.0.0.1"
# A pipe's end that a rank holds open for as long as it lives, be it this process's child or forked by another.
HELD = "MEGABOA_HELD"


class LocalRanks:
    """Rank `first`, `first + 1`, ... as children of this process; rank K writes to `logs/rank-K.log`."""

    def __init__(
        self,
        command: Sequence[str],
        world_size: int,
        logs: Path,
        environment: Mapping[str, str],
        *,
        first: int = 0,
        count: int | None = None,
        port: ReservedPort | None = None,
    ):
        self.first, self.port = first, port
        self.processes: list[subprocess.Popen] = []
        self.alive: list[int] = []
        try:
            for local in range(count if count is not None else world_size):
                who = rank_environment(
                    first + local, local, world_size, environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
                )
                self._start(command, logs / f"rank-{first + local}.log", {**environment, **who})
        except BaseException:
            self.kill()
            raise

    def poll(self) -> Ended | None:
        codes = [process.poll() for process in self.processes]
        failed = [(self.first + number, code) for number, code in enumerate(codes) if code not in (None, 0)]
        if failed:
            self.end()
            return Ended(*min(failed, key=lambda rank: rank[1] > 0))  # one that was killed is the cause, not a victim
        if any(code is None for code in codes):
            return None
        self._release()
        return Ended()

    def ask(self) -> bool:
        self._signal(signal.SIGTERM)
        return True

    def dump(self) -> None:
        self._signal(STACKS_SIGNAL)

    def kill(self) -> None:
        self.end(grace=0)

    def end(self, grace: float = GRACE_SECONDS) -> None:
        """Ask every rank still alive to end, then make it; with it goes whatever it started."""
        if grace:
            self.ask()
        deadline = time.monotonic() + grace
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            _signal_group(process, signal.SIGKILL)
            process.wait()
        for pipe in self.alive:
            os.read(pipe, 1)  # nothing is ever written: it returns when the last one that held the other end is gone
        self._release()

    def _release(self) -> None:
        while self.alive:
            os.close(self.alive.pop())
        if self.port:
            self.port.close()

    def _start(self, command: Sequence[str], log: Path, environment: dict[str, str]) -> None:
        alive, held = os.pipe()
        self.alive.append(alive)
        try:
            with log.open("ab") as stream:
                self.processes.append(
                    subprocess.Popen(
                        command,
                        env={**environment, HELD: str(held)},
                        stdin=subprocess.DEVNULL,
                        stdout=stream,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                        pass_fds=[held],
                    )
                )
        finally:
            os.close(held)

    def _signal(self, number: signal.Signals) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(number)


def start(
    command: Sequence[str],
    world_size: int,
    logs: Path,
    environment: Mapping[str, str],
    inherited: Mapping[str, str] = os.environ,
) -> LocalRanks:
    """All ranks of a run on this machine."""
    # Held until the ranks have ended, and on all addresses, as rank 0 will listen on all: NCCL takes ports of others.
    port = ReservedPort()
    here = {**inherited, **environment, **rendezvous_environment(ADDRESS, port.number)}
    return LocalRanks(command, world_size, logs, here, port=port)


def wait(ranks: LocalRanks) -> Ended:
    """Wait until all ranks have ended well or one has failed."""
    while (ended := ranks.poll()) is None:
        time.sleep(POLL_SECONDS)
    return ended


def is_running(pid: int) -> bool:
    """Whether a process of this machine lives, whoever's it is."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _signal_group(process: subprocess.Popen, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)
