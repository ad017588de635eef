"""What preflight refused, told in few lines, and kept for the next plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megaboa import files

NAMED = 3  # runs that a line names


def grouped(reasons: Mapping[str, Sequence[str]], one: str = "", many: str = "") -> list[str]:
    """A line for each reason, with the runs that have it."""
    runs: dict[str, list[str]] = {}
    for name, given in reasons.items():
        for reason in given:
            runs.setdefault(reason, []).append(name)
    return [
        f"{some(names)}{' ' if one else ''}{one if len(names) == 1 else many}: {why}" for why, names in runs.items()
    ]


def some(runs: Sequence[str]) -> str:
    """`run a`, `runs a, b, c and 4 more`."""
    more = f" and {len(runs) - NAMED} more" if len(runs) > NAMED else ""
    return f"run{'s' if len(runs) > 1 else ''} {', '.join(runs[:NAMED])}{more}"


def write(experiment: Path, refused: Mapping[str, Sequence[str]], image: str | None = None) -> None:
    """Beside what is known of earlier refusals: those of runs that are as they were, under the same packages.

    `image`: the digest of the image in which they were refused.
    """
    known = read(experiment, _packages(experiment))
    for name, reasons in refused.items():
        known[name] = {"identity": _identity(experiment, name), "reasons": list(reasons), "image": image}
    files.write_json(experiment / "refused.json", {"packages": _packages(experiment), "runs": known})


def read(experiment: Path, packages: str) -> dict[str, Any]:
    """Runs that were refused under these packages, outside of an image or in this one: name, identity and reasons."""
    path, manifest = experiment / "refused.json", experiment / "image.json"
    if not path.exists():
        return {}
    found = files.read_json(path)
    here = (None, files.read_json(manifest)["digest"] if manifest.exists() else None)
    runs = found["runs"] if found["packages"] == packages else {}
    return {name: one for name, one in runs.items() if one.get("image") in here}


def _identity(experiment: Path, run: str) -> str:
    return files.digest(files.read_json(experiment / "runs" / run / "run.json"))


def _packages(experiment: Path) -> str:
    """Another version of Bridge may accept what this one refuses."""
    return str(files.read_json(experiment / "specs" / "inside.json")["digest"])
