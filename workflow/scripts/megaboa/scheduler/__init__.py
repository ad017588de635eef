"""Starts ranks and queries jobs.

`protocol.py` defines the interface of a scheduler; `slurm` and `local.py` implement it. No other package knows SLURM's
vocabulary (tests/scheduler/test_words.py). Standard library only: this runs on the compute host, outside the container.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

from megaboa.records import LaunchSpec
from megaboa.scheduler.local import Machine
from megaboa.scheduler.protocol import Container, Environment, Place
from megaboa.scheduler.ranks import interface_towards
from megaboa.scheduler.registry import cluster


def place(launch: LaunchSpec, device: str, environment: Environment, container: Container) -> Place:
    """The place where this process can start ranks, as the run's settings want it; raises `NoPlaceError` otherwise."""
    return cluster().place(launch, device, environment, container) or Machine(
        container, launch.start and launch.start.ports
    )


def rank_of(environment: Environment) -> dict[str, str]:
    """Torch's variables for a process started by a scheduler; empty if they are set already."""
    task = None if "RANK" in environment else cluster().task(environment)
    if task is None:
        return {}
    return {"RANK": str(task.rank), "LOCAL_RANK": str(task.local_rank), "WORLD_SIZE": str(task.count)}


def adopt_rank(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set torch's variables for this rank and its rendezvous. Called by a rank before it imports anything."""
    environment.update(rank_of(environment))
    if "GLOO_SOCKET_IFNAME" not in environment and (interface := interface_towards(environment["MASTER_ADDR"])):
        environment["GLOO_SOCKET_IFNAME"] = interface
