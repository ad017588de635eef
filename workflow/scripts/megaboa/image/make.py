"""Makes the image that ranks run in, with its manifest: built or taken, and tested."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megaboa.errors import InputError
from megaboa.files import make_folder
from megaboa.image import bridge_source, contract, dockerfile, image_file, obtain, pins
from megaboa.paths import Specs
from megaboa.records import (
    Contract,
    Image,
    ImageAsked,
    ImageBuild,
    InsideAsked,
    PreflightInImage,
    read,
    write,
)


def make(spec: Path, inside: Path, out: Path) -> None:
    """Make the image of specs/image.json and specs/inside.json, if the experiment has one, and write the manifest."""
    found = read(ImageAsked, spec)
    if not found.container:
        write(out, found)
        return
    wanted = obtain.joined(found.container, read(InsideAsked, inside).container)
    _make_store(Path(wanted.store).expanduser())
    made = obtain.obtain(wanted)
    if wanted.bridge_source:
        bridge_source.check_out(wanted.store, wanted.bridge_source)
    report = contract.test(wanted, Path(made.path), out.parent)
    if report.state == "FAIL":
        raise InputError(f"the image {made.path} failed its test: {'; '.join(report.problems or ())}")
    tested = replace(report, python=None, packages=None)
    write(out, replace(made, python=report.python, packages=report.packages or {}, contract=tested))
    print(f"image {made.path}, {made.digest}: {_told(report)}", file=sys.stderr)


def build_command(path: Path, engine: str, given: list[str]) -> list[str]:
    """What builds an image of a Dockerfile, with build arguments as NAME=VALUE."""
    file = dockerfile.read(path)
    args = pins.build_arguments(file, dict(pair.split("=", 1) for pair in given if "=" in pair))
    inputs = dockerfile.inputs(file, Path(), args)
    return obtain.build_plan(engine, ImageBuild(file=str(path), context=".", args=args, inputs=inputs))


def answer(specs: Specs, image: Image, results: Path, words: Sequence[str]) -> PreflightInImage:
    """The result of preflight in the image, without a GPU; NOT_RUN if it can't be started."""
    if problem := image_file.changed(image):
        raise InputError(problem)
    wanted = obtain.joined(read(ImageAsked, specs.image).container, read(InsideAsked, specs.inside).container)
    argv = [wanted.python, *words]
    try:
        asked = replace(wanted, device="cpu")
        return contract.ask(
            PreflightInImage, asked, Path(image.path), results, lambda report: [*argv, f"--out={report}"]
        )
    except contract.KilledError as error:
        return PreflightInImage(state="NOT_RUN", why=str(error))


def _make_store(store: Path) -> None:
    """Make the store, because it is mounted and thus must exist, even on the first day."""
    try:
        make_folder(store)
    except OSError as error:
        raise InputError(f"store: {store} can't be made ({error.strerror}): name another folder") from error


def _told(report: Contract) -> str:
    """The outcome of the test, in one line."""
    if report.state == "NOT_RUN":
        return f"not tested ({report.why})"
    lacks = ", ".join(one.what for one in report.missing or ())
    return f"tested, by {report.how}" + (f"; without {lacks}" if lacks else "")
