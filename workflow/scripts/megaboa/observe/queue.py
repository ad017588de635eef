"""The runs' jobs in the scheduler's queue, from a single query, and the run that each job trains."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megaboa.records import Holder
from megaboa.run import claims
from megaboa.run.progress import Progress
from megaboa.scheduler.answers import QueuedJob, UnreachableError
from megaboa.scheduler.registry import cluster


@dataclass(frozen=True)
class Queue:
    """The scheduler's queue; `known` is False if it couldn't be queried."""

    asked: float
    known: bool = False
    jobs: tuple[QueuedJob, ...] = ()

    def __getitem__(self, job: str | None) -> QueuedJob | None:
        return next((found for found in self.jobs if found.id == job), None)


def read_queue() -> Queue:
    asked = time.time()
    if not cluster().is_here():
        return Queue(asked)
    try:
        return Queue(asked, True, tuple(cluster().queue()))
    except UnreachableError:
        return Queue(asked)


def trained_by(queue: Queue, results: Path) -> dict[str, list[QueuedJob]]:
    """The jobs that train runs of this experiment, by run, if they were submitted from this working folder."""
    # If `results` is a link, its own location determines the working folder.
    here = Path(os.path.abspath(results)).parents[1].resolve()  # noqa: PTH100
    found: dict[str, list[QueuedJob]] = defaultdict(list)
    for job in queue.jobs:
        if Path(job.folder).resolve() == here and (run := cluster().run_of(job, "train", results)):
            found[run].append(job)
    return dict(found)


def with_queue(run: Progress, queue: Queue, jobs: Sequence[QueuedJob] = (), holder: Holder | None = None) -> Progress:
    """A run's progress from its files, corrected by the scheduler.

    `jobs`: the run's training jobs, as submitted; `holder`: that of the newest claim. Read the queue before the files,
    so that the ledger has all later events.
    """
    if run.state == "done":
        return run
    if not queue.known:
        return replace(run, scheduler_silent=True) if run.job and run.goes_on else run
    theirs = holder if holder and holder.job == run.job else None
    # in another cluster's queue the same number is another job
    own = None if theirs and claims.is_of_other_cluster(theirs) else queue[run.job]
    if (run.event_time or 0) > queue.asked:
        return replace(run, job_ends=own.ends) if own and run.state == "running" else run
    living = {job.id: job for job in [own, *jobs] if job and not _only_ends(run, job)}
    if not living:
        return _without_job(run, own, theirs)
    job = min(living.values(), key=lambda job: job.waits)
    known = {"job": job.id, "job_state": job.state, "job_starts": job.starts, "job_ends": job.ends, "detail": None}
    if job.waits:
        return replace(run, state="queued", nodes=(), job_reason=job.reason, job_stuck=job.stuck, **known)
    nodes = run.nodes if job.id == run.job and run.nodes else (job.nodes,)
    return replace(run, state="running", nodes=nodes, **known)


def _only_ends(run: Progress, job: QueuedJob) -> bool:
    """Whether a job is only ending, its supervisor having recorded what comes next."""
    return job.id == run.job and (job.only_ends or (not job.waits and not run.goes_on))


def _without_job(run: Progress, own: QueuedJob | None, holder: Holder | None) -> Progress:
    """The progress of a run without a job: lost, unless its ledger explains it, or another user or cluster has it."""
    if not (run.job and run.goes_on) or own:
        return run
    if holder and (claims.is_of_other_cluster(holder) or claims.is_of_other_user(holder)):
        return replace(run, scheduler_silent=True, holder=claims.describe(holder))
    return replace(run, state="lost", detail=f"{cluster().name} job {run.job} is gone: call again")
