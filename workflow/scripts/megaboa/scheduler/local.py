"""This machine as a place for ranks: processes, started as a scheduler would start them.

Every rank has a process group and a log file of its own. When one fails, the others, which would wait for it forever in
a collective, are ended within seconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path

from megaboa.causes import Failure
from megaboa.scheduler.protocol import Container, Environment
from megaboa.scheduler.ranks import (
    FORKED,
    HELD,
    LAST_WORDS_SECONDS,
    OF_A_RANK,
    STACKS_SIGNAL,
    Ended,
    Ranks,
    ReservedPort,
    rank_environment,
    rendezvous_environment,
)

POLL_SECONDS = 0.1
ADDRESS = "127.0.0.1"
DEVICES = ("cpu", "cuda")
_PR_SET_PDEATHSIG = 1


class Machine:
    """This machine, without a job."""

    job = None

    def __init__(self, container: Container, ports: str | None = None) -> None:
        self.nodes: list[str] = [socket.gethostname()]
        self.spares: list[str] = []
        self._container, self._ports = container, ports

    def start(self, command: Sequence[str], world_size: int, logs: Path, environment: Environment) -> Ranks:
        inside = self._container.around(command, {*environment, *OF_A_RANK})
        return start(inside, world_size, logs, environment, self._container.inherited(), self._ports)

    def stand_by(self, command: Sequence[str], world_size: int, logs: Path, environment: Environment) -> None:
        """Nothing to do, as a zygote prepares the next start here."""

    stands_by = False

    def start_on_nodes(self, command: Sequence[str], name: str, logs: Path, environment: Environment) -> Ranks:
        return self.start(command, 1, logs, environment)

    def unpack_image(self, nodes: int, logs: Path) -> Ranks | None:
        return None

    def share_image(self) -> None: ...

    def remove_image(self) -> None: ...

    def close(self) -> None: ...

    def replace(self, bad: Set[str], for_good: bool = True) -> bool:
        return False

    def unused(self) -> list[str]:
        return []

    def lost(self) -> dict[str, str]:
        return {}

    def end_left_over(self, logs: Path) -> None:
        """Nothing to do, as ranks on this machine die with their supervisor."""

    def deadline(self) -> float | None:
        return None

    def now(self) -> float:
        return time.time()

    def interruption(self, since: float) -> Failure | None:
        return None

    def cancelled(self) -> str | None:
        return None

    def requeue(self, excluded: Set[str]) -> bool:
        return False


class LocalRanks:
    """Ranks `first`, `first + 1`, ... as children of this process; rank K writes to `logs/rank-K.log`."""

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
        processors: Sequence[Set[int]] = (),
    ):
        """`processors`: those that each rank is bound to; empty: all of this process's."""
        self.first, self.port = first, port
        self.processes: list[subprocess.Popen] = []
        self.alive: list[int] = []
        try:
            for local in range(count if count is not None else world_size):
                who = rank_environment(
                    first + local, local, world_size, environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
                )
                with _bound_to(processors[local] if processors else None):
                    self._start(command, logs / f"rank-{first + local}.log", {**environment, **who})
        except BaseException:
            self.kill()
            raise

    @property
    def sound(self) -> bool:
        return all(process.poll() is None for process in self.processes)

    def poll(self) -> Ended | None:
        codes = [process.poll() for process in self.processes]
        failed = [(self.first + number, code) for number, code in enumerate(codes) if code not in (None, 0)]
        if failed:
            self.end()
            return Ended(*min(failed, key=lambda rank: rank[1] > 0))  # a killed rank is the cause, not a victim
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

    def end(self, grace: float = LAST_WORDS_SECONDS) -> None:
        """Ask every live rank to end, then kill it together with everything that it started."""
        if grace:
            self.ask()
        deadline = time.monotonic() + grace
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            _signal_group(process, signal.SIGKILL)
            process.wait()
        for pipe in self.alive:
            os.read(pipe, 1)  # nothing is ever written: this returns when all holders of the other end are gone
        self._release()

    def _release(self) -> None:
        while self.alive:
            os.close(self.alive.pop())
        if self.port:
            self.port.close()

    def _start(self, command: Sequence[str], log: Path, environment: dict[str, str]) -> None:
        with log.open("ab") as stream, self._pipe(environment) as held:
            self.processes.append(
                subprocess.Popen(
                    command,
                    env=environment | ({HELD: " ".join(map(str, held))} if held else {}),
                    stdin=subprocess.DEVNULL,
                    stdout=stream,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    pass_fds=held,
                )
            )

    @contextlib.contextmanager
    def _pipe(self, environment: Mapping[str, str]) -> Iterator[list[int]]:
        """Pipe ends that a rank has to hold if another process may do its work: one of ours, and our keeper's."""
        if not asks_for_forks(environment):
            yield []
            return
        alive, held = os.pipe()
        self.alive.append(alive)
        try:
            yield [held, *map(int, os.environ.get(HELD, "").split())]
        finally:
            os.close(held)

    def _signal(self, number: signal.Signals) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(number)


@contextlib.contextmanager
def _bound_to(processors: Set[int] | None) -> Iterator[None]:
    """Bind processes that are started meanwhile, which inherit the binding."""
    if processors is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, processors)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def start(
    command: Sequence[str],
    world_size: int,
    logs: Path,
    environment: Mapping[str, str],
    inherited: Mapping[str, str] = os.environ,
    ports: str | None = None,
) -> LocalRanks:
    """Start all ranks of a run on this machine."""
    # Reserved on all addresses, because other programs listen on all of them, and until the ranks have ended, so that
    # NCCL doesn't take the port.
    port = ReservedPort(ports=ports)
    here = {**inherited, **environment, **rendezvous_environment(ADDRESS, port.number)}
    return LocalRanks(command, world_size, logs, here, port=port)


def wait(ranks: LocalRanks) -> Ended:
    """Wait until all ranks have ended well, or one has failed."""
    while (ended := ranks.poll()) is None:
        time.sleep(POLL_SECONDS)
    return ended


def asks_for_forks(environment: Mapping[str, str]) -> bool:
    """Whether the environment asks for ranks that are forked. In a job that isn't enough: `registry.may_be_forked`."""
    return environment.get(FORKED) in DEVICES and sys.platform.startswith("linux")


def die_with_parent(parent: int | None = None) -> None:
    """Let the kernel kill this process when its parent ends for any reason, so that no rank is ever orphaned."""
    if not sys.platform.startswith("linux"):
        return
    parent = parent or os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before the request took effect
        os.kill(os.getpid(), signal.SIGKILL)


def _signal_group(process: subprocess.Popen, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)
