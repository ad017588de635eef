"""How a conversion divides a model among ranks. Standard library only, as plan, launcher and ranks share it."""

from __future__ import annotations

import argparse
from pathlib import Path

from megaboa.layout import AXES, Layout
from megaboa.records import Image, read

SIZES = tuple(axis.name for axis in AXES if axis.weights and axis.default)


def layout(tp: int = 1, pp: int = 1, ep: int = 1) -> Layout:
    """By so many ranks; those of one pipeline stage share both the dense tensors and the experts."""
    return Layout(pp * max(tp, ep), tp=tp, pp=pp, ep=ep)


WHOLE = layout()
# Weights of a model whose proof holds transformers' model whole, in fp32 (80 GB); a larger one is read layer by layer.
HELD_WHOLE = 20_000_000_000


def arguments(layout: Layout) -> list[str]:
    """As the commands that convert take them."""
    return [f"--{name}={layout.size(name)}" for name in SIZES]


def add_sizes(parser: argparse.ArgumentParser) -> None:
    for name in SIZES:
        parser.add_argument(f"--{name}", type=int, default=1, help=f"{name} of the ranks of which this is one")


def layout_of(arguments: argparse.Namespace) -> Layout:
    return layout(**{name: getattr(arguments, name) for name in SIZES})


def add_image(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--image", type=Path, help="image.json, where this runs in an image: which one is written down")


def image_of(arguments: argparse.Namespace) -> dict[str, tuple[str, ...]]:
    """For a conversion's manifest: it holds as long as it was made in the image that there is."""
    return {"image": read(Image, arguments.image).marks} if arguments.image else {}
