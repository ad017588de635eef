"""Report on what is there of an experiment, while other runs still train or have failed.

The page and its figures are written to results/EXPERIMENT/interim/. Whatever it says, it is a look and no verdict.
"""

from __future__ import annotations

import shlex
import sys

from megaboa import commands
from megaboa.paths import ExperimentFolder
from megaboa.report.make import Wanted, make
from megaboa.report.page import ReportError
from megaboa.run import submitted


def main(words: list[str]) -> int:
    parser = commands.parser("interim", __doc__)
    parser.add_argument("experiment", type=commands.experiment, help="its name, or the folder of its results")
    results = parser.parse_args(words).experiment
    if not ExperimentFolder(results).plan.exists():
        print(f"{results}: nothing is planned there; `snakemake -n` writes its plan", file=sys.stderr)
        return 1
    page = results / "interim" / "index.html"
    command = shlex.join(["megaboa", "interim", *words])
    try:
        print(make(Wanted(results, page, command, submitted.last_config(results), interim=True)))
    except ReportError as error:
        print(error, file=sys.stderr)
        return 1
    return 0
