"""What a run's ranks are to the supervisor, whoever started them."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Protocol

# A rank that gets this one writes the stacks of its threads to its log and goes on.
STACKS_SIGNAL = signal.SIGUSR2


@dataclass(frozen=True)
class Ended:
    """How the ranks ended: every rank with 0, or the first one that didn't."""

    rank: int | None = None
    returncode: int = 0
    node: str | None = None
    said: str = ""  # the launcher's own words, where it has any

    @property
    def ok(self) -> bool:
        return self.returncode == 0

    @property
    def killed(self) -> bool:
        return self.returncode < 0

    def __str__(self) -> str:
        if self.ok:
            return "every rank ended with 0"
        who = "the launcher" if self.rank is None else f"rank {self.rank}"
        who += f" on {self.node}" if self.node else ""
        if self.killed:
            names = {number.value: number.name for number in signal.Signals}
            return f"{who} was killed by {names.get(-self.returncode, f'signal {-self.returncode}')}"
        return f"{who} ended with exit code {self.returncode}"


class Ranks(Protocol):
    """Ranks that were started together and end together."""

    def poll(self) -> Ended | None:
        """None while they run. When one fails the others, which would wait for it for ever, are ended too."""

    def ask(self) -> bool:
        """Ask every rank to save and end; False if nobody could tell them, and they must be asked again."""

    def dump(self) -> None:
        """Have every rank write its stacks."""

    def kill(self) -> None:
        """End them, with whatever they started, and return when they are gone."""
