"""One clone of the repository for every module of tests."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator

import pytest
from clone import Workspace, copy_repository, processes


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workspace]:
    place = Workspace(copy_repository(tmp_path_factory.mktemp("clone")))
    yield place
    for pid in processes("workflow/scripts", cwd=place.path):  # whatever a failed test left
        with contextlib.suppress(ProcessLookupError):  # ranks follow their supervisor
            os.kill(pid, signal.SIGKILL)
