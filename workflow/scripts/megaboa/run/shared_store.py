"""A run in a store that a group shares: whoever trains it next can use what ranks and schedulers have written.

They write with the umask of whoever trains.
"""

from __future__ import annotations

import contextlib
import errno
import os

from megaboa import files
from megaboa.store_paths import AttemptFolder, RunStore

# Bridge's own. Each save copies into one of them with `shutil.copy`, which also sets the mode, as only its owner may.
# Nobody needs them: ranks are told which checkpoint to load.
TRACKERS = "latest_*"


def give(payload: RunStore, target: AttemptFolder) -> None:
    """Give the group what an attempt has written so far.

    Complete checkpoints have it already (`checkpoints.mark_complete`), and may be many files.
    """
    with contextlib.suppress(OSError):
        for path in (*payload.path.iterdir(), *payload.checkpoints.glob("*")):
            files.share(path)
    for folder in (target.path, payload.index_cache):
        files.share_all(folder)


def take(payload: RunStore, own_index: bool) -> None:
    """Make the folders that ranks write in, and remove what they could not overwrite or read there.

    A killed attempt has given nothing. Raises PermissionError where ranks would fail, before they train.
    `own_index`: whether ranks make their index themselves.
    """
    for folder in (payload.checkpoints, *([payload.index_cache] if own_index else [])):
        files.make_folder(folder)
        if not os.access(folder, os.R_OK | os.W_OK | os.X_OK, effective_ids=True):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
    for path in payload.checkpoints.glob(TRACKERS):
        if path.stat().st_uid != os.geteuid():
            path.unlink()
    for path in payload.index_cache.glob("*") if own_index else ():
        if not os.access(path, os.R_OK, effective_ids=True):
            path.unlink()
