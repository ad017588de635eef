"""The experiment's lock: one call at a time works on an experiment."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import sys
from pathlib import Path
from typing import IO

from megaboa.calls import say
from megaboa.errors import InputError, existing, remedy
from megaboa.store import holder, try_lock

_held: list[IO[str]] = []  # kept open for the life of this process, because they hold locks
_holder: list[str] = []  # description of another process that works on the experiment


def claim_experiment(results: str | Path, looks: bool = False) -> bool:
    """Lock the experiment against other workflow processes until this one ends, however it ends.

    Returns False if another process holds the lock, or if the call only `looks` and the user can't write there, as in
    an archive; its files must not be written then.
    """
    path = Path(results) / ".lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        stream = path.open("a+")
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        if looks:
            return False
        place = existing(Path(error.filename))
        above = place in path.absolute().parents[2:]  # such as a clone: with it all its code would be opened
        whose = "" if above or error.errno == errno.EROFS else remedy(place)
        raise InputError(
            f"{place}: {error.strerror}: this call writes there: give this user the right to it, or call in a copy; "
            f"`snakemake -n` and `megaboa status` only read{whose}"
        ) from None
    if not try_lock(stream):
        _holder.append(f"{results} is being worked on by {holder(stream)}")
        say(f"{_holder[0]}: its files are left as they are")
        return False
    with contextlib.suppress(OSError) if looks else contextlib.nullcontext():  # the disk may be full
        stream.truncate(0)
        stream.write(f"snakemake, process {os.getpid()} on host {socket.gethostname()}")
        stream.flush()
    _held.append(stream)
    return True


def is_elsewhere() -> bool:
    """Whether another process works on the experiment."""
    return bool(_holder)


def require_claim() -> None:
    """Exit if another process works on the experiment. Called before the first job."""
    if is_elsewhere():
        sys.exit(f"{_holder[0]}. Wait for it, or end it, and try again.")
