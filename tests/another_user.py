"""Files as somebody sees them who may not read them all: root, who may, plays another user for a while."""

import contextlib
import os
from pathlib import Path

import pytest

NOBODY = 65534
only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")


@contextlib.contextmanager
def as_another_user(folder):
    """Who may look at the folder, and at no file in it that isn't open to all."""
    for path in (folder, *folder.parents):
        if path != Path("/") and path.owner() == "root":
            path.chmod(path.stat().st_mode | 0o555)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
