"""What files of tests cost: `python benchmarks/tests_time.py tests/e2e/test_export.py ...`, one after the other.

Seconds of a processor, user and system, of pytest and of everything that it starts: daemons of clusters, and processes
that outlive their parents for a while. These come back to this process when their parents end, which then waits for
them. On a busy machine take these; seconds of the clock depend on what else runs.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import subprocess
import sys
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
LEFT_SECONDS = 60.0  # wait for leftovers: the parent process of forked ranks idles half as long
_PR_SET_CHILD_SUBREAPER = 36


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", metavar="FILE")
    parser.add_argument("--tests", metavar="EXPRESSION", default="slow", help="pytest's -m; default: slow")
    arguments = parser.parse_args()
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    failed = False
    for name in arguments.files:
        wall, user, system, summary, code = measure(name, arguments.tests)
        failed |= code != 0
        print(f"{name:48} {user + system:8.1f} CPU s ({user:.1f} + {system:.1f}) {wall:8.1f} s  {summary}", flush=True)
    sys.exit(failed)


def measure(name: str, tests: str) -> tuple[float, float, float, str, int]:
    before, began = os.times(), time.monotonic()
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-m", tests, name]
    done = subprocess.run(words, cwd=REPOSITORY, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    wall = time.monotonic() - began
    wait_for_the_rest()
    after = os.times()
    if done.returncode:
        print(done.stdout[-20000:], file=sys.stderr)
    summary = re.findall(r"^=* ?(\d+ \w+.* in .*?)=*$", done.stdout, re.MULTILINE)
    user, system = after.children_user - before.children_user, after.children_system - before.children_system
    return wall, user, system, summary[-1].strip() if summary else f"ended with {done.returncode}", done.returncode


def wait_for_the_rest() -> None:
    deadline = time.monotonic() + LEFT_SECONDS
    while time.monotonic() < deadline:
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.2)
        except ChildProcessError:
            return


if __name__ == "__main__":
    main()
