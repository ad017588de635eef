"""Payloads (checkpoints, corpora, models) by identity: `<store>/<kind>/<name>/<first 12 of the identity's SHA-256>`.

A payload folder appears under its final name only when it is complete, so whatever lies there may be used.
Standard library only.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from megaboa.errors import InputError
from megaboa.files import digest, make_folder, share, share_all

ID_LENGTH = 12
_HOLDER = re.compile(r"process (\d+) on host (\S+)$")
KERNELS = (("proc",), ("sys",))  # file systems without files of ours


def folder(store: str | Path, kind: str, name: str, identity: Any) -> Path:
    """The folder of the payload with this identity (any JSON value)."""
    return Path(store) / kind / name / digest(identity)[:ID_LENGTH]


def closed(store: str | Path) -> Path | None:
    """The folder in which this user can't write what belongs into the store; None if all are open."""
    there = Path(store)
    if not there.exists():
        there = next(parent for parent in there.absolute().parents if parent.exists())
    inside = [path for path in Path(store).glob("*") if path.is_dir()]
    return next((path for path in (there, *inside) if not os.access(path, os.W_OK | os.X_OK, effective_ids=True)), None)


def obstacle(store: str | Path) -> str | None:
    """Why there can be no store at this path, whoever writes; None if there is one, or a folder for it."""
    path = Path(store).absolute()
    there = next(one for one in (path, *path.parents) if os.path.lexists(one))
    if there.is_symlink() and not there.exists():
        return f"{there} is a link to {there.readlink()}, which isn't there"
    if not there.is_dir():
        return f"{there} is a file"
    if there.resolve().parts[1:2] in KERNELS:  # the superuser seems to have write access there
        return f"{there} belongs to the kernel, and takes no files"
    return None


@contextlib.contextmanager
def locked(path: str | Path, on_wait: Callable[[str], None] = lambda holder: None) -> Iterator[None]:
    """Hold an exclusive lock on a file.

    The kernel releases it when the process ends, however it ends. If another process holds it, `on_wait` gets its name
    ('process 42 on host n1') and the call waits.
    """
    path = Path(path)
    make_folder(path.parent)
    with path.open("a+") as stream:
        share(path)  # the next user's job opens it for writing, too
        if not try_lock(stream):
            on_wait(holder(stream))
            fcntl.flock(stream, fcntl.LOCK_EX)
        stream.truncate(0)
        stream.write(f"process {os.getpid()} on host {socket.gethostname()}\n")
        stream.flush()
        yield


def try_lock(stream: IO[str]) -> bool:
    """Lock an open file; False if another process holds it. Raises InputError where the file system has no locks."""
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        why = f"can't be locked ({error.strerror})"
        raise InputError(f"{stream.name}: {why}; mount its file system with locks (Lustre: option `flock`)") from None
    return True


def holder(stream: IO[str]) -> str:
    """Who holds the lock on an open file, as far as known. It names who has locked it last, but whoever can open a file
    can lock it."""
    stream.seek(0)
    said = stream.read().strip()
    named = _HOLDER.search(said)
    if not named or named[2] != socket.gethostname() or is_running(int(named[1])):
        return said or "another process"
    return (
        f"another process ({said}, which the lock names, no longer runs here; `fuser -v {stream.name}` shows who holds "
        "it)"
    )


def is_running(pid: int) -> bool:
    """Whether a process of this machine is alive, whoever owns it."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def require(payload: str | Path, manifest: str | Path) -> None:
    """Raise InputError if somebody has removed a payload that a manifest names, e.g. for want of space."""
    if not Path(payload).exists():
        raise InputError(f"{payload} is gone: remove {manifest}, and call again")


@contextlib.contextmanager
def building(
    final: Path, on_wait: Callable[[str], None] = lambda holder: None, part: str = ""
) -> Iterator[Path | None]:
    """Give a fresh folder to build a payload in and move it to `final` at the end; give None if `final` is there, with
    this part of it, which somebody may have removed alone.

    Two jobs that want the same payload wait for each other; what a killed job left half-built is thrown away.
    """
    with locked(final.with_name(f".{final.name}.lock"), on_wait):
        if (final / part).exists():
            yield None
            return
        shutil.rmtree(final, ignore_errors=True)
        partial = final.with_name(f".{final.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        make_folder(partial)
        try:
            yield partial
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        share_all(partial)
        partial.replace(final)
