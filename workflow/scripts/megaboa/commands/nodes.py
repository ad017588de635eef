"""Show the troubles that runs of a store had with nodes: failures, broken and slow GPUs, and how much they count now.

A node whose troubles add up to 1.5 or more is avoided by the runs of its cluster. Troubles count half after a week
(recovery.node_memory_days), so it comes back by itself; --forget brings it back at once.
--marks prints launch.pass_marks to paste, from the health checks of good nodes.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from pathlib import Path

from rich.table import Table

from megaboa import commands
from megaboa.files import append_line
from megaboa.observe.console import console
from megaboa.records import NodeTrouble, line, plain
from megaboa.run import node_memory, pass_marks
from megaboa.run.node_memory import Remembered
from megaboa.store_paths import NodesFolder


def main(words: list[str]) -> None:
    parser = commands.parser("nodes", __doc__)
    parser.add_argument("node", nargs="*", help="show the troubles of these one by one; default: a table of all")
    parser.add_argument("--store", type=Path, default=Path("store"), help="the store; default: store/")
    parser.add_argument("--days", type=float, default=node_memory.USUAL_DAYS, help="half-life; default: %(default)s")
    parser.add_argument("--forget", action="store_true", help="these nodes are repaired: forget their troubles")
    parser.add_argument("--marks", action="store_true", help="print marks for the health check, by kind of GPU")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(words)
    if args.days <= 0:
        parser.error("--days must be above 0")
    if args.marks:
        print_marks(args.store)
        return
    found = node_memory.of_store(args.store, time.time(), args.days)
    if missing := sorted(set(args.node) - {one.node for nodes in found.values() for one in nodes}):
        sys.exit(f"megaboa nodes: {args.store} remembers nothing of {', '.join(missing)}")
    if args.forget:
        forget(args.store, found, args.node or parser.error("--forget needs the names of nodes"))
    elif args.json:
        print(json.dumps({name: [_record(one) for one in nodes] for name, nodes in found.items()}, indent=1))
    elif not found:
        print(f"{args.store}: no run has met a node that failed or was slow")
    elif args.node:
        for one in (one for nodes in found.values() for one in nodes if one.node in args.node):
            _tell(one, args.days)
    else:
        for name, nodes in found.items():
            console().print(_table(name, nodes, args.days))


def print_marks(store: Path) -> None:
    kinds = pass_marks.checks_of(store)
    if not kinds:
        sys.exit(f"megaboa nodes: {store} has no health check of a node with GPUs: set launch.health_check, and train")
    for kind, good in kinds.items():
        print(f"# {kind}: 90% of what nine tenths of {len(good)} check(s) reached\nlaunch:\n  pass_marks:")
        marks = plain(pass_marks.of_good_nodes(good))
        print("\n".join(f"    {name}: {value:g}" for name, value in marks.items() if value is not None))


def forget(store: Path, found: dict[str, list[Remembered]], names: list[str]) -> None:
    for cluster, nodes in found.items():
        for one in (one for one in nodes if one.node in names):
            path = NodesFolder.of(store).node(cluster, one.node)
            append_line(path, line(NodeTrouble(what=node_memory.FORGOTTEN)))
            print(f"{one.node}: {len(one.troubles)} trouble(s) count no more")


def _record(one: Remembered) -> dict[str, object]:
    shown = [plain(trouble) for trouble in one.troubles]
    return {"node": one.node, "score": round(one.score, 3), "avoided": one.avoided, "troubles": shown}


def _table(cluster: str, nodes: list[Remembered], days: float) -> Table:
    table = Table(title=f"cluster {cluster}", title_justify="left", box=None, pad_edge=False, header_style="bold")
    for column in ("node", "score", "avoided", "troubles", "the last one"):
        table.add_column(column, overflow="fold")
    for one in nodes:
        kinds = Counter(trouble.what.replace("_", " ") for trouble in one.troubles)
        last = one.troubles[-1]
        table.add_row(
            one.node,
            f"{one.score:.2f}",
            f"for {one.returns(days):.1f} days" if one.avoided else "no",
            ", ".join(f"{count} x {kind}" for kind, count in kinds.most_common()),
            f"{_date(last.time)}: {last.detail[:100]}",
        )
    return table


def _tell(one: Remembered, days: float) -> None:
    avoided = f"avoided for {one.returns(days):.1f} days more" if one.avoided else "not avoided"
    print(f"{one.node}: {one.score:.2f}, {avoided}")
    for trouble in one.troubles:
        where = f" ({trouble.run}, attempt {trouble.attempt})" if trouble.attempt else f" ({trouble.run})"
        print(f"  {_date(trouble.time)}  {trouble.what.replace('_', ' ')}: {trouble.detail}{where}")


def _date(moment: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(moment))
