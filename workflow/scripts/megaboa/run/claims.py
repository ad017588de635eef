"""One trainer per run: claims name their job, and the scheduler says whether that is alive.

A claim is a numbered file, created by link(2), which succeeds for exactly one contender on any shared file system. The
claim with the highest number is valid until it is released or its holder is dead. So a killed holder needs no unlock,
and nobody takes over from a live one.
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

from megaboa.files import make_folder, touch
from megaboa.records import Holder, read, write
from megaboa.scheduler.answers import UnreachableError
from megaboa.scheduler.protocol import Job
from megaboa.scheduler.registry import cluster
from megaboa.store import is_running

POLL_SECONDS = 5.0
LOCK_POLL_SECONDS = 0.2  # if no scheduler has to be asked
KEPT = 5  # number of claims that are kept


@dataclass(frozen=True)
class Verdict:
    """Whether a claim's holder may still be training; None if unknown. `why`: the reason for not knowing."""

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
    """A description of a holder, with its user and cluster if these differ from ours."""
    user, theirs = holder.user, holder.cluster
    whose = f" of user {user}" if user not in (None, _user(os.geteuid())) else ""
    where = f" on cluster {theirs}" if theirs not in (None, _own_cluster()) else ""
    process = f"process {holder.pid} on host {holder.host}"
    return f"{cluster().name} job {holder.job}{whose}{where} ({process})" if holder.job else f"{process}{whose}"


@contextlib.contextmanager
def held(folder: Path, me: Holder, on_wait: Callable[[str], None] = lambda holder: None) -> Iterator[int]:
    """Hold the run, and yield the claim's number. While another process may hold it, wait, and pass its name to
    `on_wait`."""
    make_folder(folder)
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
            # If this fails, the lock still ends with this process, and the scheduler knows when the job ends.
            with contextlib.suppress(OSError):
                touch(_released(_path(folder, number)))


def newest(folder: Path) -> int:
    path = _newest(folder)
    return int(path.stem) if path else 0


def last_holder(folder: Path) -> Holder | None:
    """The run's present or last holder."""
    return _known(_newest(folder))


def holder(folder: Path) -> Holder | None:
    """The run's present holder according to the files; None if it was released."""
    path = _newest(folder)
    return None if path is None or _released(path).exists() else _known(path)


def is_held(folder: Path) -> bool | None:
    """Whether a live process holds the run; None if unknown."""
    path = _newest(folder)
    return False if path is None or _released(path).exists() else _judge_file(path, None)[0].alive


def trainer(folder: Path) -> str | None:
    """The live process outside of any job that holds the run, in words. No scheduler is asked about jobs."""
    found = holder(folder)
    return describe(found) if found and found.job is None and is_held(folder) else None


def is_of_other_cluster(holder: Holder) -> bool:
    """Whether the holder's job belongs to another cluster; the same number here may be a different job."""
    return holder.job is not None and holder.cluster not in (None, _own_cluster())


def is_of_other_user(holder: Holder) -> bool:
    return holder.user not in (None, _user(os.geteuid()))


def judge(holder: Holder, path: Path, me: Holder | None = None) -> Verdict:
    """Whether a claim's holder may still be training."""
    if holder.job is None:
        return _judge_by_lock(holder, path)
    if me and holder.job == me.job and holder.cluster in (None, me.cluster):
        # An earlier life of our own job is over. Within one life, a second call is another process on the same host.
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
    """Whether the claim's file is locked: a live holder on this host, or on one that shares locks with it, keeps it
    locked."""
    try:
        return Verdict(_is_locked(path))
    except FileNotFoundError:
        return Verdict(False)
    except OSError as error:
        if holder.machine == _machine():
            return Verdict(is_running(holder.pid))
        return Verdict(None, _no_lock(path, error))


def _try(folder: Path, me: Holder) -> tuple[int, IO[bytes]] | _Taken:
    """Take the next claim if the newest one is free; otherwise return its holder."""
    current = _newest(folder)
    if current and not _released(current).exists():
        verdict, theirs = _judge_file(current, me)
        if verdict.alive is not False:
            return _Taken(_said(current, theirs, verdict), bool(theirs and theirs.job))
    number = int(current.stem) + 1 if current else 1
    draft = folder / f".{me.host}.{me.pid}.tmp"
    write(draft, me)
    lock = draft.open("r+b")  # opened for writing, because NFS locks no other files
    # The lock precedes the link, because a visible claim without a lock looks dead. If the file system has no locks,
    # others notice when they try (`_judge_by_lock`).
    with contextlib.suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_EX)
    first = True
    try:
        os.link(draft, _path(folder, number))
    except FileExistsError:
        first = False
    finally:
        draft.unlink()  # removed before another try, which writes it again
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
    """Description of the holder that a contender waits for and, if its state is unknown, how to release the run."""
    name = describe(theirs) if theirs else "somebody"
    if verdict.alive:
        return name
    return f"{name} ({verdict.why}; if it is gone, release the run: touch {_released(path)})"


def _path(folder: Path, number: int) -> Path:
    return folder / f"{number:06d}.json"


def _released(path: Path) -> Path:
    """The file that releases a claim. Its holder writes it, or a person who knows that the holder is gone."""
    return path.with_suffix(".released")


def _newest(folder: Path) -> Path | None:
    return max(folder.glob("[0-9]*.json"), default=None)


def _read(path: Path) -> Holder | None:
    """The holder in a claim; None if the file is gone. Older claims name no user, so the file's owner is taken."""
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
    except PermissionError:  # another user's file; on most file systems reading is enough for a lock
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
    """This boot of this machine, and its PID namespace: process numbers are only unique within both."""
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
