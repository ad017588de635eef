"""A driver's library for machines without one: compiled from nvml_stand_in.c, and found as the real one is."""

import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("nvml_stand_in.c")
GPUS = 2


def stand_in(folder: Path) -> dict[str, str]:
    """What a process needs in its environment to find it."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    target = folder / "libnvidia-ml.so.1"
    flags = ["-shared", "-fPIC", "-Wall", "-Werror"]
    subprocess.run([compiler, *flags, "-o", str(target), str(SOURCE)], check=True)
    return {"LD_LIBRARY_PATH": str(folder)}
