"""Watching ranks until they have ended: stopping them in order when there is a reason, killing them when they hang."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from megaboa.causes import CAUSES, Cause
from megaboa.launch.ranks import Ended, Ranks

POLL_SECONDS = 0.2
ASK_AGAIN_SECONDS = 5.0  # that a controller is left alone which could not tell the ranks
LOOK_SECONDS = 1.0  # between two looks for a reason to stop, which read files
HICCUP_SECONDS = 600.0  # that the file system may fail
STACKS_SECONDS = 3.0  # for the stacks to reach the logs


# By which the supervisor's keeper passes on each signal that it gets itself (run/lives.py).
PASSED_ON = signal.SIGUSR1


@dataclass
class Signals:
    """SIGTERM, SIGINT and SIGHUP as facts: they are noted, and the watcher acts on them.

    Used as a context: outside of it the signals do what they did before. A terminal, and SLURM, send theirs to all
    processes: what the keeper passes on is then the same one, and no second.
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

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


@dataclass(frozen=True)
class Watched:
    ended: Ended
    reason: Cause | None  # why the watcher ended them; None where they ended by themselves
    evidence: str = ""


@dataclass
class Watch:
    """What is looked at while ranks run. Every question is a function of the supervisor's."""

    signals: Signals
    silence: Callable[[], tuple[float, float]]  # seconds since the ranks last did something, and how many are too many
    stop_seconds: Callable[[Cause], float]  # that ranks are given to save and end
    stop_now: Callable[[], tuple[Cause, str] | None]  # a reason to stop them in order: wall time, a user, a loss spike
    each_poll: Callable[[], None] = lambda: None
    leave_word: Callable[[], None] = lambda: None  # where ranks look, in case that no signal reaches them

    def until_ended(self, ranks: Ranks) -> Watched:
        try:
            looked, trouble = 0.0, None
            while (ended := ranks.poll()) is None:
                try:
                    if self.signals.seen or time.monotonic() - looked > LOOK_SECONDS:
                        looked = time.monotonic()
                        if reason := self._reason():
                            return Watched(self._end(ranks, *reason), *reason)
                    self.each_poll()
                    trouble = None
                except OSError:  # a file system's hiccup is no reason to end healthy ranks
                    trouble = trouble or time.monotonic()
                    if time.monotonic() - trouble > HICCUP_SECONDS:
                        raise
                time.sleep(POLL_SECONDS)
            return Watched(ended, None)
        except BaseException:
            ranks.kill()
            raise

    def _reason(self) -> tuple[Cause, str] | None:
        if self.signals.seen:
            return "cancelled", f"the supervisor got {self.signals.seen[0]}"
        silent, limit = self.silence()
        if silent > limit:
            return "hang", f"no step was done for {silent:.0f} s, and every rank lives"
        return self.stop_now()

    def _end(self, ranks: Ranks, reason: Cause, evidence: str) -> Ended:
        if reason == "hang":
            ranks.dump()
            time.sleep(STACKS_SECONDS)
        if not CAUSES[reason].can_save:
            ranks.kill()
            return Ended(returncode=-signal.SIGKILL)
        began, heard = time.monotonic(), len(self.signals.seen)
        patience = self.stop_seconds(reason)
        told, word_left, asked = False, False, began - ASK_AGAIN_SECONDS
        while time.monotonic() - began < patience and len(self.signals.seen) <= heard:
            # Until one of them succeeds, each in its turn: a controller that doesn't answer, a disk that is full.
            with contextlib.suppress(OSError):
                if not word_left:
                    self.leave_word()
                    word_left = True
            if not told and time.monotonic() - asked >= ASK_AGAIN_SECONDS:
                asked = time.monotonic()
                told = ranks.ask()
            if (ended := ranks.poll()) is not None:
                return ended
            with contextlib.suppress(OSError):
                self.each_poll()
            time.sleep(POLL_SECONDS)
        if (ended := ranks.poll()) is not None:  # asking may have taken longer than their time
            return ended
        ranks.kill()  # they don't hear, or the user is in a hurry
        return Ended(returncode=-signal.SIGKILL)
