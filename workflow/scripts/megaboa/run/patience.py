"""Waiting for a file system that fails temporarily: a full disk, or a file server that restarts."""

from __future__ import annotations

import contextlib
import errno
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from megaboa import files
from megaboa.formats import size
from megaboa.run import checkpoints
from megaboa.store_paths import RunStore

PATIENCE_SECONDS, AGAIN_SECONDS = 600.0, 5.0
STILL_FAILED = f"the file system still failed after {PATIENCE_SECONDS / 60:.0f} minutes"
FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
# Errors that waiting doesn't fix. All others may come from a file server that restarts (EIO, ESTALE, ESHUTDOWN,
# ETIMEDOUT ...).
LASTING = frozenset(
    {errno.ENOENT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.EEXIST}
    | {errno.ELOOP, errno.ENAMETOOLONG, errno.EINVAL, errno.EXDEV, errno.ENOTEMPTY}
)
PROBE_BYTES = 1 << 20  # more than may be free in a file's last block


def patiently[Result](do: Callable[[], Result], say: Callable[[str], None] = lambda text: None) -> Result:
    """Repeat an action until it succeeds. It must tolerate repetition, also after a partial failure."""
    deadline, told = time.monotonic() + PATIENCE_SECONDS, False
    while True:
        try:
            return do()
        except OSError as error:
            if not may_pass(error) or time.monotonic() > deadline:
                raise
            if not told:
                told = True
                say(f"waits for the file system, for {PATIENCE_SECONDS / 60:.0f} minutes at most: {error}")
            time.sleep(AGAIN_SECONDS)


def may_pass(error: OSError) -> bool:
    """Whether a repetition may succeed later."""
    return error.errno is not None and error.errno not in LASTING


def lack_of_room(payload: RunStore) -> str | None:
    """What is free on a run's disk, if a checkpoint as large as those so far doesn't fit: None if it does, or no size
    is known."""
    needed, free = max(checkpoints.sizes(payload.checkpoints).values(), default=0), shutil.disk_usage(payload.path).free
    return f"{size(free)} free, a checkpoint needs {size(needed)}" if free < needed else None


def full(folder: Path) -> str | None:
    """The error message if nothing can be written to this folder for lack of space; None otherwise."""
    probe = folder / "is-there-room"
    try:
        files.write_bytes(probe, bytes(PROBE_BYTES))
    except OSError as error:
        return str(error) if error.errno in FULL else None
    finally:
        with contextlib.suppress(OSError):
            probe.unlink(missing_ok=True)
    return None
