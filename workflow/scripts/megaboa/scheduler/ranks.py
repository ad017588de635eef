"""A rank: its supervisor's requests, its end, and the environment variables that identify it.

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

# A rank that gets this signal writes its threads' stacks to its log and continues.
STACKS_SIGNAL = signal.SIGUSR2
# So long may ranks still say why they end when another has failed. In a collective, on a GPU, they wait for ever.
LAST_WORDS_SECONDS = 3.0
STARTS = "starts ranks "  # what a node's task writes to its log before it does
_SIOCGIFADDR = 0x8915


@dataclass(frozen=True)
class Ended:
    """How the ranks ended: every rank with 0, or the first one that didn't."""

    rank: int | None = None
    returncode: int = 0
    node: str | None = None
    said: str = ""  # the launcher's own words, where it has any

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
    """Ranks that were started together and end together."""

    @property
    def sound(self) -> bool:
        """Of what waits to be told what to do: whether all of its processes are there."""

    def poll(self) -> Ended | None:
        """None while they run. When one fails the others, which would wait for it for ever, are ended too."""

    def ask(self) -> bool:
        """Ask every rank to save and end; False if the request failed and must be repeated."""

    def dump(self) -> None:
        """Have every rank write its stacks."""

    def kill(self) -> None:
        """End them, with whatever they started, and return when they are gone."""


def rank_environment(rank: int, local_rank: int, world_size: int, address: str, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(world_size),
        **rendezvous_environment(address, port),
    }


GO = "go"  # the file that what stands by waits for


def step_on_nodes(logs: Path) -> str:
    """Name of a step of one process per node that writes to a folder of an attempt."""
    return f"{logs.name}-{logs.parent.name}"


RENDEZVOUS = ("MASTER_ADDR", "MASTER_PORT")
OF_A_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", *RENDEZVOUS)


def rendezvous_environment(address: str, port: int) -> dict[str, str]:
    return {"MASTER_ADDR": address, "MASTER_PORT": str(port)}


def threads_environment(cpus_per_rank: int) -> dict[str, str]:
    """Ranks that share a machine must not each start a thread per core."""
    return {"OMP_NUM_THREADS": str(cpus_per_rank), "MKL_NUM_THREADS": str(cpus_per_rank)}


def layered(
    own: Mapping[str, str | None],
    preset: Mapping[str, str | None],
    chosen: Mapping[str, str | None],
    given: Mapping[str, str] = os.environ,
) -> dict[str, str]:
    """Ours, a preset where the site has set nothing itself, what the user chose; None takes a variable out."""
    together = {**own, **{name: value for name, value in preset.items() if name not in given}, **chosen}
    return {name: value for name, value in together.items() if value is not None}


def interface_towards(address: str) -> str | None:
    """The network interface by which this host reaches another one: not what its own name leads to (127.0.1.1)."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))  # sends nothing
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
    """Every port of the range is in use."""


class ReservedPort:
    """A free port of this host, reserved while this object is open.

    The socket is bound, but doesn't listen; with SO_REUSEADDR on both sides rank 0 can still listen on the port.
    `ports`: the range that it is taken from, as in `29500-29600`.
    """

    def __init__(self, address: str = "", ports: str | None = None):
        self._socket = socket.socket()
        first, last = map(int, ports.split("-")) if ports else (0, 0)
        # Not from the first one on: runs that start together on one host would all try the same.
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
        # Afterwards: two that had it when they asked for the same port would both get it.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.number: int = self._socket.getsockname()[1]

    def close(self) -> None:
        self._socket.close()


class AnyPort:
    """An unreserved port, for rank 0 on another host."""

    def __init__(self, ports: str | None = None):
        if ports:
            self.number = random.randint(*map(int, ports.split("-")))
            return
        with contextlib.closing(ReservedPort()) as free:
            self.number = free.number

    def close(self) -> None: ...
