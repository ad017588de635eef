"""Stop one run: its ranks save and end; other runs continue.

Snakemake reports it as failed; the next call resumes it.
"""

import sys

from megaboa import commands
from megaboa.paths import RunFolder
from megaboa.run.stop import stop
from megaboa.store_paths import RunStore


def main(words: list[str]) -> int:
    parser = commands.parser("stop", __doc__)
    parser.add_argument("run", type=commands.run, help="EXPERIMENT/RUN, or the run's folder")
    folder = RunFolder(parser.parse_args(words).run)
    if not folder.attempts_link.exists():
        print(f"{folder.path}: this run hasn't started, so there is nothing to stop", file=sys.stderr)
        return 1
    print(f"run {folder.name}: {stop(RunStore.of(folder.attempts_link))}")
    return 0
