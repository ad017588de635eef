"""The commands of `megaboa`: arguments, and a call of the library. What people call has a module of its own, with
`main`; what jobs call are functions, in a module for each subject, which imports the standard library alone at its top.
This file, and the commands that a cluster's hosts need, use nothing else at all."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable
from inspect import getdoc  # by name: in this package `inspect` is a command
from pathlib import Path

from megaboa.paths import ExperimentFolder, RunFolder

MEGABOA = Path(__file__).parents[1]  # which Python runs, as `python workflow/scripts/megaboa`
RESULTS = Path("results")
ASKED = "its name, its results, or EXPERIMENT/RUN"  # what `asked` takes
# Files that jobs are given, by the option that names them.
FILES = {
    "spec": "the job's specification, of the experiment's specs/",
    "sources": "what list-sources has written",
    "manifest": "the corpus's",
    "source": "source.json of the model",
    "import": "import.json of the model",
    "train": "train.json of the run",
    "export": "export.json of the run",
    "proof": "proof.json of the export",
    "settings": "the experiment's specs/report.json",
    "store": "folder of what is too large for results/",
    "out": "file to write",
}


def parser(name: str, description: str | None) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog=f"megaboa {name}", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def job(command: Callable[[list[str]], object], *files: str) -> argparse.ArgumentParser:
    """The parser of a job's command: its name and docstring, and the files that must be given."""
    made = parser(command.__name__.replace("_", "-"), getdoc(command))
    for option in files:
        made.add_argument(f"--{option}", type=Path, required=True, help=FILES[option])
    return made


def experiment(text: str) -> Path:
    """The results of an experiment, by its name or their folder."""
    missing = f"no experiment {text!r} is planned in {RESULTS}/"
    return _found([RESULTS / text, Path(text)], lambda path: ExperimentFolder(path).plan, missing, RESULTS)


def run(text: str) -> Path:
    """The folder of a run, given as EXPERIMENT/RUN, as the folder, or as the run.json in it."""
    name, _, run_name = text.partition("/")
    runs, path = RESULTS / name / "runs", Path(text)
    places = [*([runs / run_name] if run_name else []), path.parent if path.name == "run.json" else path]
    missing = f"no run {text!r}: say EXPERIMENT/RUN or its folder"
    return _found(places, lambda path: RunFolder(path).file("run"), missing, runs)


def asked(text: str) -> tuple[Path, str | None]:
    """An experiment's results, and the run of it, if one is named."""
    with contextlib.suppress(argparse.ArgumentTypeError):
        folder = run(text).absolute()
        return folder.parents[1], folder.name
    if (RESULTS / text.partition("/")[0] / "runs").is_dir() and "/" in text:
        run(text)  # an experiment's name before the slash: the error says which runs it has
    return experiment(text), None


def _found(places: list[Path], plan_of: Callable[[Path], Path], missing: str, among: Path) -> Path:
    """The first place in which something is planned."""
    if path := next((path for path in places if plan_of(path).exists()), None):
        return path
    there = [path.name for path in sorted(among.glob("*/")) if plan_of(path).exists()]
    names = f"; there are {', '.join(there[:20])}" if there else ""
    raise argparse.ArgumentTypeError(f"{missing}{names}")
