"""One trainer per run: claims name their job, and the scheduler says whether it is alive.

A claim is a numbered file, created by link(2), which succeeds for one of several contenders on any shared file system.
The claim with the highest number counts, until it is released or its holder is dead. So a killed holder never needs an
unlock, and nobody takes over from a living one.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import os
import pwd
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, NamedTuple

from megaboa.records import Holder, read, write
from megaboa.scheduler.answers import UnreachableError
from megaboa.scheduler.local import is_running
from megaboa.scheduler.protocol import Job
from megaboa.scheduler.registry import cluster

POLL_SECONDS = 5.0
LOCK_POLL_SECONDS = 0.2  # where no scheduler must be asked
KEPT = 5  # older claims are removed


@dataclass(frozen=True)
class Verdict:
    """Whether a claim's holder may still train; None if unknown, with the reason."""

    alive: bool | None
    why: str = ""


class _Taken(NamedTuple):
    by: str
    is_job: bool


def myself(job: Job | None) -> Holder:
    return Holder(
        host=socket.gethostname(),
        machine=_machine(),
        pid=os.getpid(),
        user=_user(os.geteuid()),
        job=job.id if job else None,
        restarts=job.restarts if job else None,
        cluster=_own_cluster() if job else None,
        time=time.time(),
    )


def describe(holder: Holder) -> str:
    """With user and cluster where they differ from ours."""
    user, theirs = holder.user, holder.cluster
    whose = f" of user {user}" if user not in (None, _user(os.geteuid())) else ""
    where = f" on cluster {theirs}" if theirs not in (None, _own_cluster()) else ""
    process = f"process {holder.pid} on host {holder.host}"
    return f"{cluster().name} job {holder.job}{whose}{where} ({process})" if holder.job else f"{process}{whose}"


@contextlib.contextmanager
def held(folder: Path, me: Holder, on_wait: Callable[[str], None] = lambda holder: None) -> Iterator[int]:
    """Hold the run; yield the claim's number. If another process may hold it, tell `on_wait` which, and wait."""
    folder.mkdir(parents=True, exist_ok=True)
    told = set()
    while isinstance(claim := _try(folder, me), _Taken):
        if claim.by not in told:
            told.add(claim.by)
            on_wait(claim.by)
        time.sleep(POLL_SECONDS if me.job or claim.is_job else LOCK_POLL_SECONDS)
    number, lock = claim
    with lock:
        try:
            yield number
        finally:
            # If it can't be written, the lock ends with this process, and the scheduler knows when the job ends.
            with contextlib.suppress(OSError):
                _released(_path(folder, number)).touch()


def newest(folder: Path) -> int:
    path = _newest(folder)
    return int(path.stem) if path else 0


def last_holder(folder: Path) -> Holder | None:
    """The present or last holder of the run."""
    return _known(_newest(folder))


def holder(folder: Path) -> Holder | None:
    """The holder of the run, from the files."""
    path = _newest(folder)
    return None if path is None or _released(path).exists() else _known(path)


def is_held(folder: Path) -> bool | None:
    """Whether a live process holds the run; None if unknown."""
    path = _newest(folder)
    return False if path is None or _released(path).exists() else _judge_file(path, None)[0].alive


def is_of_other_cluster(holder: Holder) -> bool:
    """Whether the holder's job is unknown to the scheduler here; its number may be that of another job."""
    return holder.job is not None and holder.cluster not in (None, _own_cluster())


def is_of_other_user(holder: Holder) -> bool:
    return holder.user not in (None, _user(os.geteuid()))


def judge(holder: Holder, path: Path, me: Holder | None = None) -> Verdict:
    """Whether a claim's holder may still train."""
    if holder.job is None:
        return _judge_by_lock(holder, path)
    if me and holder.job == me.job and holder.cluster in (None, me.cluster):
        # An earlier life of our own job is over; within one life a second call is another process of the same host.
        return _judge_by_lock(holder, path) if holder.restarts == me.restarts else Verdict(False)
    return _judge_by_scheduler(holder)


def _judge_by_scheduler(holder: Holder) -> Verdict:
    theirs = holder.cluster
    try:
        if theirs and (ours := cluster().cluster()) != theirs:
            return Verdict(None, f"it can't be queried from here, which is cluster {ours}")
        alive = cluster().is_alive(holder.job)
    except UnreachableError:
        return Verdict(None, f"{cluster().name} doesn't answer here")
    if alive is None and is_of_other_user(holder):
        return Verdict(
            None, f"{cluster().name} doesn't show it to user {_user(os.geteuid())}: it has ended, or is hidden"
        )
    return Verdict(bool(alive))


def _judge_by_lock(holder: Holder, path: Path) -> Verdict:
    """While it lives, a process of this host (or of one that shares locks with it) has the claim's file locked."""
    try:
        return Verdict(_is_locked(path))
    except FileNotFoundError:
        return Verdict(False)
    except OSError as error:
        if holder.machine == _machine():
            return Verdict(is_running(holder.pid))
        return Verdict(None, _no_lock(path, error))


def _try(folder: Path, me: Holder) -> tuple[int, IO[bytes]] | _Taken:
    """Take the next claim if the newest one is free; else return its holder."""
    current = _newest(folder)
    if current and not _released(current).exists():
        verdict, theirs = _judge_file(current, me)
        if verdict.alive is not False:
            return _Taken(_said(current, theirs, verdict), bool(theirs and theirs.job))
    number = int(current.stem) + 1 if current else 1
    draft = folder / f".{me.host}.{me.pid}.tmp"
    write(draft, me)
    lock = draft.open("r+b")  # for writing: NFS locks only such files
    # Before others can see the claim, because a live holder holds the lock. Without locks, others notice when they ask
    # for it (`_judge_by_lock`).
    with contextlib.suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_EX)
    first = True
    try:
        os.link(draft, _path(folder, number))
    except FileExistsError:
        first = False
    finally:
        draft.unlink()  # before another try, which writes it again
    if not first:
        lock.close()
        return _try(folder, me)
    _forget(folder, number)
    return number, lock


def _judge_file(path: Path, me: Holder | None) -> tuple[Verdict, Holder | None]:
    try:
        theirs = _read(path)
    except (OSError, ValueError) as error:
        return Verdict(None, f"its claim can't be read ({_short(error)}): look at the mode of {path}"), None
    return judge(theirs, path, me) if theirs else Verdict(False), theirs


def _said(path: Path, theirs: Holder | None, verdict: Verdict) -> str:
    """The holder that a contender waits for and, if its state is unknown, what a person can do."""
    name = describe(theirs) if theirs else "somebody"
    if verdict.alive:
        return name
    return f"{name} ({verdict.why}; if it is gone, release the run: touch {_released(path)})"


def _path(folder: Path, number: int) -> Path:
    return folder / f"{number:06d}.json"


def _released(path: Path) -> Path:
    """The file that releases a claim: written by its holder, or by a person who knows that the holder is gone."""
    return path.with_suffix(".released")


def _newest(folder: Path) -> Path | None:
    return max(folder.glob("[0-9]*.json"), default=None)


def _read(path: Path) -> Holder | None:
    """A claim; None where it is gone. Older ones name no user: then it is whose file it is."""
    try:
        owner, found = path.stat().st_uid, read(Holder, path)
    except FileNotFoundError:
        return None
    return found if found.user else replace(found, user=_user(owner))


def _known(path: Path | None) -> Holder | None:
    try:
        return _read(path) if path else None
    except (OSError, ValueError):
        return None


def _is_locked(path: Path) -> bool:
    try:
        stream = path.open("r+b")
    except PermissionError:  # of another user; enough for a lock on most file systems
        stream = path.open("rb")
    with stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _no_lock(path: Path, error: OSError) -> str:
    tried = f"its lock can't be tried: {_short(error)}"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EBADF, errno.EROFS):
        return f"{tried}; that needs write permission for {path}"
    return f"{tried}; mount the store's file system with locks (Lustre: option `flock`)"


@functools.cache
def _machine() -> str | None:
    """This boot of this machine, and its PID namespace: a process number is only valid within both."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"  # noqa: PTH115
    except OSError:
        return None


def _own_cluster() -> str | None:
    try:
        return cluster().cluster()
    except UnreachableError:
        return None


@functools.cache
def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _short(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def _forget(folder: Path, number: int) -> None:
    for path in folder.glob("[0-9]*"):
        if int(path.stem) <= number - KEPT:
            path.unlink(missing_ok=True)
