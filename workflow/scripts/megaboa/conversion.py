"""How a conversion divides a model among ranks. Standard library only, as plan, launcher and ranks share it."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from megaboa.records import Image, read


@dataclass(frozen=True)
class Layout:
    """Tensor, pipeline and expert parallel sizes. Experts are cut by tp only where they are not spread over
    ranks."""

    tp: int = 1
    pp: int = 1
    ep: int = 1

    @property
    def ranks(self) -> int:
        return self.pp * max(self.tp, self.ep)

    @property
    def expert_tp(self) -> int:
        return self.tp if self.ep == 1 else 1

    @property
    def arguments(self) -> list[str]:
        """As the scripts that convert take them."""
        return [f"--tp={self.tp}", f"--pp={self.pp}", f"--ep={self.ep}"]


WHOLE = Layout()


def add_sizes(parser: argparse.ArgumentParser) -> None:
    for name in ("tp", "pp", "ep"):
        parser.add_argument(f"--{name}", type=int, default=1, help=f"{name} of the ranks of which this is one")


def add_image(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--image", type=Path, help="image.json, where this runs in an image: which one is written down")


def image_of(arguments: argparse.Namespace) -> dict[str, tuple[str, ...]]:
    """For a conversion's manifest: it holds as long as it was made in the image that there is."""
    return {"image": read(Image, arguments.image).marks} if arguments.image else {}
