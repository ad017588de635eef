"""Watches ranks until they have ended, stops them in order if there is a reason, and kills them if they hang.

`Watch` is the mechanism, which calls functions; `watch_of` provides the supervisor's functions and reasons.
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
from megaboa.records import Found, LeftOut, LossSpike, Step, read
from megaboa.run import checkpoints, ledger, progress, recovery, shared_store
from megaboa.run.announce import progress_reporter
from megaboa.run.call import Call
from megaboa.run.command import checks_network
from megaboa.run.lives import Signals
from megaboa.run.stragglers import Stragglers
from megaboa.run.verification import Reading
from megaboa.scheduler.ranks import Ended, Ranks
from megaboa.store_paths import AttemptFolder

POLL_SECONDS = 0.2
ASK_AGAIN_SECONDS = 5.0  # pause before a controller that could not reach the ranks is asked again
LOOK_SECONDS = 1.0  # between two looks for a reason to stop, which read files
HICCUP_SECONDS = 600.0  # that the file system may fail for
STACKS_SECONDS = 5.0  # for the stacks to reach the logs, and for both looks of the flight recorder
BYTES_PER_STEP = 1000  # a generous estimate for steps.jsonl
STEPS_BETWEEN_POLLS = 500  # more steps than are ever done between two polls
HEAD_BYTES = 4 << 20  # of a rank's log, where NCCL names its network
UNNAMED_SECONDS = 60.0  # after the first step, for other nodes' logs to become visible here
REQUEUE_SECONDS = 20.0  # part of the wall time reserved for telling the scheduler


@dataclass(frozen=True)
class Watched:
    ended: Ended
    reason: Cause | None  # why the watcher ended the ranks; None if they ended by themselves
    evidence: str = ""


@dataclass
class Watch:
    """Watches running ranks. Every check is a function of the supervisor's."""

    signals: Signals
    silence: Callable[[], tuple[float, float]]  # seconds since the ranks' last sign of life, and the limit
    stop_seconds: Callable[[Cause], float]  # that ranks get to save and end
    stop_now: Callable[[], tuple[Cause, str] | None]  # a reason for an orderly stop: wall time, a user, a loss spike
    each_poll: Callable[[], None] = lambda: None
    leave_word: Callable[[], None] = lambda: None  # leaves a file for the ranks, in case no signal reaches them

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
                except OSError:  # a hiccup of the file system is no reason to end healthy ranks
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
            return "cancelled", self.signals.first
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
            # Both ways are tried until each has worked once: the controller may not answer, and the disk may be full.
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
        if (ended := ranks.poll()) is not None:  # asking may have taken longer than the ranks' time
            return ended
        ranks.kill()  # the ranks don't react, or the user is in a hurry
        return Ended(returncode=-signal.SIGKILL)


class TakenNetwork:
    """The network that NCCL chose between nodes, from the log of each node's first rank."""

    def __init__(self, call: Call, target: AttemptFolder):
        folder, launch = call.folder, call.folder.launch
        self.wanted, self.say, self._target = launch.start.network, call.say, target
        self._environment = launch.start.environment
        self._stepped: float | None = None  # when the first step was seen
        asked = range(0, folder.run.world_size, launch.gpus_per_node) if checks_network(folder, target) else ()
        self._open = {rank: target.log(rank) for rank in asked}

    def problem(self) -> tuple[Cause, str] | None:
        """A network other than the requested one. Logs are read until each names its network, which NCCL does before
        step 1."""
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
            self._open.clear()  # reading them for the whole attempt would burden the file system
            silent = " and ".join(networks.silenced_by({**os.environ, **self._environment}))
            why = f": this site or launch.environment sets {silent}" if silent else ""
            self.say(
                f"WARNING: launch.network: {self.wanted} could not be checked, as NCCL hasn't said which network it "
                f"takes{why}"
            )
        return None

    def _is_late(self) -> bool:
        """Whether it is too late for a network's name: if a log has one at all, it precedes the rank's first step."""
        if self._stepped is None and progress.has_steps(self._target):
            self._stepped = time.monotonic()
        return self._stepped is not None and time.monotonic() - self._stepped > UNNAMED_SECONDS


def _head(log: Path) -> str:
    with log.open("rb") as stream:
        return stream.read(HEAD_BYTES).decode(errors="replace")


def watch_of(
    call: Call, target: AttemptFolder, stand_by: Callable[[], None] = lambda: None, reading: Reading | None = None
) -> Watch:
    """The supervisor's watch. `stand_by`: called repeatedly after the first step, to prepare the next attempt.
    `reading`: the verification that ranks wait for before they load."""
    report = progress_reporter(call.payload, call.say, call.site.job is not None)
    keep = checkpoints.keeper(call.payload.checkpoints, call.resumption.verifies, **call.resumption.retention)

    taken, slow = TakenNetwork(call, target), Stragglers(call, target)
    written, since, given = None, time.monotonic(), False

    def silence() -> tuple[float, float]:
        """Measured by this process's own clock, because the file server's may differ."""
        nonlocal written, since
        seen = target.steps.stat().st_mtime_ns if progress.has_steps(target) else None
        if seen != written or (reading and reading.goes_on):
            written, since = seen, time.monotonic()
        settings = call.recovery
        minutes = settings.start_minutes if written is None else settings.no_progress_minutes
        return time.monotonic() - since, 60 * minutes

    def each_poll() -> None:
        nonlocal given
        report()
        if written is not None and progress.has_steps(target):  # no rank needs the processors to start any more
            stand_by()
            if not given:  # ranks have made their files
                shared_store.give(call.payload, target)
                given = True
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
        return "stopped", "by `megaboa stop`"
    if spike := _spike(call, target):
        return "loss_spike", f"the loss of steps {spike[0]} to {spike[1]} is far above what it was"
    end = call.site.deadline()
    if end is None:
        return None
    job = call.site.job
    left, wall_time = end - call.site.now(), end - (job.start if job and job.start else call.began)
    if left > wall_time / 2:  # no lead is longer, so no file needs to be read
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
    """Seconds of the slowest save. A background save's own event won't do: it only says how long the ranks were
    blocked."""
    if not background:
        return progress.slowest_save(call.payload)
    return progress.slowest_background_save(call.payload, checkpoints.completed_at(call.payload.checkpoints))


def _saves_in_background(call: Call) -> bool:
    """Whether ranks save in the background, as they found it: the default depends on their installation."""
    return call.payload.found.exists() and read(Found, call.payload.found).async_save


def _patience(call: Call, reason: Cause) -> float:
    """Seconds that ranks get to save; at the end of the wall time, all that is left of it."""
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
    """First and last step of the first spike: at least `patience` consecutive losses above `factor` times the median
    before.

    All steps are checked, because several may have been done since the last poll.
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
    """Go back to the checkpoint before a spike, and skip the spike's batches from now on."""
    found = _spike(call, target)
    if found is None:
        return
    ledger.append(call.payload.ledger, LeftOut(steps=found))
    for iteration in checkpoints.complete_iterations(call.payload.checkpoints):
        if iteration >= found[0]:
            call.resumption.set_aside(iteration, f"a loss spike began at step {found[0]}")
    call.say(f"skips the batches of steps {found[0]} to {found[1]}")
