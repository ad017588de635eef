"""What is asked of SLURM before a run is submitted, on the login node.

A killed Snakemake leaves its jobs behind, and the next one knows nothing of them. So a run's new job waits for a job
of the same run that still lives.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

from megaboa.launch import slurm
from megaboa.paths import RunFolder

# Jobs are listed again after so long: not once for each of a thousand runs.
LIST_SECONDS = 20
PAUSES = (1, 5, 10)

_listed: list[tuple[float, str | slurm.SlurmUnreachableError]] = []  # when, and what squeue said last


def options(rule: str, folder: RunFolder) -> list[str]:
    """sbatch's options for the job of a run that the rule makes."""
    if shutil.which("squeue") is None:
        return []
    try:
        living = jobs_of(rule, folder)
    except slurm.SlurmUnreachableError as error:
        reason = str(error).splitlines()[0]
        print(
            f"run {folder.name}: {reason}: should an older job of it live, the new one waits in its nodes",
            file=sys.stderr,
        )
        return []
    return [f"--dependency=afterany:{':'.join(living)}"] if living else []


def jobs_of(rule: str, folder: RunFolder) -> list[str]:
    """Our jobs in the queue or running that this rule has made of this run."""
    here = Path.cwd().resolve()
    jobs = [job for job, workdir in _list_jobs() if Path(workdir).resolve() == here]
    return [job for job in jobs if _is_of(_patiently(slurm.batch_script, job), rule, folder)]


def _list_jobs() -> list[tuple[str, str]]:
    """Our living jobs, with their working folders. Silence is remembered too, so that not every run waits for it."""
    if not _listed or time.monotonic() - _listed[0][0] > LIST_SECONDS:
        try:
            answer = _patiently(slurm.query, ["squeue", "--me", "--noheader", "--format=%i|%Z"]) or ""
        except slurm.SlurmUnreachableError as silence:
            answer = silence
        _listed[:] = [(time.monotonic(), answer)]
    answer = _listed[0][1]
    if isinstance(answer, slurm.SlurmUnreachableError):
        raise answer
    return [tuple(line.split("|", 1)) for line in answer.splitlines() if "|" in line]  # type: ignore[misc]


def _is_of(script: str, rule: str, folder: RunFolder) -> bool:
    """Snakemake names a job's rule and wildcards, and the files that it waits for (in a file, where they are many)."""
    words = script.replace("'", " ").replace('"', " ").split()
    same_experiment = str(folder.file("run")) in words or "--wait-for-files-file" in words
    return f"{rule}:run={folder.name}" in words and same_experiment


def _patiently[Question, Answer](ask: Callable[[Question], Answer], question: Question) -> Answer:
    """What SLURM answers, after a few tries; exceptions are not remembered by the caches."""
    for pause in PAUSES:
        try:
            return ask(question)
        except slurm.SlurmUnreachableError as silence:
            error = silence
        time.sleep(pause)
    raise error
