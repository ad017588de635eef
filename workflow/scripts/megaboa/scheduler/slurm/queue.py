"""Our jobs in SLURM's queue and accounting, and the run that Snakemake submitted each of them for.

Snakemake's executor plugin writes a job's rule and wildcards into its comment, and calls Snakemake again in its batch
script. The comment doesn't name the experiment, but the script does.
"""

from __future__ import annotations

import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from megaboa.paths import ExperimentFolder, RunFolder
from megaboa.scheduler.answers import Life, QueuedJob, UnreachableError
from megaboa.scheduler.slurm import queries

QUERY_SECONDS = 30
# None of these but the last two can contain a `|`.
FORMAT = "%i|%T|%r|%N|%S|%e|%k|%Z"
_ENDING = ("COMPLETING", "STAGE_OUT")
# Reasons for held jobs: a job whose first host was lost five times (MaxBatchRequeue), which only an administrator can
# release, one that a host refused to start, and one that somebody held. SLURM 22.05 forgets a release that comes while
# a held job is still ending.
_HELD = {
    "JobHoldMaxRequeue": "held after too many requeues: scancel {}, then call again",
    "launch failed requeued held": "a host refused to start it: scontrol release {}",
    "job requeued in held state": "by scontrol requeuehold: scontrol release {}",
    "job requeued in special exit state": "scontrol release {}",
    "JobHeldUser": "by scontrol hold: scontrol release {}",
    "JobHeldAdmin": "an administrator holds it: ask for scontrol release {}",
}
# Reasons for jobs that never start as they are: a limit of the partition, which SLURM only compares once they wait.
_NEVER = {
    "PartitionNodeLimit": "more nodes than the partition lets a job have: lower resources.nodes",
    "PartitionTimeLimit": "a longer wall time than the partition allows: lower resources.runtime",
    "PartitionConfig": "a limit of the partition, as `scontrol show partition` has them: lower what is above it",
    "MaxMemPerLimit": "more memory than the partition lets a job have: lower resources.mem_mb_per_rank",
    # Whether a constraint is set isn't read: features may contain `|`, which separates the columns.
    "BadConstraints": "no node of the partition has what it asks for: correct resources.constraint if it is set, or "
    "ask for less on a node",
}
# Lifetime of the cached list of jobs, so that it isn't read for each of a thousand runs.
LIST_SECONDS = 20
PAUSES = (1, 5, 10)

_listed: list[tuple[float, list[QueuedJob] | UnreachableError]] = []  # time and content of squeue's last answer


# The queue


def read(seconds: float = QUERY_SECONDS) -> list[QueuedJob]:
    """Our jobs, from a single call of squeue."""
    return parse_jobs(queries.query(["squeue", "--me", "--noheader", f"--format={FORMAT}"], seconds) or "")


def parse_jobs(text: str) -> list[QueuedJob]:
    rows = [line.split("|", FORMAT.count("|")) for line in text.splitlines()]
    return [_job(row) for row in rows if len(row) == FORMAT.count("|") + 1]


def _job(row: Iterable[str]) -> QueuedJob:
    job, state, reason, nodes, starts, ends, comment, folder = row
    return QueuedJob(
        job,
        state,
        waits=state in queries.WAITING,
        only_ends=state in _ENDING,
        reason=_told(reason, job),
        stuck=_plain(reason) in {*_HELD, *_NEVER},
        nodes=nodes,
        starts=queries.moment(starts),
        ends=queries.moment(ends),
        comment=queries.given(comment),
        folder=folder,
    )


def _plain(reason: str) -> str:
    return "" if reason == "None" else reason.replace("_", " ")  # versions of SLURM differ in this


def _told(reason: str, job: str) -> str:
    reason = _plain(reason)
    if reason in _NEVER:
        return f"{reason}: {_NEVER[reason]}, or take another partition; then scancel {job}, and call again"
    return f"{reason}: {_HELD[reason].format(job)}" if reason in _HELD else reason


# Which run a job is for


def run_of(job: QueuedJob, rule: str, results: Path, script: Callable[[str], str] | None = None) -> str | None:
    """The run that a job is for. Its batch script is only read if several experiments have a run of this name, or if
    the comment was changed."""
    if job.comment.startswith("rule_"):
        prefix = f"rule_{rule}_wildcards_"
        run = job.comment.removeprefix(prefix)
        owners = [path.name for path in results.parent.iterdir() if _has_run(path, run)]
        if run == job.comment or results.name not in owners:
            return None
        if len(owners) == 1:
            return run
    return run_in_script((script or _script)(job.id), rule, results.name)


def _has_run(results: Path, run: str) -> bool:
    try:
        return ExperimentFolder(results).run(run).file("run").exists()
    except PermissionError:  # it may have one
        return True


def run_in_script(text: str, rule: str, experiment: str) -> str | None:
    """The run of this experiment for which a batch script calls Snakemake.

    The script names the rule with its wildcards and, among the files that it waits for, the run's own. Many files are
    listed in a separate file, which may be gone; then the run is taken for ours.
    """
    words = re.split(r"[\s'\"]+", text)
    run = next((word.removeprefix(f"{rule}:run=") for word in words if word.startswith(f"{rule}:run=")), None)
    own = any(f"/{word}".endswith(f"/{experiment}/runs/{run}/run.json") for word in words)
    return run if own or "--wait-for-files-file" in words else None


def _script(job: str) -> str:
    """A job's batch script; empty if SLURM doesn't answer."""
    try:
        return queries.batch_script(job)
    except UnreachableError:
        return ""


# Earlier jobs that a new one must wait for: a killed Snakemake leaves its jobs behind, and the next one knows none of
# them


def dependency(rule: str, folder: RunFolder) -> list[str]:
    """The option of sbatch that makes the rule's new job for a run wait for earlier ones that are still alive."""
    if shutil.which("squeue") is None:
        return []
    try:
        living = jobs_of(rule, folder)
    except UnreachableError as error:
        reason = str(error).splitlines()[0]
        print(
            f"run {folder.name}: {reason}: if an older job of it is alive, the new one waits on its nodes",
            file=sys.stderr,
        )
        return []
    return [f"--dependency=afterany:{':'.join(living)}"] if living else []


def jobs_of(rule: str, folder: RunFolder) -> list[str]:
    """Our waiting or running jobs that this rule submitted for this run."""
    here, experiment = Path.cwd().resolve(), folder.experiment
    jobs = [job.id for job in _living() if Path(job.folder).resolve() == here]
    scripts = {job: _asked_again(lambda job=job: queries.batch_script(job)) for job in jobs}
    return [job for job, script in scripts.items() if run_in_script(script, rule, experiment) == folder.name]


def _living() -> list[QueuedJob]:
    """Our jobs, cached. A missing answer is cached too, so that not every run waits for it."""
    if not _listed or time.monotonic() - _listed[0][0] > LIST_SECONDS:
        try:
            answer = _asked_again(lambda: read(queries.QUERY_SECONDS))
        except UnreachableError as silence:
            answer = silence
        _listed[:] = [(time.monotonic(), answer)]
    answer = _listed[0][1]
    if isinstance(answer, UnreachableError):
        raise answer
    return answer


def _asked_again[Answer](ask: Callable[[], Answer]) -> Answer:
    """SLURM's answer, with a few retries. Caches don't prevent these, because they don't keep exceptions."""
    if queries.asks_once():
        return ask()
    for pause in PAUSES:
        try:
            return ask()
        except UnreachableError as silence:
            error = silence
        time.sleep(pause)
    raise error


# Accounting


def read_lives(jobs: Sequence[str]) -> list[Life] | None:
    if not jobs or shutil.which("sacct") is None:
        return None
    command = ["sacct", "--duplicates", "--allocations", "--noheader", "--parsable2", f"--jobs={','.join(jobs)}"]
    try:
        text = queries.query([*command, "--format=JobIDRaw,Submit,Start,End"])
    except UnreachableError:
        return None
    return parse_lives(text or "", time.time()) or None


def parse_lives(text: str, now: float) -> list[Life]:
    """Lives from the accounting. A running job has no end, and a waiting one no start."""
    lives = []
    for line in text.splitlines():
        job, submit, start, end = (line.split("|") + [""] * 4)[:4]
        asked, began = queries.moment(submit), queries.moment(start)
        if asked is not None and began is not None:
            lives.append(Life(job, asked, began, queries.moment(end) or now))
    return sorted(lives, key=lambda life: life.start)
