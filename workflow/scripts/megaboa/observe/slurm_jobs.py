"""What SLURM says of the runs: its queue, by one call for all of them, which run a job trains, and its accounts."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megaboa.launch import slurm
from megaboa.paths import ExperimentFolder
from megaboa.run import claims
from megaboa.run.progress import Progress

QUERY_SECONDS = 30
# No `|` can be in any of these but the last two.
FORMAT = "%i|%T|%r|%N|%S|%e|%k|%Z"
_ENDING = ("COMPLETING", "STAGE_OUT")


@dataclass(frozen=True)
class SlurmJob:
    """A job of ours that waits or runs."""

    id: str
    state: str
    reason: str = ""
    nodes: str = ""  # SLURM's compressed form, such as n[1-2]
    starts: float | None = None
    ends: float | None = None
    comment: str = ""  # Snakemake's executor writes the rule and its wildcards there
    folder: str = ""


@dataclass(frozen=True)
class Queue:
    """SLURM's answer; `known` is False where it gave none."""

    asked: float
    known: bool = False
    jobs: tuple[SlurmJob, ...] = ()

    def __getitem__(self, job: str | None) -> SlurmJob | None:
        return next((found for found in self.jobs if found.id == job), None)


def read_queue() -> Queue:
    """Our jobs, by one call of squeue."""
    asked = time.time()
    if shutil.which("squeue") is None:
        return Queue(asked)
    try:
        text = slurm.query(["squeue", "--me", "--noheader", f"--format={FORMAT}"], QUERY_SECONDS)
    except slurm.SlurmUnreachableError:
        return Queue(asked)
    return Queue(asked, True, tuple(parse_jobs(text or "")))


def parse_jobs(text: str) -> list[SlurmJob]:
    rows = [line.split("|", FORMAT.count("|")) for line in text.splitlines()]
    return [_job(row) for row in rows if len(row) == FORMAT.count("|") + 1]


def trained_by(queue: Queue, results: Path, script: Callable[[str], str] | None = None) -> dict[str, list[SlurmJob]]:
    """The jobs that train a run of this experiment, by run, as far as they were submitted from this working folder.

    The comment that Snakemake gives a job names its run, but no experiment. Only where other experiments have a run of
    this name, or where the comment was changed, `script` must read the job's batch script.
    """
    # `results` may be a link: the working folder is where that lies.
    here = Path(os.path.abspath(results)).parents[1].resolve()  # noqa: PTH100
    found: dict[str, list[SlurmJob]] = defaultdict(list)
    for job in queue.jobs:
        if Path(job.folder).resolve() == here and (run := _run_of(job, results, script or batch_script)):
            found[run].append(job)
    return dict(found)


def run_in_script(text: str, experiment: str) -> str | None:
    """The run of this experiment that a batch script of Snakemake's trains.

    It names the rule with its wildcards and, among the files that it waits for, the run's own; where these are many,
    they stand in a file that may be gone, and the run is taken for ours.
    """
    words = re.split(r"[\s'\"]+", text)
    run = next((word.removeprefix("train:run=") for word in words if word.startswith("train:run=")), None)
    own = any(word.endswith(f"/{experiment}/runs/{run}/run.json") for word in words)
    return run if own or "--wait-for-files-file" in words else None


def with_queue(
    run: Progress, queue: Queue, jobs: Sequence[SlurmJob] = (), holder: claims.Holder | None = None
) -> Progress:
    """A run's progress by its files, corrected by what SLURM says. `jobs`: those that train the run, as submitted;
    `holder`: who claimed it last.

    The queue must have been read before the files: what happened between is told by the ledger.
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
    job = min(living.values(), key=lambda job: job.state == "PENDING")
    known = {"job": job.id, "job_state": job.state, "job_starts": job.starts, "job_ends": job.ends, "detail": None}
    if job.state == "PENDING":
        return replace(run, state="queued", nodes=(), job_reason=job.reason, **known)
    nodes = run.nodes if job.id == run.job and run.nodes else (job.nodes,)
    return replace(run, state="running", nodes=nodes, **known)


def batch_script(job: str) -> str:
    """A job's batch script; nothing where SLURM doesn't answer."""
    try:
        return slurm.batch_script(job)
    except slurm.SlurmUnreachableError:
        return ""


def _only_ends(run: Progress, job: SlurmJob) -> bool:
    """Whether this is the rest of a job whose supervisor has said already what comes next."""
    return job.id == run.job and (job.state in _ENDING or (job.state != "PENDING" and not run.goes_on))


def _without_job(run: Progress, own: SlurmJob | None, holder: claims.Holder | None) -> Progress:
    """Nobody goes on with it: fine if the ledger says so too. Our queue has no jobs of others."""
    if not (run.job and run.goes_on) or own:
        return run
    if holder and (claims.is_of_other_cluster(holder) or claims.is_of_other_user(holder)):
        return replace(run, slurm="unknown", holder=claims.describe(holder))
    return replace(run, state="lost", detail=f"SLURM job {run.job} is gone: call again")


def _run_of(job: SlurmJob, results: Path, script: Callable[[str], str]) -> str | None:
    if job.comment.startswith("rule_"):
        run = job.comment.removeprefix("rule_train_wildcards_")
        owners = [
            path.name for path in results.parent.iterdir() if ExperimentFolder(path).run(run).file("run").exists()
        ]
        if run == job.comment or results.name not in owners:
            return None
        if len(owners) == 1:
            return run
    return run_in_script(script(job.id), results.name)


def _job(row: Iterable[str]) -> SlurmJob:
    job, state, reason, nodes, starts, ends, comment, folder = row
    known = {"reason": "" if reason == "None" else reason, "nodes": nodes, "folder": folder}
    return SlurmJob(
        job, state, starts=slurm.moment(starts), ends=slurm.moment(ends), comment=slurm.given(comment), **known
    )


@dataclass(frozen=True)
class Life:
    """A job, from the moment it asked to the moment its nodes were taken away. One that was put back has several."""

    job: str
    submit: float
    start: float
    end: float


def read_lives(jobs: Sequence[str]) -> list[Life] | None:
    """Every life of these jobs, oldest first; None where SLURM keeps no accounts, or doesn't answer."""
    if not jobs or shutil.which("sacct") is None:
        return None
    command = ["sacct", "--duplicates", "--allocations", "--noheader", "--parsable2", f"--jobs={','.join(jobs)}"]
    try:
        text = slurm.query([*command, "--format=JobIDRaw,Submit,Start,End"])
    except slurm.SlurmUnreachableError:
        return None
    return parse_lives(text or "", time.time()) or None


def parse_lives(text: str, now: float) -> list[Life]:
    """A job that still runs has no end, and one that waits no start."""
    lives = []
    for line in text.splitlines():
        job, submit, start, end = (line.split("|") + [""] * 4)[:4]
        asked, began = slurm.moment(submit), slurm.moment(start)
        if asked is not None and began is not None:
            lives.append(Life(job, asked, began, slurm.moment(end) or now))
    return sorted(lives, key=lambda life: life.start)
