"""The schedulers that there are, and whom this process asks."""

from __future__ import annotations

from megaboa.scheduler.protocol import Scheduler
from megaboa.scheduler.slurm import Slurm

SCHEDULERS: tuple[Scheduler, ...] = (Slurm(),)


def cluster() -> Scheduler:
    """The scheduler of this cluster. On a machine without any it is one that can't be asked: jobs that others have
    left in a shared store are not gone for that."""
    first, *others = SCHEDULERS
    return first if not others else next((one for one in SCHEDULERS if one.is_here()), first)
