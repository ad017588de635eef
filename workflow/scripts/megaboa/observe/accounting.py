"""What SLURM's accounting says of a run's jobs: when each was submitted, and when it had its nodes."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass

from megaboa.launch import slurm


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
    return parse(text or "", time.time()) or None


def parse(text: str, now: float) -> list[Life]:
    """A job that still runs has no end, and one that waits no start."""
    lives = []
    for line in text.splitlines():
        job, submit, start, end = (line.split("|") + [""] * 4)[:4]
        asked, began = slurm.moment(submit), slurm.moment(start)
        if asked is not None and began is not None:
            lives.append(Life(job, asked, began, slurm.moment(end) or now))
    return sorted(lives, key=lambda life: life.start)
