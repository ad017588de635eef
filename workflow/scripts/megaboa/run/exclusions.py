"""Nodes that SLURM is told to keep a job away from (ExcNodeList): the user's own, and those that failed under the run.

SLURM takes the list for waiting jobs only, and keeps it. A job whose supervisor died can't change its own, so whoever
lives does it: `revise` is called by Snakemake, by `megaboa status` and by supervisors of other runs.
"""

from __future__ import annotations

import contextlib
import math
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from megaboa.launch import slurm
from megaboa.paths import RunFolder, RunStore, begun
from megaboa.records import AttemptStart, Called, Event, read_ledger
from megaboa.run import claims, ledger
from megaboa.run import site as sites
from megaboa.run.announce import announcer

REVISE_SECONDS = 300.0


def of(job: slurm.Job | None) -> list[str]:
    """The nodes that a job is kept away from now."""
    return sorted(slurm.hostnames(job.excluded)) if job else []


def users_own(entries: Sequence[Event], job: str, excluded: str) -> set[str]:
    """The nodes that the user excluded, as the job had them before its first supervisor changed any.

    `excluded`: what the job has now. Older ledgers don't say what it had at first: what was never blamed is theirs.
    """
    first = next((entry for entry in entries if isinstance(entry, Called) and entry.job == job), None)
    if first and first.excluded is not None:
        return set(first.excluded)
    return set(slurm.hostnames(excluded)) - set(ledger.avoided_nodes(entries, time.time(), hours=math.inf))


def avoided(entries: Sequence[Event], partition: str, folder: RunFolder, users: set[str]) -> set[str]:
    """The nodes that a run is better off without now."""
    recent = ledger.avoided_nodes(entries, time.time(), folder.launch.recovery.exclude_hours)
    ours = {node: blamed for node, blamed in recent.items() if node not in users}
    return sites.usable(partition, ours, folder.launch.nodes, users)


def reviser(results: Path) -> Callable[[], None]:
    """To be called often: revises now and then. What can't be done now can be done later."""
    looked = -REVISE_SECONDS

    def look() -> None:
        nonlocal looked
        if time.monotonic() - looked < REVISE_SECONDS or shutil.which("squeue") is None:
            return
        looked = time.monotonic()
        with contextlib.suppress(slurm.SlurmUnreachableError, OSError):
            revise(results)

    return look


def revise_in_background(results: Path) -> None:
    """As long as this process lives, which has other things to do than to wait for SLURM."""
    look = reviser(results)

    def keep_looking() -> None:
        while True:
            look()
            time.sleep(REVISE_SECONDS)

    threading.Thread(target=keep_looking, daemon=True).start()


def revise(results: Path) -> None:
    """Give waiting jobs back the nodes that they need no longer avoid, or can't do without.

    `results`: the folder of all experiments. Jobs that we don't know, and what their users excluded, are left alone.
    """
    waiting = {job.id: job for job in slurm.waiting_jobs() if job.excluded}
    for run in begun(results) if waiting else ():
        with contextlib.suppress(Exception):  # whatever another run's files hold: the others are served all the same
            _revise_run(run, waiting)


def _revise_run(folder: RunFolder, waiting: Mapping[str, slurm.Job]) -> None:
    store = RunStore.of(folder.attempts_link)
    entries = read_ledger(store.ledger)
    last = next((entry.job for entry in reversed(entries) if isinstance(entry, Called | AttemptStart)), None)
    job, holder = waiting.get(last), claims.last_holder(store.claims)
    if job is None or (holder and claims.is_of_other_cluster(holder)):
        return
    now, users = set(slurm.hostnames(job.excluded)), users_own(entries, job.id, job.excluded)
    blamed = set(ledger.avoided_nodes(entries, time.time(), hours=math.inf)) - users
    back = now & (blamed - avoided(entries, job.partition, folder, users))
    if back and slurm.exclude(job.id, now - back):
        announcer(folder)(f"SLURM job {job.id}, which waits, may have {', '.join(sorted(back))} again")
