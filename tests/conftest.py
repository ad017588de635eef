"""For all tests: processes that they start find the library as they do themselves, and compile it once."""

import gc
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import settings

from megaboa.check import calibration

os.environ["PYTHONPATH"] = str(Path(__file__).parents[1] / "workflow" / "scripts")

# Python keeps what it compiles, whatever the shell says: else every process that a test starts would compile our
# modules, and every worker hypothesis, which pytest rewrites.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A `make` that a test starts is no part of the `make test` that started the tests.
for name in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS"):
    os.environ.pop(name, None)

# A shell lets what it starts in the background ignore Ctrl-C, and so would all that the tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# What `megaboa calibrate` has measured in this clone is not the tests': they take the shipped calibrations.
calibration.FOLDER = Path("calibrations-that-no-test-reads")

ALL_SLOW = re.compile(r"^pytestmark = \[?pytest\.mark\.slow\b", re.MULTILINE)

BACKEND = "tests/bridge/cpu"
# So that none of them is alone at the end.
LONGEST = (BACKEND, "tests/run/test_supervisor.py", "tests/report/test_page.py", "tests/observe/logs/test_log_fuzz.py")

settings.register_profile("unhurried", deadline=None)  # a machine may be busy with something else
settings.load_profile("unhurried")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """For fast tests no file is imported that has none: some import torch and Bridge."""
    if config.option.markexpr != "not slow" or not collection_path.match("test_*.py"):
        return None
    return bool(ALL_SLOW.search(collection_path.read_text(encoding="utf-8"))) or None


def pytest_collection_finish() -> None:
    """What is imported by now stays: the garbage collector need not look through torch again and again."""
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """A file at a time, as `--dist loadfile`, in the order of collection but the longest files first.

    Those of the CPU backend go together: each worker that has one imports Bridge once.
    """
    from xdist.scheduler.loadfile import LoadFileScheduling

    class LongestFirst(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return BACKEND if file.startswith(BACKEND) else file

    if config.getvalue("dist") != "loadfile":
        return None
    config.option.loadscopereorder = False  # by the number of tests, which says nothing about their time
    return LongestFirst(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        return next((number for number, name in enumerate(LONGEST) if item.nodeid.startswith(name)), len(LONGEST))

    items.sort(key=place)


@pytest.fixture
def small_disk(tmp_path):
    """A function that gives a disk of so many megabytes, or makes it larger."""
    place = tmp_path / "disk"
    place.mkdir()

    def size(megabytes):
        remount = ["-o", "remount"] if place.is_mount() else []
        call = ["mount", "-t", "tmpfs", *remount, "-o", f"size={megabytes}m", "tmpfs", str(place)]
        if os.getuid() != 0 or subprocess.run(call, capture_output=True).returncode != 0:
            pytest.skip("no tmpfs can be mounted here")
        return place

    yield size
    if place.is_mount():
        subprocess.run(["umount", "--lazy", str(place)], check=True)  # a traceback may hold files


@pytest.fixture(autouse=True)
def a_new_process_for_slurm(monkeypatch):
    """A command that only looks asks a silent controller once in its process, which tests share."""
    from megaboa.scheduler.slurm import queries

    monkeypatch.setattr(queries, "_policy", queries._QueryPolicy())


@pytest.fixture
def fake_command(tmp_path, monkeypatch):
    """Put programs of our own before all others on PATH: `fake_command("squeue", "echo 1 RUNNING")`."""
    folder = tmp_path / "fake-commands"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    def install(name, script):
        path = folder / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return path

    return install


@pytest.fixture
def unreachable_slurm(fake_command):
    """SLURM's programs answer as they do while the controller is restarted."""
    for name in ("squeue", "scontrol", "sinfo", "scancel"):
        script = "echo 'slurm_load_jobs error: Unable to contact slurm controller (connect failure)' >&2; exit 1"
        fake_command(name, script)
