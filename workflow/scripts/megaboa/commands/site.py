"""Show what SLURM says of this cluster to its user: account, partitions, settings that matter, file systems.

With --write, what `--profile slurm` takes goes to profiles/slurm/site.yaml, which it reads first; what is left to you
stands there as comments.
"""

from __future__ import annotations

import fcntl
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megaboa import commands
from megaboa.errors import InputError
from megaboa.launch import partitions, slurm
from megaboa.launch.partitions import Cluster
from megaboa.plan import places

# What decides how runs fare (docs/how-to/slurm.md).
SETTINGS = ("MinJobAge", "SlurmdTimeout", "KillWait", "ProctrackType", "JobRequeue", "PreemptMode", "MaxArraySize")
SETTINGS += ("PrivateData", "AccountingStorageEnforce")


def main(words: list[str]) -> int:
    parser = commands.parser("site", __doc__)
    parser.add_argument("--write", action="store_true", help="begin that file")
    args = parser.parse_args(words)
    try:
        there = args.write and places.SITE_FILE.exists()
        cluster, settings = partitions.ask(), slurm.settings()
        choice = places.choose(partitions.NAMES, {}, cluster)
    except InputError as error:
        sys.exit(f"megaboa site: {error}; remove it, and `megaboa site --write` begins another")
    except slurm.SlurmUnreachableError as error:
        sys.exit(f"megaboa site: SLURM can't be asked here: {error}")
    console = Console()
    console.print(f"cluster {settings.get('ClusterName', '')}: {_accounts(cluster)}")
    for table in (_partitions(cluster), _associations(cluster), _settings(settings), _folders()):
        if table.row_count:
            console.print("", table)
    lines = [partitions.line(name, value) for name, value in choice.taken.items()]
    lines += [f"# {line}" for line in (*choice.left, *choice.missing)]
    yours = ", and leaves to you (#)" if choice.left or choice.missing else ""
    text = "\n".join(lines)
    console.print(f"\n`--profile slurm` takes{yours}:\n{text}", highlight=False, soft_wrap=True)
    if there:
        sys.exit(f"{places.shown()} is there already, and stays as it is: edit it, or remove it first")
    if args.write:
        places.SITE_FILE.write_text(f"{text}\n", encoding="utf-8")
        console.print(f"written to {places.shown()}", highlight=False, soft_wrap=True)
    return 0


def _accounts(cluster: Cluster) -> str:
    if cluster.accounts is None:
        return "it takes any account"
    return f"your accounts are {', '.join(cluster.accounts)}" if cluster.accounts else "you have no account"


def _partitions(cluster: Cluster) -> Table:
    table = _table("partition", "what it has", "for accounts")
    for one in cluster.partitions:
        allowed = "all" if one.allowed is None else ", ".join(sorted(one.allowed))
        table.add_row(one.name, str(one), allowed + (f", not {', '.join(sorted(one.denied))}" if one.denied else ""))
    return table


def _associations(cluster: Cluster) -> Table:
    """The limits of the user's accounts."""
    table = _table("account", "partition", "QOS", "most of each job", "most jobs", "longest")
    if cluster.accounts:
        try:
            listed = partitions.associations("account,partition,qos,maxtres,maxjobs,maxwall")
        except slurm.SlurmUnreachableError:
            return table
        for line in listed.splitlines():
            table.add_row(*(value or "-" for value in line.split("|")))
    return table


def _settings(settings: dict[str, str]) -> Table:
    notes = {}
    if _seconds(settings.get("MinJobAge")) < 120:
        notes["MinJobAge"] = "below 120 s the executor asks sacct, which it misreads after an scancel"
    if _seconds(settings.get("KillWait")) < 30:
        notes["KillWait"] = "that is all the time a cancelled run has for its last save"
    if "cgroup" not in settings.get("ProctrackType", "cgroup"):
        notes["ProctrackType"] = "SLURM may not find all processes of a job that has ended"
    table = _table("setting", "value", "")
    for name in SETTINGS:
        table.add_row(name, settings.get(name) or "-", notes.get(name, ""))
    return table


def _folders() -> Table:
    """Whether locks work where results and checkpoints lie."""
    table = _table("folder", "file system", "locks (flock) of this host")
    found = (path.resolve() if path.is_dir() else Path.cwd() for path in (Path("results"), Path("store")))
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
    return "they work"


def _seconds(value: str | None) -> int:
    number = (value or "").split(" ")[0]
    return int(number) if number.isdigit() else 10**6


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
