"""Our jobs in SLURM's queue and in its accounts, and which run Snakemake has made one for.

Snakemake's executor plugin writes a job's rule and wildcards into its comment, and calls Snakemake again in its batch
script. The comment names no experiment; the script does.
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
# No `|` can be in any of these but the last two.
FORMAT = "%i|%T|%r|%N|%S|%e|%k|%Z"
_ENDING = ("COMPLETING", "STAGE_OUT")
# What SLURM holds: a job whose first host was lost five times (MaxBatchRequeue), which only an administrator can
# release, one that a host refused to start, and one that somebody held. A release that comes while a held job still
# ends is forgotten (SLURM 22.05).
_HELD = {
    "JobHoldMaxRequeue": "held after too many requeues: scancel {}, then call again",
    "launch failed requeued held": "a host refused to start it: scontrol release {}",
    "job requeued in held state": "by scontrol requeuehold: scontrol release {}",
    "job requeued in special exit state": "scontrol release {}",
    "JobHeldUser": "by scontrol hold: scontrol release {}",
    "JobHeldAdmin": "an administrator holds it: ask for scontrol release {}",
}
# Jobs are listed again after so long: not once for each of a thousand runs.
LIST_SECONDS = 20
PAUSES = (1, 5, 10)

_listed: list[tuple[float, list[QueuedJob] | UnreachableError]] = []  # when, and what squeue said last


# The queue


def read(seconds: float = QUERY_SECONDS) -> list[QueuedJob]:
    """Our jobs, by one call of squeue."""
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
        nodes=nodes,
        starts=queries.moment(starts),
        ends=queries.moment(ends),
        comment=queries.given(comment),
        folder=folder,
    )


def _told(reason: str, job: str) -> str:
    reason = "" if reason == "None" else reason.replace("_", " ")  # SLURM's versions differ in that
    return f"{reason}: {_HELD[reason].format(job)}" if reason in _HELD else reason


# Which run a job is for


def run_of(job: QueuedJob, rule: str, results: Path, script: Callable[[str], str] | None = None) -> str | None:
    """Only where other experiments have a run of this name, or where the comment was changed, `script` must read the
    job's batch script."""
    if job.comment.startswith("rule_"):
        prefix = f"rule_{rule}_wildcards_"
        run = job.comment.removeprefix(prefix)
        owners = [
            path.name for path in results.parent.iterdir() if ExperimentFolder(path).run(run).file("run").exists()
        ]
        if run == job.comment or results.name not in owners:
            return None
        if len(owners) == 1:
            return run
    return run_in_script((script or _script)(job.id), rule, results.name)


def run_in_script(text: str, rule: str, experiment: str) -> str | None:
    """The run of this experiment for which Snakemake calls itself in a batch script.

    It names the rule with its wildcards and, among the files that it waits for, the run's own; where these are many,
    they stand in a file that may be gone, and the run is taken for ours.
    """
    words = re.split(r"[\s'\"]+", text)
    run = next((word.removeprefix(f"{rule}:run=") for word in words if word.startswith(f"{rule}:run=")), None)
    own = any(f"/{word}".endswith(f"/{experiment}/runs/{run}/run.json") for word in words)
    return run if own or "--wait-for-files-file" in words else None


def _script(job: str) -> str:
    """Nothing where SLURM doesn't answer."""
    try:
        return queries.batch_script(job)
    except UnreachableError:
        return ""


# What a new job must wait for: a killed Snakemake leaves its jobs behind, and the next one knows nothing of them


def dependency(rule: str, folder: RunFolder) -> list[str]:
    """The option of sbatch by which the rule's new job of a run waits for those that still live."""
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
    """Our jobs in the queue or running that this rule has made of this run."""
    here, experiment = Path.cwd().resolve(), folder.experiment
    jobs = [job.id for job in _living() if Path(job.folder).resolve() == here]
    scripts = {job: _asked_again(lambda job=job: queries.batch_script(job)) for job in jobs}
    return [job for job, script in scripts.items() if run_in_script(script, rule, experiment) == folder.name]


def _living() -> list[QueuedJob]:
    """Our jobs. Silence is remembered too, so that not every run waits for it."""
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
    """What SLURM answers, after a few tries; exceptions are not remembered by the caches."""
    for pause in PAUSES:
        try:
            return ask()
        except UnreachableError as silence:
            error = silence
        time.sleep(pause)
    raise error


# Accounts


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
    """A job that still runs has no end, and one that waits no start."""
    lives = []
    for line in text.splitlines():
        job, submit, start, end = (line.split("|") + [""] * 4)[:4]
        asked, began = queries.moment(submit), queries.moment(start)
        if asked is not None and began is not None:
            lives.append(Life(job, asked, began, queries.moment(end) or now))
    return sorted(lives, key=lambda life: life.start)
