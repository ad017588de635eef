"""Preflight's refusals: summarised in a few lines, and kept for the next plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from megaboa import files, records
from megaboa.formats import some_of
from megaboa.image.image_file import as_recorded
from megaboa.paths import ExperimentFolder
from megaboa.records import Image, ImageAsked, InsideAsked, Refusal, Refusals, plain, read_if_there


def grouped(reasons: Mapping[str, Sequence[str]], one: str = "", many: str = "") -> list[str]:
    """A line for each reason, with the runs that it applies to."""
    runs: dict[str, list[str]] = {}
    for name, given in reasons.items():
        for reason in given:
            runs.setdefault(reason, []).append(name)
    return [
        f"{some(names)}{' ' if one else ''}{one if len(names) == 1 else many}: {why}" for why, names in runs.items()
    ]


def some(runs: Sequence[str]) -> str:
    """`run a`, `runs a, b, c and 4 more`."""
    return f"run{'s' if len(runs) > 1 else ''} {some_of(runs)}"


def write(experiment: Path, refused: Mapping[str, Sequence[str]], in_image: bool = False) -> None:
    """Add refusals to the known ones of unchanged runs under the same packages.

    `in_image`: refused by the packages of the present image.
    """
    asked = records.read(ImageAsked, ExperimentFolder(experiment).specs.image).container if in_image else None
    wanted = files.digest(plain(asked)) if asked else None
    image = _image(experiment, wanted)
    known = read(experiment, _packages(experiment), wanted)
    for name, reasons in refused.items():
        known[name] = Refusal(identity=_identity(experiment, name), reasons=tuple(reasons), image=image)
    records.write(ExperimentFolder(experiment).refused, Refusals(packages=_packages(experiment), runs=known))


def read(experiment: Path, packages: str, wanted: str | None = None) -> dict[str, Refusal]:
    """Runs refused under these packages, outside of an image or in the present image if that is the wanted one.

    Another image, or one that isn't made yet, may accept them. `wanted`: digest of the image's specification.
    """
    found = read_if_there(Refusals, ExperimentFolder(experiment).refused)
    runs = found.runs if found and found.packages == packages else {}
    here = (None, _image(experiment, wanted))
    return {name: one for name, one in runs.items() if one.image in here}


def _image(experiment: Path, wanted: str | None) -> tuple[str, str] | None:
    """The digests of an image's specification and file; None if there is no such image."""
    manifest = ExperimentFolder(experiment).image
    found = read_if_there(Image, manifest) if wanted else None
    if not found or not as_recorded(found):
        return None
    return wanted, found.digest


def _identity(experiment: Path, run: str) -> str:
    return files.digest(files.read_json(ExperimentFolder(experiment).run(run).file("run")))


def _packages(experiment: Path) -> str:
    """Digest of the packages: another version of Bridge may accept what this one refuses."""
    return str(records.read(InsideAsked, ExperimentFolder(experiment).specs.inside).digest)
