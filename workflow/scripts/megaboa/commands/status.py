"""Show how far the runs of an experiment have come, whether Snakemake runs or not."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Group
from rich.live import Live
from rich.text import Text

from megaboa import commands
from megaboa.doctor import failed_stages
from megaboa.observe.console import console
from megaboa.observe.queue import Queue, read_queue
from megaboa.observe.status import as_record, experiment_progress, progress_table
from megaboa.paths import RunFolder
from megaboa.run.bad_nodes import reviser
from megaboa.run.progress import Progress
from megaboa.scheduler.registry import cluster

ASK_SECONDS = 20  # between two questions to the scheduler while watching


def main(words: list[str]) -> None:
    parser = commands.parser("status", __doc__)
    parser.add_argument(
        "experiment", nargs="?", help="its name, or the folder of its results, or EXPERIMENT/RUN; default: all"
    )
    parser.add_argument("--results", type=Path, default=commands.RESULTS, help="folder of results")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--watch", action="store_true", help="stay and update once a second")
    form.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(words)

    shown = find(args.results, args.experiment)
    cluster().ask_once()
    revise = reviser(shown[0].experiment.parent)
    revise()
    if args.json:
        queue = read_queue()
        found = {one.experiment.name: [as_record(run) for run in one.progress(queue)] for one in shown}
        print(json.dumps(found, indent=1))
    elif args.watch:
        watch(shown, revise)
    else:
        console().print(show(shown, read_queue()))


@dataclass(frozen=True)
class Shown:
    """An experiment's results, and the only run of it to show, if one was named."""

    experiment: Path
    run: str | None = None

    def progress(self, queue: Queue) -> list[Progress]:
        return experiment_progress(self.experiment, queue=queue, only=self.run)


def find(results: Path, name: str | None) -> list[Shown]:
    places = [results / name, Path(name)] if name else sorted(results.glob("*"))
    found = [Shown(path) for path in places if (path / "runs").is_dir()]
    if not found and name:
        experiment, _, run = name.partition("/")
        folders = [results / experiment / "runs" / run, Path(name)]
        found = [
            Shown(path.parents[1], path.name)
            for path in map(Path.absolute, folders)
            if RunFolder(path).file("run").exists()
        ]
    if not found:
        what = f"no experiment or run `{name}`" if name else "no experiment"
        sys.exit(f"{results}: {what} there; `snakemake -n` writes its plan, and then it is shown here")
    return found[:1] if name else found


def show(shown: list[Shown], queue: Queue) -> Group:
    parts = []
    for one in shown:
        runs, name = one.progress(queue), one.experiment.name
        parts += ["", progress_table(name, runs)]
        # Runs that are done may be those of a former configuration.
        idle = any(run.state in ("waiting", "done") for run in runs)
        if idle and failed_stages.keeps_runs_waiting(one.experiment):
            parts.append(Text(f"a stage before training has failed: `megaboa doctor {name}` says why"))
    return Group(*parts[1:])  # an empty line between two


def watch(shown: list[Shown], revise: Callable[[], None]) -> None:
    queue = read_queue()
    with Live(show(shown, queue), auto_refresh=False, screen=sys.stdout.isatty()) as live:
        try:
            while True:
                time.sleep(1)
                if time.time() - queue.asked > ASK_SECONDS:
                    revise()
                    queue = read_queue()
                live.update(show(shown, queue), refresh=True)
        except KeyboardInterrupt:
            return
