"""Waiting for a file system that fails for a while: a full disk, a file server that is restarted."""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Callable
from pathlib import Path

from megaboa import files

PATIENCE_SECONDS, AGAIN_SECONDS = 600.0, 5.0
FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
# Errors that waiting doesn't fix. All else may be a file server that is restarted (EIO, ESTALE, ESHUTDOWN, ETIMEDOUT,
# ...).
LASTING = frozenset(
    {errno.ENOENT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.EEXIST}
    | {errno.ELOOP, errno.ENAMETOOLONG, errno.EINVAL, errno.EXDEV, errno.ENOTEMPTY}
)
PROBE_BYTES = 1 << 20  # more than is left in a file's last block


def patiently[Result](do: Callable[[], Result], say: Callable[[str], None] = lambda text: None) -> Result:
    """Do it again until it succeeds: what may be done in part, and again."""
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
    """Whether the same may succeed later."""
    return error.errno is not None and error.errno not in LASTING


def full(folder: Path) -> str | None:
    """What a write into this folder says, where nothing can be written because there is no room for it."""
    probe = folder / "is-there-room"
    try:
        files.write_bytes(probe, bytes(PROBE_BYTES))
    except OSError as error:
        return str(error) if error.errno in FULL else None
    finally:
        with contextlib.suppress(OSError):
            probe.unlink(missing_ok=True)
    return None
