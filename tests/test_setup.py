"""envs/setup.sh, where it must give up: one sentence each."""

import os
import subprocess
import sys
from pathlib import Path

SETUP = Path(__file__).parents[1] / "envs" / "setup.sh"


def setup(folder, **environment):
    done = subprocess.run(
        [SETUP, folder], env={**os.environ, **environment}, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 1 and done.stdout == ""
    assert not folder.exists()
    (sentence,) = done.stderr.splitlines()
    return sentence


def test_a_missing_python(tmp_path):
    said = setup(tmp_path / "venv", PYTHON="python3.99")
    assert "needs Python 3.12" in said and "python3.99" in said and "make run PYTHON=" in said


def test_another_version_of_python(tmp_path):
    old = tmp_path / "python3.12"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    assert "needs Python 3.12" in setup(tmp_path / "venv", PYTHON=str(old))


def test_a_full_disk(tmp_path):
    df = tmp_path / "df"  # a disk of 3 GB can't be had everywhere
    df.write_text("#!/bin/sh\nprintf 'head\\n/dev/x 1 1 3145728 1%% /\\n'\n")
    df.chmod(0o755)
    said = setup(tmp_path / "venv", PYTHON=sys.executable, PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert "needs 8 GB of disk" in said and "3 GB free" in said
