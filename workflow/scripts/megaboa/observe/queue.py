"""What the scheduler says of the runs: its queue, by one question for all of them, and which run a job trains."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megaboa.run import claims
from megaboa.run.progress import Progress
from megaboa.scheduler.answers import QueuedJob, UnreachableError
from megaboa.scheduler.registry import cluster


@dataclass(frozen=True)
class Queue:
    """The scheduler's answer; `known` is False where it gave none."""

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
    """The jobs that train a run of this experiment, by run, as far as they were submitted from this working folder."""
    # `results` may be a link: the working folder is where that lies.
    here = Path(os.path.abspath(results)).parents[1].resolve()  # noqa: PTH100
    found: dict[str, list[QueuedJob]] = defaultdict(list)
    for job in queue.jobs:
        if Path(job.folder).resolve() == here and (run := cluster().run_of(job, "train", results)):
            found[run].append(job)
    return dict(found)


def with_queue(
    run: Progress, queue: Queue, jobs: Sequence[QueuedJob] = (), holder: claims.Holder | None = None
) -> Progress:
    """A run's progress from its files, corrected by the scheduler.

    `jobs`: the run's training jobs, as submitted; `holder`: of the newest claim. Read the queue before the files: the
    ledger has what happened in between.
    """
    if run.state == "done":
        return run
    if not queue.known:
        return replace(run, slurm="unknown") if run.job and run.goes_on else run
    theirs = holder if holder and holder["job"] == run.job else None
    # A job of this number in another cluster's queue is another job.
    own = None if theirs and claims.is_of_other_cluster(theirs) else queue[run.job]
    if (run.event_time or 0) > queue.asked:
        return replace(run, job_ends=own.ends) if own and run.state == "running" else run
    living = {job.id: job for job in [own, *jobs] if job and not _only_ends(run, job)}
    if not living:
        return _without_job(run, own, theirs)
    job = min(living.values(), key=lambda job: job.waits)
    known = {"job": job.id, "job_state": job.state, "job_starts": job.starts, "job_ends": job.ends, "detail": None}
    if job.waits:
        return replace(run, state="queued", nodes=(), job_reason=job.reason, **known)
    nodes = run.nodes if job.id == run.job and run.nodes else (job.nodes,)
    return replace(run, state="running", nodes=nodes, **known)


def _only_ends(run: Progress, job: QueuedJob) -> bool:
    """Whether this is the rest of a job whose supervisor has said already what comes next."""
    return job.id == run.job and (job.only_ends or (not job.waits and not run.goes_on))


def _without_job(run: Progress, own: QueuedJob | None, holder: claims.Holder | None) -> Progress:
    """No job of ours will train it further: lost, unless the ledger says so too or another user or cluster has it."""
    if not (run.job and run.goes_on) or own:
        return run
    if holder and (claims.is_of_other_cluster(holder) or claims.is_of_other_user(holder)):
        return replace(run, slurm="unknown", holder=claims.describe(holder))
    return replace(run, state="lost", detail=f"{cluster().name} job {run.job} is gone: call again")
