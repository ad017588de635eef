"""Find the first of several values of a key that makes the experiment slower, larger or worse.

The key may be any that runs are trained with, such as an image or a commit of Megatron-Bridge. The first value must be
good, the last bad. Each value is an experiment of its own, run by Snakemake and compared with the first as by
report.baseline. A second call resumes. Arguments after `--` go to Snakemake.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from megaboa import commands
from megaboa.config import load
from megaboa.config.yaml_file import scalar
from megaboa.errors import InputError
from megaboa.files import digest, write_text
from megaboa.observe import status
from megaboa.paths import ExperimentFolder
from megaboa.records import Checks, read
from megaboa.report.bisection import Mark, failing, mark_of, next_to_try, reasons, suspects

LIMITS = ("slower", "more_memory", "higher_loss", "spread")


def main(words: list[str]) -> int:
    own, further = (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, [])
    parser = commands.parser("bisect", __doc__)
    parser.add_argument("experiment", nargs="+", type=Path, help="the experiment's files: short runs, several seeds")
    parser.add_argument("--key", required=True, help="such as image.path")
    parser.add_argument("--values", required=True, nargs="+", help="in their order: the first good, the last bad")
    for limit in LIMITS:
        parser.add_argument(f"--{limit.replace('_', '-')}", type=float, help=f"as report.baseline.{limit}")
    args = parser.parse_args(own)
    if len(args.values) < 3 or len({*args.values}) < len(args.values):
        parser.error("--values: give three or more, each once")
    if args.key.split(".")[0] in ("experiment", "report", "sweep"):
        parser.error(f"--key {args.key}: is not what runs are trained with, as image.path and training.precision are")
    limits = {name: getattr(args, name) for name in LIMITS if getattr(args, name) is not None}
    base = load(args.experiment)
    return Walk(args.experiment, str(base.experiment.experiment), args.key, args.values, limits, further).run()


@dataclass
class Walk:
    files: list[Path]
    name: str
    key: str
    values: list[str]
    limits: dict[str, float]
    further: list[str]
    marks: dict[int, Mark] = field(default_factory=dict)
    deciding: list[str] = field(default_factory=list)

    def run(self) -> int:
        last = len(self.values) - 1
        if self._checks(0) is None:
            raise InputError(
                f"{self.key}: {self.values[0]}: its runs came to no end, so nothing can be compared with it"
            )
        self._say(0, "good")
        checks = self._checks(last)
        self.deciding = failing(checks) if checks else []
        if not self.deciding:
            why = "; ".join(reasons(checks)) if checks else "its runs came to no end"
            raise InputError(f"{self.key}: {self.values[last]}: is not found to be worse than {self.values[0]}: {why}")
        self._say(last, "bad", *reasons(checks, self.deciding))
        while (number := next_to_try(self.marks)) is not None:
            checks = self._checks(number)
            mark = "broken" if checks is None else mark_of(checks, self.deciding)
            self._say(number, mark, *(reasons(checks, self.deciding) if checks else ()))
        return self._conclude()

    def _say(self, number: int, mark: Mark, *why: str) -> None:
        self.marks[number] = mark
        print("\n  ".join([f"{mark:<8}{self.values[number]}", *why]), flush=True)

    def _conclude(self) -> int:
        found = suspects(self.marks)
        if found.is_one:
            print(f"first bad {self.key}: {self.values[found.bad]}")
            return 0
        among = ", ".join(self.values[number] for number in (*found.rest, found.bad))
        print(f"first bad {self.key}: one of {among}; the others are untold (give more seeds) or broken")
        return 1

    def _checks(self, number: int) -> Checks | None:
        """What the report of one value says; None where its runs came to no end."""
        folder = ExperimentFolder(Path("results") / self._experiment(number))
        overlay = folder.path / "bisect.yaml"
        write_text(overlay, yaml.safe_dump(self._overlay(number), sort_keys=False))
        command = [sys.executable, "-m", "snakemake", *self.further]
        command += ["--configfile", *map(str, self.files), str(overlay)]
        done = subprocess.run(command, stdout=sys.stderr)
        if not folder.checks.exists() or (done.returncode and status.missing(folder.path)):
            return None
        return read(Checks, folder.checks)

    def _experiment(self, number: int) -> str:
        """By the value, so that a list that has grown finds what was run."""
        return f"{self.name}-bisect-{digest([self.key, self.values[number]])[:8]}"

    def _overlay(self, number: int) -> dict[str, Any]:
        """What is laid over the experiment's files."""
        value: Any = scalar(self.values[number])
        for part in reversed(self.key.split(".")):
            value = {part: value}
        baseline = {"path": f"results/{self._experiment(0)}", **self.limits}
        return {
            "experiment": self._experiment(number),
            **value,
            **({"report": {"baseline": baseline}} if number else {}),
        }
