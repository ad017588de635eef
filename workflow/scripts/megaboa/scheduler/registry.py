"""The known schedulers, and the one that this process uses."""

from __future__ import annotations

from collections.abc import Mapping

from megaboa.scheduler.local import asks_for_forks
from megaboa.scheduler.protocol import Scheduler
from megaboa.scheduler.ranks import KEEPER
from megaboa.scheduler.slurm import Slurm

SCHEDULERS: tuple[Scheduler, ...] = (Slurm(),)


def cluster() -> Scheduler:
    """The scheduler of this cluster. On a machine without any, it is one that can't be asked: jobs of others in a
    shared store may still be alive."""
    first, *others = SCHEDULERS
    return first if not others else next((one for one in SCHEDULERS if one.is_here()), first)


def may_be_forked(environment: Mapping[str, str]) -> bool:
    """Whether a rank's work may be done by a process that its starter hasn't forked itself: in a job, only if the
    node's keeper starts that process."""
    return asks_for_forks(environment) and (KEEPER in environment or not cluster().in_job(environment))
