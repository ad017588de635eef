"""Stop one run, or all runs of an experiment that are being trained: their ranks save and end.

Snakemake reports them as failed; the next call resumes them. A call that still works on the experiment starts the runs
that haven't begun: Ctrl-C ends it.
"""

import sys

from megaboa import commands
from megaboa.paths import ExperimentFolder
from megaboa.run.stop import stop
from megaboa.store_paths import RunStore


def main(words: list[str]) -> int:
    parser = commands.parser("stop", __doc__)
    parser.add_argument("asked", metavar="experiment", type=commands.asked, help=commands.ASKED)
    results, run = parser.parse_args(words).asked
    experiment = ExperimentFolder(results)
    if run is None:
        return _stop_all(experiment)
    folder = experiment.run(run)
    if not folder.attempts_link.exists():
        print(f"{folder.path}: this run hasn't started, so there is nothing to stop", file=sys.stderr)
        return 1
    print(f"run {folder.name}: {stop(RunStore.of(folder.attempts_link)).said}")
    return 0


def _stop_all(experiment: ExperimentFolder) -> int:
    """Stop every run that is being trained, also one that the present plan no longer has."""
    asked = False
    for folder in experiment.runs:
        if folder.attempts_link.exists() and (answer := stop(RunStore.of(folder.attempts_link))).asked:
            print(f"run {folder.name}: {answer.said}", flush=True)
            asked = True
    if not asked:
        print(f"{experiment.path.name}: no run is being trained, so there is nothing to stop", file=sys.stderr)
    return 0 if asked else 1
