"""Show the cluster as the scheduler presents it to you: account, partitions, relevant settings, file systems.

With --write, the profile's choices go to its site.yaml, which it reads first; open choices are comments there.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.table import Table

from megaboa import commands
from megaboa.config import DEFAULT_CONFIG, ConfigError, load
from megaboa.errors import InputError
from megaboa.observe.console import console
from megaboa.plan import places
from megaboa.scheduler import answers
from megaboa.scheduler.answers import UnreachableError
from megaboa.scheduler.registry import cluster


def main(words: list[str]) -> int:
    parser = commands.parser("site", __doc__)
    parser.add_argument("experiment", nargs="*", help=f"its files, for its store; default: {DEFAULT_CONFIG}")
    parser.add_argument("--write", action="store_true", help="write that file")
    args, ours = parser.parse_args(words), cluster()
    store = _store(args.experiment)
    try:
        there = args.write and places.site_file().exists()
        heading, tables = ours.describe()
        choice = places.choose(ours.names, {})
    except InputError as error:
        sys.exit(f"megaboa site: {error}; remove it, and `megaboa site --write` begins another")
    except UnreachableError as error:
        sys.exit(f"megaboa site: {ours.name} can't be asked here: {error}")
    terminal = console()
    terminal.print(heading)
    for table in (*(_shown(one) for one in tables), _folders(store)):
        if table.row_count:
            terminal.print("", table)
    lines = [answers.site_line(name, value) for name, value in choice.taken.items()]
    lines += [f"# {line}" for line in (*choice.left, *choice.missing)]
    yours = ", and leaves to you (#)" if choice.left or choice.missing else ""
    text = "\n".join(lines)
    terminal.print(f"\n`--profile {ours.profile}` takes{yours}:\n{text}", highlight=False, soft_wrap=True)
    if there:
        sys.exit(f"{places.shown()} exists already and is not changed: edit it, or remove it first")
    if args.write:
        places.site_file().write_text(f"{text}\n", encoding="utf-8")
        terminal.print(f"written to {places.shown()}", highlight=False, soft_wrap=True)
    return 0


def _shown(told: answers.Table) -> Table:
    table = _table(*told.columns)
    for row in told.rows:
        table.add_row(*row)
    return table


def _store(files: list[str]) -> Path:
    try:
        return Path(load(files or [DEFAULT_CONFIG]).experiment.store)
    except ConfigError as error:
        if files:
            sys.exit(f"megaboa site: {error}")
        if DEFAULT_CONFIG.exists():  # perhaps that of a workflow around this one
            print(
                f"megaboa site: {DEFAULT_CONFIG} is not an experiment, so locks are tried in store/: {error}",
                file=sys.stderr,
            )
        return Path("store")


def _folders(store: Path) -> Table:
    """Whether locks work where results and checkpoints lie, or will lie."""
    table = _table("folder", "file system", "locks (flock) on this host")
    found = (path.resolve() for path in (Path("results"), store))
    # Of a folder that isn't there yet, or can't be looked at, the nearest one above it.
    found = (next(one for one in (path, *path.parents) if os.path.isdir(one)) for path in found)  # noqa: PTH112
    for folder in dict.fromkeys(found):
        kind = subprocess.run(["stat", "--file-system", "--format=%T", folder], capture_output=True, text=True)
        table.add_row(str(folder), kind.stdout.strip() or "unknown", _lock_in(folder))
    return table


def _lock_in(folder: Path) -> str:
    try:
        with tempfile.TemporaryFile(dir=folder) as stream:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return f"they don't work: {error.strerror} (mount option, or file mode)"
    return "they work"  # between hosts they may not, as on Lustre mounted with -o localflock


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
