"""The response to an attempt that ended before the last step: a pure function of the ledger and the settings.

Also the use of a job's wall time: when ranks are asked to save, and how many jobs a run needs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megaboa.causes import CAUSES, FREE, REPEATABLE, Action, Cause
from megaboa.records import Event, LeftOut, Recovery
from megaboa.run import ledger

LONGEST_PAUSE = 600.0
IDLE_LINKS = 3  # number of consecutive jobs without a new checkpoint after which a chain is stopped
# Lead before the end of the wall time: one and a half times the slowest save, two steps, and this margin for ranks to
# end and the scheduler to be told.
MARGIN_SECONDS = 30.0
# Used until a save has been measured.
UNMEASURED_SHARE, UNMEASURED_SECONDS = 0.1, 300.0
UNITS = {"m": 60, "h": 3600, "d": 86_400}


@dataclass(frozen=True)
class Decision:
    action: Action
    why: str
    pause: float = 0.0
    poisoned: bool = False


def decide(
    entries: Sequence[Event], cause: Cause, settings: Recovery, can_requeue: bool, replaceable: bool = False
) -> Decision:
    """The response to the end in the last line of `entries`.

    `replaceable`: the job has spares for the nodes to blame.
    """
    wanted = settings.actions.get(cause, CAUSES[cause].action)
    named = cause.replace("_", " ")
    if wanted == "stop":
        return Decision("stop", f"{named} is not tried again")
    step = ledger.fails_again_at(entries)
    if step is not None and cause in REPEATABLE and cause not in settings.actions:
        wanted = settings.actions.get("poisoned", CAUSES["poisoned"].action)
        if wanted == "stop":
            return Decision("stop", f"step {step} failed twice in a row", poisoned=True)
    if cause == "time_limit" and (links := ledger.links_without_progress(entries)) >= IDLE_LINKS:
        return Decision(
            "stop", f"{links} jobs in a row ended without a new checkpoint: give resources.runtime more time"
        )
    spikes = sum(isinstance(entry, LeftOut) for entry in entries)
    if cause == "loss_spike" and spikes >= settings.loss_spike.limit:
        return Decision("stop", f"{spikes} loss spikes have been left out already (recovery.loss_spike.limit)")
    count = ledger.failures_in_a_row(entries)
    if cause not in FREE and count > settings.budget:
        return Decision(
            "stop", f"{count} failures in a row without a new checkpoint (recovery.budget is {settings.budget})"
        )
    if replaceable:
        return Decision("resume", f"{named}, and a spare takes over")
    if wanted == "requeue" and not can_requeue:
        return Decision("stop", f"{named}, and this job can't be requeued: call again")
    if wanted == "requeue" or cause in FREE:
        return Decision(wanted, named)
    if count < 2:  # most failures occur only once, and training shouldn't wait
        return Decision(wanted, named)
    doubled = min(count - 2, 60)  # any more would exceed the longest pause anyway
    return Decision(wanted, named, min(settings.backoff_seconds * 2.0**doubled, LONGEST_PAUSE))


def lead_seconds(
    save: float | None,
    step: float | None,
    wall_time: float,
    *,
    background: bool = False,
    unsaved: int = 0,
    asked: float | None = None,
) -> float:
    """Seconds before the end of the wall time at which ranks are asked to save; at most half of the wall time.

    `background`: an earlier save may have to finish first. `unsaved`: number of consecutive jobs whose last save wasn't
    finished in time; each doubles the lead. `asked`: the user's own value, used instead of measurements.
    """
    if asked is not None:
        lead = asked
    elif save is None:
        lead = max(min(UNMEASURED_SHARE * wall_time, UNMEASURED_SECONDS), MARGIN_SECONDS)
    else:
        lead = (2.5 if background else 1.5) * save + 2 * (step or 0.0) + MARGIN_SECONDS
    return min(lead * 2.0 ** min(unsaved, 60), wall_time / 2)


def links(seconds: float, wall_time: float, step: float | None = None, save: float | None = None) -> int:
    """Number of jobs for so many seconds of training. Each job loses the time for its last save.

    `step` and `save`: measured seconds of these, if known.
    """
    return math.ceil(max(seconds, 0) / (wall_time - lead_seconds(save, step, wall_time)))


def wall_seconds(runtime: str) -> int:
    """`resources.runtime` in seconds: `90` and `90m` are minutes, `4h` hours, `2d` days."""
    number, unit = (runtime[:-1], runtime[-1]) if runtime[-1] in UNITS else (runtime, "m")
    return int(number) * UNITS[unit]
