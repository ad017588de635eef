"""The GPUs that CUDA shows, by the driver's library (`libcuda.so.1`), for a process that must not open CUDA itself.

The library is there wherever a rank can train; nvidia-smi may be missing in an image, and doesn't know what CUDA hides.
Standard library only: this file is also the program that is asked.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys

LIBRARY = "libcuda.so.1"
SECONDS = 60.0  # drivers start up again for each process if nothing keeps them running, a second for each GPU
# cuda.h
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76


def capabilities() -> list[tuple[int, int]]:
    """Compute capability of each GPU, from a process of its own; none if there is no GPU, or no driver that answers."""
    command = [sys.executable, "-I", "-S", __file__]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=True).stdout
        return [(int(major), int(minor)) for major, minor in map(str.split, said.splitlines())]
    except (OSError, ValueError, subprocess.SubprocessError):
        return []


def main() -> None:
    driver = ctypes.CDLL(LIBRARY)

    def number(function: str, *arguments: int) -> int:
        found = ctypes.c_int()
        if code := getattr(driver, function)(ctypes.byref(found), *arguments):
            sys.exit(f"{function}: error {code}")
        return found.value

    if code := driver.cuInit(0):
        sys.exit(f"cuInit: error {code}")
    for index in range(number("cuDeviceGetCount")):
        gpu = number("cuDeviceGet", index)
        print(*(number("cuDeviceGetAttribute", which, gpu) for which in (_CAPABILITY_MAJOR, _CAPABILITY_MINOR)))


if __name__ == "__main__":
    main()
