"""The commands of `megaboa`, a module each: arguments, and a call of the library. Standard library only."""

from __future__ import annotations

import argparse
from pathlib import Path

RESULTS = Path("results")


def parser(name: str, description: str | None) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog=f"megaboa {name}", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def experiment(text: str) -> Path:
    """The results of an experiment, by its name or their folder."""
    return _found(text, RESULTS / text, f"no experiment {text!r} in {RESULTS}/", RESULTS)


def run(text: str) -> Path:
    """The folder of a run, by EXPERIMENT/RUN or itself; its run.json will do."""
    path = Path(text)
    if path.name == "run.json":
        return path.parent
    name, _, run_name = text.partition("/")
    runs = RESULTS / name / "runs"
    return _found(text, runs / run_name, f"no run {text!r}: say EXPERIMENT/RUN or its folder", runs)


def _found(text: str, named: Path, missing: str, among: Path) -> Path:
    if path := next((path for path in (Path(text), named) if path.is_dir()), None):
        return path
    there = sorted(path.name for path in among.glob("*/")) if among.is_dir() else []
    names = f"; there are {', '.join(there[:20])}" if there else ""
    raise argparse.ArgumentTypeError(f"{missing}{names}")
