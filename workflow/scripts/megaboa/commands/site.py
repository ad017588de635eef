"""Show what SLURM says of this cluster to its user: account, partitions, settings that matter, file systems.

With --write, account and partitions go to profiles/slurm/site.yaml, which `--profile slurm` reads; what is left to you
stands there as comments.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megaboa import commands
from megaboa.launch import partitions, slurm
from megaboa.launch.partitions import SITE_FILE, Cluster

# What the documentation asks for (docs/how-to/slurm.md), and what is wrong with another value.
SETTINGS = {
    "JobRequeue": lambda value: "" if value != "0" else "no job may be put back into the queue: a lost node ends a run",
    "MinJobAge": lambda value: "" if _seconds(value) >= 120 else "below 120 s ended jobs are forgotten too soon",
    "SlurmdTimeout": lambda value: "",  # how soon a dead node is noticed
    "KillWait": lambda value: "" if _seconds(value) >= 30 else "that is all the time a cancelled run has for its save",
    "ProctrackType": lambda value: "" if "cgroup" in value else "processes that outlive a rank may not be found",
    "PreemptMode": lambda value: "",
    "MaxArraySize": lambda value: "",
    "PrivateData": lambda value: "",
}


def main(words: list[str]) -> int:
    parser = commands.parser("site", __doc__)
    parser.add_argument("--write", action="store_true", help="write that file")
    args = parser.parse_args(words)
    try:
        cluster = partitions.ask()
        name, settings = slurm.cluster(), {key: partitions.setting(key) for key in SETTINGS}
    except slurm.SlurmUnreachableError as error:
        sys.exit(f"megaboa site: SLURM can't be asked here: {error}")
    console = Console()
    console.print(f"cluster {name}: {_accounts(cluster)}")
    console.print(_partitions(cluster), _settings(settings), _folders())
    choice = partitions.choose(cluster, os.environ)
    lines = [f"{key}: {value}" for key, value in choice.taken.items()]
    text = "\n".join([*lines, *(f"# {line}" for line in choice.left)])
    yours = ", and leaves to you (#)" if choice.left else ""
    console.print(f"`--profile slurm` takes{yours}:\n{text}", highlight=False, soft_wrap=True)
    if args.write:
        SITE_FILE.write_text(f"{text}\n", encoding="utf-8")
        console.print(f"written to {os.path.relpath(SITE_FILE)}", highlight=False, soft_wrap=True)
    return 0


def _accounts(cluster: Cluster) -> str:
    if cluster.accounts is None:
        return "it keeps no accounts"
    return f"your accounts are {', '.join(cluster.accounts)}" if cluster.accounts else "you have no account"


def _partitions(cluster: Cluster) -> Table:
    table = _table("partition", "what it has", "for")
    for one in cluster.partitions:
        table.add_row(one.name, str(one), "all" if one.accounts is None else ", ".join(sorted(one.accounts)))
    return table


def _settings(settings: dict[str, str]) -> Table:
    table = _table("setting", "value", "")
    for key, value in settings.items():
        table.add_row(key, value or "-", SETTINGS[key](value))
    return table


def _folders() -> Table:
    """Whether locks work where results and checkpoints lie: other hosts must see them."""
    table = _table("folder", "file system", "locks (flock)")
    for name in ("results", "store"):
        folder = Path(name) if Path(name).is_dir() else Path()
        kind = subprocess.run(["stat", "--file-system", "--format=%T", folder], capture_output=True, text=True)
        table.add_row(name, kind.stdout.strip() or "unknown", _lock_in(folder))
    return table


def _lock_in(folder: Path) -> str:
    try:
        with tempfile.TemporaryFile(dir=folder) as stream:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return f"they don't work: {error.strerror} (mount option, or file mode)"
    return "they work on this host"


def _seconds(value: str) -> int:
    number = value.split()[0] if value else ""
    return int(number) if number.isdigit() else 10**6


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
