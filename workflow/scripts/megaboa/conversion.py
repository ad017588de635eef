"""The parallel layout of a conversion. Standard library only, because plan, launcher and ranks share it."""

from __future__ import annotations

import argparse
from pathlib import Path

from megaboa.layout import AXES, Layout
from megaboa.records import Image, read

SIZES = tuple(axis.name for axis in AXES if axis.weights and axis.default)


def layout(tp: int = 1, pp: int = 1, ep: int = 1) -> Layout:
    """A layout of the given sizes.

    In each pipeline stage the same ranks shard both the dense tensors and the experts.
    """
    return Layout(pp * max(tp, ep), tp=tp, pp=pp, ep=ep)


WHOLE = layout()
# Up to so many parameters a proof loads transformers' whole model in fp32 (80 GB); a larger one is read layer by layer.
HELD_WHOLE = 20_000_000_000


def arguments(layout: Layout) -> list[str]:
    """The sizes of a layout as command line arguments of a conversion."""
    return [f"--{name}={layout.size(name)}" for name in SIZES]


def add_sizes(parser: argparse.ArgumentParser) -> None:
    for name in SIZES:
        parser.add_argument(f"--{name}", type=int, default=1, help=f"{name} of the ranks of which this is one")


def layout_of(arguments: argparse.Namespace) -> Layout:
    return layout(**{name: getattr(arguments, name) for name in SIZES})


def add_image(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--image", type=Path, help="image.json, where this runs in an image: which one is written down")


def image_of(arguments: argparse.Namespace) -> dict[str, tuple[str, ...]]:
    """The image's marks for a conversion's manifest, which is valid as long as the image is the same."""
    return {"image": read(Image, arguments.image).marks} if arguments.image else {}
