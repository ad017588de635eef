"""For all tests: processes that they start find the library as they do themselves."""

import os
from pathlib import Path

import pytest
from hypothesis import settings

os.environ["PYTHONPATH"] = str(Path(__file__).parents[1] / "workflow" / "scripts")

settings.register_profile("unhurried", deadline=None)  # a machine may be busy with something else
settings.load_profile("unhurried")


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
