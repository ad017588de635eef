"""The known schedulers, and the one that this process uses."""

from __future__ import annotations

from megaboa.scheduler.protocol import Scheduler
from megaboa.scheduler.slurm import Slurm

SCHEDULERS: tuple[Scheduler, ...] = (Slurm(),)


def cluster() -> Scheduler:
    """The scheduler of this cluster. On a machine without any, it is one that can't be asked: jobs of others in a
    shared store may still be alive."""
    first, *others = SCHEDULERS
    return first if not others else next((one for one in SCHEDULERS if one.is_here()), first)
