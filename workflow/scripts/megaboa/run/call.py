"""One life of the supervisor, and the exceptions that end it before the run's end."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from megaboa.paths import RunFolder
from megaboa.records import Event, Recovery, read_ledger
from megaboa.run import checkpoints
from megaboa.run.announce import Say
from megaboa.run.lives import Signals
from megaboa.run.patience import patiently
from megaboa.run.resume import Resumption
from megaboa.run.site import WaitingCheck
from megaboa.scheduler.protocol import Place
from megaboa.store_paths import RunStore

RESUMES = "The next call resumes from the newest complete checkpoint."


class Stopped(Exception):
    """The run has stopped before its last step; the message is what the user reads.

    `noted`: the progress log has the reason already.
    """

    def __init__(self, text: str, noted: bool = False):
        super().__init__(text)
        self.noted = noted


class TrainingFailed(Stopped):
    """The run has stopped because of a failure."""


class Interrupted(Stopped):
    """A stop of the run was requested."""


class Requeued(Exception):
    """The scheduler will start this job again; nothing is left to do until then."""


@dataclass
class Call:
    """One life of the supervisor."""

    folder: RunFolder
    payload: RunStore
    site: Place
    signals: Signals
    claim: int
    say: Say
    life: int = 1  # number of this life, among those that the keeper has started
    healthy: bool = False  # nodes were checked, and no ranks have run on them since
    waiting_check: WaitingCheck | None = None  # stands by to check the nodes when these ranks have ended
    unpacked: bool = False  # unpacking the image once for all steps was tried, and may have failed
    sound: set[int] = field(default_factory=set)  # checkpoints verified in this life
    began: float = field(default_factory=time.time)

    @functools.cached_property
    def found(self) -> frozenset[int]:
        """Checkpoints that were complete when this life began. The first access, which caches them, must be before
        ranks start."""
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
