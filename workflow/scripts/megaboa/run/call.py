"""One life of the supervisor, and how it ends before the run does."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from megaboa.paths import RunFolder, RunStore
from megaboa.records import Event, Recovery, read_ledger
from megaboa.run import checkpoints
from megaboa.run.announce import Say
from megaboa.run.lives import Signals
from megaboa.run.patience import patiently
from megaboa.run.resume import Resumption
from megaboa.run.site import WaitingCheck
from megaboa.scheduler.protocol import Place

RESUMES = "The next call resumes from the newest complete checkpoint."


class TrainingFailed(Exception):
    """The run has stopped before its last step; the message is what the user reads."""


class Interrupted(Exception):
    """A stop of the run was requested."""


class Requeued(Exception):
    """The scheduler starts this job again; until then there is nothing to do."""


@dataclass
class Call:
    """One life of the supervisor."""

    folder: RunFolder
    payload: RunStore
    site: Place
    signals: Signals
    claim: int
    say: Say
    life: int = 1  # of several that its keeper has given it
    healthy: bool = False  # the nodes were looked at since ranks ran on them
    waiting_check: WaitingCheck | None = None  # of the nodes, when these ranks have ended
    unpacked: bool = False  # the image, once for all steps, as far as that could be done
    sound: set[int] = field(default_factory=set)  # checkpoints that were read in this life, and are as they were saved
    began: float = field(default_factory=time.time)

    @functools.cached_property
    def found(self) -> frozenset[int]:
        """Checkpoints that were complete when this life began, as long as it is asked for before ranks start."""
        return frozenset(checkpoints.complete_iterations(self.payload.checkpoints))

    def end_waiting_check(self) -> None:
        if self.waiting_check:
            self.waiting_check.tasks.kill()

    def patiently[Result](self, do: Callable[[], Result]) -> Result:
        return patiently(do, self.say)

    @property
    def recovery(self) -> Recovery:
        return self.folder.launch.recovery

    @property
    def resumption(self) -> Resumption:
        return Resumption(self.folder, self.payload, self.say)

    @property
    def entries(self) -> list[Event]:
        return read_ledger(self.payload.ledger)
