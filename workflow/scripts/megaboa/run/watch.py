"""Watching ranks until they have ended: stopping them in order when there is a reason, killing them when they hang.

`Watch` does that, and asks functions; `watch_of` says what a supervisor looks at, and for which reasons it stops ranks.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaboa.causes import CAUSES, Cause
from megaboa.launch import networks
from megaboa.paths import AttemptFolder
from megaboa.records import Found, LeftOut, LossSpike, Step, read
from megaboa.run import checkpoints, ledger, progress, recovery
from megaboa.run.announce import progress_reporter
from megaboa.run.call import Call
from megaboa.run.command import checks_network
from megaboa.run.lives import Signals
from megaboa.run.stragglers import Stragglers
from megaboa.run.verification import Reading
from megaboa.scheduler.ranks import Ended, Ranks

POLL_SECONDS = 0.2
ASK_AGAIN_SECONDS = 5.0  # that a controller is left alone which could not tell the ranks
LOOK_SECONDS = 1.0  # between two looks for a reason to stop, which read files
HICCUP_SECONDS = 600.0  # that the file system may fail
STACKS_SECONDS = 5.0  # for the stacks to reach the logs, and for both looks of the flight recorder
BYTES_PER_STEP = 1000  # of steps.jsonl, generously
STEPS_BETWEEN_POLLS = 500  # more than are done between two polls
HEAD_BYTES = 4 << 20  # of a rank's log, in which NCCL names its network
UNNAMED_SECONDS = 60.0  # after the first step, for the logs of other nodes to be seen here
REQUEUE_SECONDS = 20.0  # of the wall time are kept for the scheduler to be told


@dataclass(frozen=True)
class Watched:
    ended: Ended
    reason: Cause | None  # why the watcher ended them; None where they ended by themselves
    evidence: str = ""


@dataclass
class Watch:
    """Monitors running ranks. Every check is a function of the supervisor's."""

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
                except OSError:  # a hiccup of the file system is not a reason to end healthy ranks
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
            return "hang", f"no step was done for {silent:.0f} s, and all ranks are alive"
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


class TakenNetwork:
    """The network between nodes that NCCL has taken, by the log of each node's first rank."""

    def __init__(self, call: Call, target: AttemptFolder):
        folder, launch = call.folder, call.folder.launch
        self.wanted, self.say, self._target = launch.start.network, call.say, target
        self._environment = launch.start.environment
        self._stepped: float | None = None  # when a step was seen first
        asked = range(0, folder.run.world_size, launch.gpus_per_node) if checks_network(folder, target) else ()
        self._open = {rank: target.log(rank) for rank in asked}

    def problem(self) -> tuple[Cause, str] | None:
        """Every rank is asked until it has said it, which it does before the first step."""
        for rank, log in list(self._open.items()):
            if not log.exists() or (name := networks.taken(_head(log))) is None:
                continue
            del self._open[rank]
            if not networks.fits(self.wanted, name):
                return "wrong_network", (
                    f"launch.network is {self.wanted}, and NCCL takes {name} on the node of rank {rank} ({log.name} "
                    f"says why); launch.network_check: false trains all the same"
                )
            if not self._open:
                self.say(f"NCCL takes the network {name} between nodes, as launch.network: {self.wanted} wants it")
        if self._open and self._is_late():
            self._open.clear()  # to read them again and again would load the file system for the whole attempt
            silent = " and ".join(networks.silenced_by({**os.environ, **self._environment}))
            why = f": this site or launch.environment sets {silent}" if silent else ""
            self.say(
                f"WARNING: launch.network: {self.wanted} could not be checked, as NCCL hasn't said which network it "
                f"takes{why}"
            )
        return None

    def _is_late(self) -> bool:
        """A rank has said it before its first step, if it says it at all."""
        if self._stepped is None and progress.has_steps(self._target):
            self._stepped = time.monotonic()
        return self._stepped is not None and time.monotonic() - self._stepped > UNNAMED_SECONDS


def _head(log: Path) -> str:
    with log.open("rb") as stream:
        return stream.read(HEAD_BYTES).decode(errors="replace")


def watch_of(
    call: Call, target: AttemptFolder, stand_by: Callable[[], None] = lambda: None, reading: Reading | None = None
) -> Watch:
    """`stand_by`: called again and again from the first step on, to prepare the next attempt. `reading`: what the ranks
    wait for before they load."""
    report = progress_reporter(call.payload, call.say, call.site.job is not None)
    keep = checkpoints.keeper(call.payload.checkpoints, call.resumption.verifies, **call.resumption.retention)

    taken, slow = TakenNetwork(call, target), Stragglers(call, target)
    written, since = None, time.monotonic()

    def silence() -> tuple[float, float]:
        """By this process's own watch: the file server's clock may be another one than this host's."""
        nonlocal written, since
        seen = target.steps.stat().st_mtime_ns if progress.has_steps(target) else None
        if seen != written or (reading and reading.goes_on):
            written, since = seen, time.monotonic()
        settings = call.recovery
        minutes = settings.start_minutes if written is None else settings.no_progress_minutes
        return time.monotonic() - since, 60 * minutes

    def each_poll() -> None:
        report()
        if written is not None and progress.has_steps(target):  # then nobody waits for the processors
            stand_by()
        keep()

    return Watch(
        call.signals,
        silence,
        lambda reason: _patience(call, reason),
        lambda: (reading and reading.problem()) or taken.problem() or _reason_to_stop(call, target) or slow.reason(),
        each_poll,
        target.stop_now.touch,
    )


def _reason_to_stop(call: Call, target: AttemptFolder) -> tuple[Any, str] | None:
    if call.payload.stop.exists():
        return "stopped", "the user asked for it"
    if spike := _spike(call, target):
        return "loss_spike", f"the loss of steps {spike[0]} to {spike[1]} is far above what it was"
    end = call.site.deadline()
    if end is None:
        return None
    job = call.site.job
    left, wall_time = end - call.site.now(), end - (job.start if job and job.start else call.began)
    if left > wall_time / 2:  # no lead is longer, and files need not be read
        return None
    background = _saves_in_background(call)
    save = _slowest_save(call, background)
    minutes = call.recovery.lead_minutes
    lead = recovery.lead_seconds(
        save,
        progress.seconds_per_step(target),
        wall_time,
        background=background,
        unsaved=ledger.links_without_save(call.entries),
        asked=None if minutes is None else 60 * minutes,
    )
    if left > lead:
        return None
    measured = f"a save took {save:.0f} s at most" if save is not None else "no save has been measured yet"
    return "time_limit", f"{max(left, 0):.0f} s of the wall time are left, {measured}"


def _slowest_save(call: Call, background: bool) -> float | None:
    """Of one in the background its own event tells nothing: only how long it kept the ranks."""
    if not background:
        return progress.slowest_save(call.payload)
    return progress.slowest_background_save(call.payload, checkpoints.completed_at(call.payload.checkpoints))


def _saves_in_background(call: Call) -> bool:
    """As the ranks found it: by default it depends on what is installed where they run."""
    return call.payload.found.exists() and read(Found, call.payload.found).async_save


def _patience(call: Call, reason: Cause) -> float:
    """Seconds that ranks are given to save: at the end of the wall time all that is left of it."""
    end = call.site.deadline()
    if reason != "time_limit" or end is None:
        return call.recovery.stop_seconds
    return max(end - call.site.now() - REQUEUE_SECONDS, 0.0)


def _spike(call: Call, target: AttemptFolder) -> tuple[int, int] | None:
    settings = call.recovery.loss_spike
    if not settings:
        return None
    size = BYTES_PER_STEP * (settings.window + settings.patience + STEPS_BETWEEN_POLLS)
    recent = [event for event in progress.read_tail(target.steps, size) if isinstance(event, Step)]
    return find_spike(recent, settings)


def find_spike(steps: Sequence[Step], settings: LossSpike) -> tuple[int, int] | None:
    """First and last step of the first spike: at least `patience` losses in a row above the median before them.

    Checks all steps, not only the newest: several may have been done since the last poll.
    """
    patience, window = settings.patience, settings.window
    losses = [(step.step, step.loss) for step in steps if step.loss is not None]
    for start in range(window, len(losses) - patience + 1):
        limit = settings.factor * statistics.median(loss for _, loss in losses[start - window : start])
        high = list(itertools.takewhile(lambda entry, limit=limit: entry[1] > limit, losses[start:]))
        if len(high) >= patience:
            return high[0][0], high[-1][0]
    return None


def leave_out(call: Call, target: AttemptFolder) -> None:
    """Go back to the checkpoint before a spike, and leave its batches out from now on."""
    found = _spike(call, target)
    if found is None:
        return
    ledger.append(call.payload.ledger, LeftOut(steps=found))
    for iteration in checkpoints.complete_iterations(call.payload.checkpoints):
        if iteration >= found[0]:
            call.resumption.set_aside(iteration, f"a loss spike began at step {found[0]}")
    call.say(f"skips the batches of steps {found[0]} to {found[1]}")
