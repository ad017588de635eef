"""Files of mode 0 as ordinary users see them: root, who may read all, becomes one for a while."""

import contextlib
import os
import stat
import tempfile
from pathlib import Path

import pytest

NOBODY = 65534


@contextlib.contextmanager
def as_ordinary_user(folder):
    """For root, the folders that pytest has made above it are open to others until the end."""
    if os.geteuid() != 0:
        yield
        return
    base, modes = Path(tempfile.gettempdir()), {}
    for path in (folder, *folder.parents):
        if path == base or base not in path.parents:
            break
        modes[path] = stat.S_IMODE(path.stat().st_mode)
        path.chmod(modes[path] | 0o555)
    os.seteuid(NOBODY)
    try:
        if not os.access(folder, os.R_OK | os.X_OK, effective_ids=True):
            pytest.skip(f"others can't reach {base}")
        yield
    finally:
        os.seteuid(0)
        for path, mode in modes.items():
            path.chmod(mode)
