"""Ranks: requests to them, how they end, and the environment variables that identify them.

This is the one place that knows the names of these variables.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import random
import signal
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

# On this signal, a rank writes its threads' stacks to its log and continues.
STACKS_SIGNAL = signal.SIGUSR2
# Time for ranks to log why they end after another one failed. In a collective on a GPU they would wait forever.
LAST_WORDS_SECONDS = 3.0
# Variables: the device, if ranks may be forked by a process that isn't ours; pipe ends that they then keep open for
# life.
FORKED, HELD = "MEGABOA_ZYGOTE", "MEGABOA_HELD"
KEEPER = "MEGABOA_KEEPER"  # pid of the process that keeps this node's ranks, and starts the zygote that forks them
STARTS = "starts ranks "  # logged by a node's task before it starts ranks
_SIOCGIFADDR = 0x8915


@dataclass(frozen=True)
class Ended:
    """How the ranks ended: all with exit code 0, or the first one that didn't."""

    rank: int | None = None
    returncode: int = 0
    node: str | None = None
    said: str = ""  # the launcher's own message, if any

    @property
    def ok(self) -> bool:
        return self.returncode == 0

    @property
    def killed(self) -> bool:
        return self.returncode < 0

    def __str__(self) -> str:
        if self.ok:
            return "every rank ended with 0"
        who = "the launcher" if self.rank is None else f"rank {self.rank}"
        who += f" on {self.node}" if self.node else ""
        if self.killed:
            names = {number.value: number.name for number in signal.Signals}
            return f"{who} was killed by {names.get(-self.returncode, f'signal {-self.returncode}')}"
        return f"{who} ended with exit code {self.returncode}"


class Ranks(Protocol):
    """A group of ranks that are started and ended together."""

    @property
    def sound(self) -> bool:
        """Whether all processes of a waiting group are alive."""

    def poll(self) -> Ended | None:
        """How they ended; None while they run. When one fails, the others, which would wait for it forever, are ended
        too."""

    def ask(self) -> bool:
        """Ask every rank to save and end; False if the request failed and must be repeated."""

    def dump(self) -> None:
        """Have every rank write its stacks."""

    def kill(self) -> None:
        """Kill the ranks and everything that they started, and return when they are gone."""


def rank_environment(rank: int, local_rank: int, world_size: int, address: str, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(world_size),
        **rendezvous_environment(address, port),
    }


GO = "go"  # the file that a standby step waits for


def step_on_nodes(logs: Path) -> str:
    """Name of a step of one process per node, derived from the attempt's subfolder that it writes to."""
    return f"{logs.name}-{logs.parent.name}"


RENDEZVOUS = ("MASTER_ADDR", "MASTER_PORT")
OF_A_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", *RENDEZVOUS)


def rendezvous_environment(address: str, port: int) -> dict[str, str]:
    return {"MASTER_ADDR": address, "MASTER_PORT": str(port)}


def threads_environment(cpus_per_rank: int) -> dict[str, str]:
    """Limit threads, because each rank on a shared machine would otherwise start one per core."""
    return {"OMP_NUM_THREADS": str(cpus_per_rank), "MKL_NUM_THREADS": str(cpus_per_rank)}


def layered(
    own: Mapping[str, str | None],
    preset: Mapping[str, str | None],
    chosen: Mapping[str, str | None],
    given: Mapping[str, str] = os.environ,
) -> dict[str, str]:
    """Layers of variables: ours, presets that the site hasn't set itself, and the user's choice. None removes a
    variable."""
    together = {**own, **{name: value for name, value in preset.items() if name not in given}, **chosen}
    return {name: value for name, value in together.items() if value is not None}


def interface_towards(address: str) -> str | None:
    """The network interface by which this host reaches another one; its own name may resolve to 127.0.1.1."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))  # sends no packet
            ours = probe.getsockname()[0]
            for _, name in socket.if_nameindex():
                with contextlib.suppress(OSError):
                    request = struct.pack("256s", name.encode())
                    if socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24]) == ours:
                        return name
    except OSError:
        pass
    return None


class NoPortError(OSError):
    """Every port in the range is in use."""


class ReservedPort:
    """A free port of this host, reserved while this object is open.

    The socket is bound, but doesn't listen; with SO_REUSEADDR on both sides, rank 0 can still listen on the port.
    `ports`: the range to choose from, such as `29500-29600`.
    """

    def __init__(self, address: str = "", ports: str | None = None):
        self._socket = socket.socket()
        first, last = map(int, ports.split("-")) if ports else (0, 0)
        # In random order, because runs that start together on one host would all try the same port first.
        for number in random.sample(range(first, last + 1), last + 1 - first):
            try:
                self._socket.bind((address, number))
                break
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
        else:
            self._socket.close()
            raise NoPortError(f"launch.ports: all ports from {first} to {last} of {socket.gethostname()} are taken")
        # Only set afterwards: with the option set before, two processes could bind the same port.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.number: int = self._socket.getsockname()[1]

    def close(self) -> None:
        self._socket.close()


class AnyPort:
    """An unreserved port, for a rank 0 on another host."""

    def __init__(self, ports: str | None = None):
        if ports:
            self.number = random.randint(*map(int, ports.split("-")))
            return
        with contextlib.closing(ReservedPort()) as free:
            self.number = free.number

    def close(self) -> None: ...
