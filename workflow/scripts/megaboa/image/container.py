"""The image that ranks start in, as the launcher sees it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megaboa.image.runtimes import RUNTIMES, without_pythons


@dataclass(frozen=True)
class Container:
    """Puts a command into an image; without one, leaves it as it is."""

    runtime: str = "none"
    image: str = ""
    mounts: Sequence[str] = ()
    secrets: Sequence[str] = ()
    workdir: str = ""

    def around(self, command: Sequence[str], environment: Mapping[str, str]) -> list[str]:
        """argv of the command in the image. Of variables only names are told: those given, and secrets that are set."""
        names = sorted({*environment, *(name for name in self.secrets if name in os.environ)})
        return RUNTIMES[self.runtime](self.image, self.mounts, names, self.workdir, command)

    def inherited(self, environment: Mapping[str, str] | None = None) -> dict[str, str]:
        """What the command gets of this process's environment, or of the one given."""
        ours = os.environ if environment is None else environment
        return dict(ours) if self.runtime == "none" else without_pythons(ours)


NO_CONTAINER = Container()
