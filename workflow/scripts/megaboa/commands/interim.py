"""Report on the finished runs of an experiment, while others train or have failed.

The page and its figures are written to results/EXPERIMENT/interim/. It gives no verdict: the exit code is always 0.
"""

from __future__ import annotations

from megaboa import commands
from megaboa.bundle.baseline import keep
from megaboa.errors import InputError
from megaboa.report.build import Wanted, make
from megaboa.run import submitted
from megaboa.store import closed


def main(words: list[str]) -> int:
    parser = commands.parser("interim", __doc__)
    parser.add_argument("experiment", type=commands.experiment, help="its name, or the folder of its results")
    results = parser.parse_args(words).experiment
    if place := closed(results / "interim"):
        raise InputError(
            f"{place}: you can't write there, and the page would be {results}/interim/index.html: copy {results} to a "
            "folder of yours, and call `megaboa interim` with the copy"
        )
    call = submitted.last(results)
    keep(results)
    print(make(Wanted(results, results / "interim" / "index.html", call.command, call.config_files, interim=True)))
    return 0
