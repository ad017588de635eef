"""The driver's libraries for machines without one: compiled from C, and found as the real ones are."""

import shutil
import subprocess
from pathlib import Path

import pytest

GPUS = 2


def nvml_stand_in(folder: Path) -> dict[str, str]:
    """What a process needs in its environment to find it, as with the others."""
    return _compiled(folder / "libnvidia-ml.so.1", "nvml_stand_in.c")


def cuda_stand_in(folder: Path) -> dict[str, str]:
    return _compiled(folder / "libcuda.so.1", "cuda_stand_in.c")


def _compiled(target: Path, source: str) -> dict[str, str]:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    flags = ["-shared", "-fPIC", "-Wall", "-Werror"]
    subprocess.run([compiler, *flags, "-o", str(target), str(Path(__file__).with_name(source))], check=True)
    return {"LD_LIBRARY_PATH": str(target.parent)}
