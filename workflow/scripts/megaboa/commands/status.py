"""Show how far the runs of an experiment have come, whether Snakemake runs or not."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live

from megaboa import commands
from megaboa.observe.queue import Queue, read_queue
from megaboa.observe.status import as_record, experiment_progress, progress_table
from megaboa.run.bad_nodes import reviser
from megaboa.run.progress import Progress

ASK_SECONDS = 20  # between two questions to the scheduler while watching


def main(words: list[str]) -> None:
    parser = commands.parser("status", __doc__)
    parser.add_argument("experiment", nargs="?", help="its name, or the folder of its results; default: all")
    parser.add_argument("--results", type=Path, default=commands.RESULTS, help="folder of results")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--watch", action="store_true", help="stay and update once a second")
    form.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(words)

    experiments = find_experiments(args.results, args.experiment)
    revise = reviser(experiments[0].parent)
    revise()
    if args.json:
        queue = read_queue()
        found = {path.name: [as_record(run) for run in progress_of(path, queue)] for path in experiments}
        print(json.dumps(found, indent=1))
    elif args.watch:
        watch(experiments, revise)
    else:
        Console().print(show(experiments, read_queue()))


def find_experiments(results: Path, name: str | None) -> list[Path]:
    places = [results / name, Path(name)] if name else sorted(results.glob("*"))
    found = [path for path in places if (path / "runs").is_dir()]
    if not found:
        what = f"no experiment `{name}`" if name else "no experiment"
        sys.exit(f"{results}: {what} there; `snakemake -n` writes its plan, and then it is shown here")
    return found[:1] if name else found


def show(experiments: list[Path], queue: Queue) -> Group:
    parts = [part for path in experiments for part in ("", progress_table(path.name, progress_of(path, queue)))]
    return Group(*parts[1:])  # an empty line between two


def progress_of(experiment: Path, queue: Queue) -> list[Progress]:
    return experiment_progress(experiment, queue=queue)


def watch(experiments: list[Path], revise: Callable[[], None]) -> None:
    queue = read_queue()
    with Live(show(experiments, queue), auto_refresh=False, screen=sys.stdout.isatty()) as live:
        try:
            while True:
                time.sleep(1)
                if time.time() - queue.asked > ASK_SECONDS:
                    revise()
                    queue = read_queue()
                live.update(show(experiments, queue), refresh=True)
        except KeyboardInterrupt:
            return
