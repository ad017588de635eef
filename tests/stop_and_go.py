"""Slows a process down for real: it stands still for some seconds and runs for some, again and again, until it is gone.

    stop_and_go.py PID STANDS RUNS [until-closed]

One process: a shell would start another one for every signal, and take a processor away from all.
"""

import contextlib
import os
import select
import signal
import sys
import time


def main() -> None:
    process, stands, runs = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
    # A process that slows itself down closes our stdin, which it can't while it stands still.
    until = [sys.stdin] if sys.argv[4:] else []
    with contextlib.suppress(OSError):  # of root: on a busy machine it would wake too late to stop anything
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    with contextlib.suppress(ProcessLookupError):
        while not select.select(until, [], [], runs)[0]:
            os.kill(process, signal.SIGSTOP)
            time.sleep(stands)
            os.kill(process, signal.SIGCONT)


if __name__ == "__main__":
    main()
