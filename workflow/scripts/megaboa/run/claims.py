"""One trainer per run: claims that name their SLURM job, and are judged by asking SLURM whether it lives.

A claim is a numbered file, created by link(2), which succeeds for one of several contenders on any shared file system.
The claim with the highest number counts, until it is released or its holder is dead. So a killed holder never needs an
unlock, and nobody takes over from a living one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from megaboa import files
from megaboa.launch import slurm

POLL_SECONDS = 5.0
KEPT = 5  # older claims are of no interest to anybody

Holder = dict[str, Any]


def myself(job: slurm.Job | None) -> Holder:
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "job": job.id if job else None,
        "restarts": job.restarts if job else None,
        "time": time.time(),
    }


def describe(holder: Holder) -> str:
    process = f"process {holder['pid']} on host {holder['host']}"
    return f"SLURM job {holder['job']} ({process})" if holder["job"] else process


@contextlib.contextmanager
def held(folder: Path, me: Holder, on_wait: Callable[[str], None] = lambda holder: None) -> Iterator[int]:
    """Hold the run; yield the claim's number. Where somebody alive holds it, tell `on_wait` once and wait."""
    folder.mkdir(parents=True, exist_ok=True)
    told = None
    while (claim := _try(folder, me)) is None:
        holder = _read(_newest(folder))
        if holder and told != describe(holder):
            told = describe(holder)
            on_wait(told)
        time.sleep(POLL_SECONDS if me["job"] else 0.2)
    number, lock = claim
    with lock:
        try:
            yield number
        finally:
            _path(folder, number).with_suffix(".released").touch()


def newest(folder: Path) -> int:
    path = _newest(folder)
    return int(path.stem) if path else 0


def last_holder(folder: Path) -> Holder | None:
    """Who holds the run, or held it last."""
    return _read(_newest(folder))


def holder(folder: Path) -> Holder | None:
    """Who holds the run, as far as the files tell."""
    path = _newest(folder)
    return None if path is None or path.with_suffix(".released").exists() else _read(path)


def is_held(folder: Path) -> bool | None:
    """Whether somebody alive holds the run; None where nobody can tell."""
    path, found = _newest(folder), holder(folder)
    return False if path is None or found is None else is_alive(found, path)


def is_alive(holder: Holder, path: Path, me: Holder | None = None) -> bool | None:
    """Whether a claim's holder may still train; None where nobody can tell."""
    if holder["job"] is None:
        return _is_locked(path)
    if me and holder["job"] == me["job"]:
        # An earlier life of our own job is over; within one life a second call is another process of the same host.
        return _is_locked(path) if holder["restarts"] == me["restarts"] else False
    try:
        return slurm.is_alive(holder["job"])
    except slurm.SlurmUnreachableError:
        return None


def _try(folder: Path, me: Holder) -> tuple[int, IO[bytes]] | None:
    """Take the next claim if the newest one is free; None if it isn't, or somebody was faster."""
    current = _newest(folder)
    if current and not current.with_suffix(".released").exists():
        theirs = _read(current)
        if theirs is not None and is_alive(theirs, current, me) is not False:
            return None
    number = int(current.stem) + 1 if current else 1
    draft = folder / f".{me['host']}.{me['pid']}.tmp"
    files.write_json(draft, me)
    lock = draft.open("r+b")  # for writing: NFS locks no other
    with contextlib.suppress(OSError):  # a file system without locks: SLURM is asked all the same
        fcntl.flock(lock, fcntl.LOCK_EX)  # before others can see the claim: who lives holds the lock
    try:
        os.link(draft, _path(folder, number))
    except FileExistsError:
        lock.close()
        return None
    finally:
        draft.unlink()
    _forget(folder, number)
    return number, lock


def _path(folder: Path, number: int) -> Path:
    return folder / f"{number:06d}.json"


def _newest(folder: Path) -> Path | None:
    return max(folder.glob("[0-9]*.json"), default=None)


def _read(path: Path | None) -> Holder | None:
    try:
        return files.read_json(path) if path else None
    except (FileNotFoundError, ValueError):
        return None


def _is_locked(path: Path) -> bool:
    """Whether a process of this host (or of one that shares locks with it) has the claim's file locked."""
    try:
        with path.open("r+b") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # gone, or on a file system without locks
        return False
    return False


def _forget(folder: Path, number: int) -> None:
    for path in folder.glob("[0-9]*"):
        if int(path.stem) <= number - KEPT:
            path.unlink(missing_ok=True)
