"""The supervisor's keeper, which restarts the supervisor if that alone was killed, most likely by the OOM killer.

The keeper does nothing else. It is small, so the kernel kills it last. It inherits a killed supervisor's children, so
that none of them runs alongside the ranks of the next life. `Signals` collects the supervisor's signals, including
those that the keeper passes on.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from megaboa.scheduler.ranks import HELD

LIVES = 5  # per call, or per life of its job
GONE_SECONDS = 30.0
POLL_SECONDS = 0.1
ZYGOTE = b"megaboa.bridge.zygote"  # not counted as an orphan: it serves others too, and ends by itself
_PR_SET_CHILD_SUBREAPER = 36
PASSED_ON = signal.SIGUSR1  # sent to the supervisor for every signal that the keeper receives


def kept(work: Callable[[int], int]) -> int:
    """Run `work(life)` in a child process, and again whenever that is killed by SIGKILL; return its exit code."""
    _inherit_orphans()
    heard: list[int] = []
    child = None

    def pass_on(number: int, frame: object) -> None:
        heard.append(number)
        if child:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, PASSED_ON)

    numbers = [number for number in Signals.numbers if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, pass_on) for number in numbers}
    try:
        for life in range(1, LIVES + 1):
            signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
            if heard:
                return 128 + heard[0]
            alive, held = os.pipe()
            child = os.fork()
            if not child:
                os.close(alive)
                os.environ[HELD] = str(held)
                for number, handler in {**before, PASSED_ON: signal.default_int_handler}.items():
                    signal.signal(number, handler)
                signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
                _live(work, life)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
            os.close(held)
            code = _wait(child)
            if code != -signal.SIGKILL or heard:
                os.close(alive)
                break
            print(f"megaboa: the supervisor was killed in life {life} of {LIVES}", file=sys.stderr, flush=True)
            _end_orphans()
            os.read(alive, 1)  # returns once all forked ranks, which hold the other end, have ended
            os.close(alive)
        return code if code >= 0 else 128 - code
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
        for number, handler in before.items():
            signal.signal(number, handler)


def _live(work: Callable[[int], int], life: int) -> None:
    code = 1
    try:
        code = work(life)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        with contextlib.suppress(OSError):
            sys.stderr.flush()
        os._exit(code)


def _wait(child: int) -> int:
    """The child's exit code, or minus the signal that ended it; orphans that end in the meantime are reaped.

    It polls, because a signal that arrives just before a blocking wait would only be passed on after it.
    """
    while True:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == child:
            return os.waitstatus_to_exitcode(status)
        if not pid:
            time.sleep(POLL_SECONDS)


def _inherit_orphans() -> None:
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _end_orphans() -> None:
    """End the processes that a killed supervisor left behind, and wait for them.

    Ranks on this machine die with their supervisor, but a scheduler's launcher lives on, and ends its ranks when asked
    to. A process that the kernel can't end yet (its file system hangs) may still write to the store, so it is waited
    for.
    """
    began, asked, said = time.monotonic(), set(), False
    while orphans := _children():
        late = time.monotonic() - began > GONE_SECONDS
        if late and not said:
            said = True
            numbers = ", ".join(map(str, sorted(orphans)))
            print(f"megaboa: waits for what it left behind to end: process {numbers}", file=sys.stderr, flush=True)
        for pid in orphans:
            with contextlib.suppress(ProcessLookupError):
                if late or pid not in asked:
                    os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)
        asked |= orphans
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(POLL_SECONDS)


def _children() -> set[int]:
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            pid, rest = path.read_text().split(" ", 1)
            ours = int(rest.rsplit(")", 1)[1].split()[1]) == os.getpid()
            if ours and ZYGOTE not in path.with_name("cmdline").read_bytes():
                found.add(int(pid))
    return found


@dataclass
class Signals:
    """Collects SIGTERM, SIGINT and SIGHUP for the watcher, which acts on them.

    A context manager: outside of it, signals have their previous effect. Terminals and schedulers signal all processes
    of a job, so a signal that also comes from the keeper is counted once.
    """

    seen: list[str] = field(default_factory=list)
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

    def __enter__(self) -> Signals:
        times = {"own": 0, "passed on": 0}

        def note(number: int, frame: object) -> None:
            whose, name = "own", signal.Signals(number).name
            if number == PASSED_ON:
                whose, name = "passed on", "a signal that its keeper got"
            times[whose] += 1
            if times[whose] > len(self.seen):
                self.seen.append(name)

        self._before = {number: signal.signal(number, note) for number in (*self.numbers, PASSED_ON)}
        return self

    @property
    def first(self) -> str:
        """The first signal, in words for the user who may have sent it."""
        return {"SIGINT": "Ctrl-C (SIGINT)"}.get(self.seen[0], self.seen[0])

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
