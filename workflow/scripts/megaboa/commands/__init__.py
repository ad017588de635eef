"""The commands of `megaboa`, a module each: arguments, and a call of the library. This file, and the commands that a
cluster's hosts need, use the standard library alone."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from megaboa.paths import ExperimentFolder, RunFolder

RESULTS = Path("results")


def parser(name: str, description: str | None) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog=f"megaboa {name}", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def experiment(text: str) -> Path:
    """The results of an experiment, by its name or their folder."""
    missing = f"no experiment {text!r} is planned in {RESULTS}/"
    return _found([RESULTS / text, Path(text)], lambda path: ExperimentFolder(path).plan, missing, RESULTS)


def run(text: str) -> Path:
    """The folder of a run, by EXPERIMENT/RUN or itself; its run.json will do."""
    name, _, run_name = text.partition("/")
    runs, path = RESULTS / name / "runs", Path(text)
    places = [*([runs / run_name] if run_name else []), path.parent if path.name == "run.json" else path]
    missing = f"no run {text!r}: say EXPERIMENT/RUN or its folder"
    return _found(places, lambda path: RunFolder(path).file("run"), missing, runs)


def _found(places: list[Path], plan_of: Callable[[Path], Path], missing: str, among: Path) -> Path:
    """The first place in which something is planned."""
    if path := next((path for path in places if plan_of(path).exists()), None):
        return path
    there = [path.name for path in sorted(among.glob("*/")) if plan_of(path).exists()]
    names = f"; there are {', '.join(there[:20])}" if there else ""
    raise argparse.ArgumentTypeError(f"{missing}{names}")
