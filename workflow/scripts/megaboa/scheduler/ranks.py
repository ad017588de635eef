"""What a rank is: what its supervisor can ask of it and how it ended, and the environment that tells it who it is.

This is the one place that knows the names of these variables.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

# A rank that gets this one writes the stacks of its threads to its log and goes on.
STACKS_SIGNAL = signal.SIGUSR2
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

    def poll(self) -> Ended | None:
        """None while they run. When one fails the others, which would wait for it for ever, are ended too."""

    def ask(self) -> bool:
        """Ask every rank to save and end; False if nobody could tell them, and they must be asked again."""

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


class ReservedPort:
    """A free port of this host that nobody else is given while this object is open.

    The socket is bound, but doesn't listen; with SO_REUSEADDR on both sides rank 0 can still listen on the port.
    """

    def __init__(self, address: str = ""):
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind((address, 0))
        self.number: int = self._socket.getsockname()[1]

    def close(self) -> None:
        self._socket.close()
