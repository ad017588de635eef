"""All runs of a store, by experiment and by node: effective training time, GPU-hours, tokens, what was lost to what.

It reads only the store, with the runs of all users; runs in progress count up to their last event. With --page,
--prometheus or --alert no table is printed.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from megaboa import commands, files, formats
from megaboa.observe import alerts, prometheus
from megaboa.observe.console import console
from megaboa.observe.fleet import Fleet, Use, causes, cost, hours, losses, read_fleet, share, states, unit
from megaboa.observe.queue import read_queue
from megaboa.run.recovery import UNITS

SHOWN = 20  # rows of a table on the terminal


def main(words: list[str]) -> None:
    parser = commands.parser("fleet", __doc__)
    parser.add_argument("store", nargs="?", type=Path, default=Path("store"), help="default: store/")
    parser.add_argument("--since", type=_span, metavar="SPAN", help="only what happened in the last `12h` or `7d`")
    parser.add_argument("--price", type=_amount, help="cost of a GPU-hour")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write a self-contained HTML file")
    parser.add_argument(
        "--prometheus", type=Path, metavar="FILE.prom", help="write a text file for node_exporter's textfile collector"
    )
    parser.add_argument("--alert", action="store_true", help="send new alerts, each once, by the runs' recovery.notify")
    parser.add_argument("--notify", metavar="COMMAND", help="send them by this command instead, for all runs")
    parser.add_argument(
        "--least", type=_share, metavar="SHARE", help="effective share below which an experiment gets an alert"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(words)
    if args.prometheus and args.since:
        parser.error("--prometheus has the whole history, of which Prometheus takes windows itself: leave out --since")
    if args.prometheus and args.prometheus.suffix != ".prom":
        parser.error(f"--prometheus {args.prometheus}: node_exporter reads only files whose names end in .prom")
    if args.notify and not args.alert:
        parser.error("--notify needs --alert")
    if not args.store.is_dir():
        sys.exit(f"megaboa fleet: there is no store {args.store}")
    queue, now = read_queue(), time.time()
    fleet = read_fleet(args.store, queue, now, args.since and now - args.since, args.price)
    found = alerts.alerts(fleet, args.least)
    for why in fleet.broken.values():
        print(f"left out: {why}", file=sys.stderr)
    if args.prometheus:
        files.write_text(args.prometheus, prometheus.text(fleet))
    if args.page:
        from megaboa.report import fleet as page  # with Matplotlib

        files.write_text(args.page, page.render(fleet, found))
    if args.alert:
        try:
            alerts.send(args.store, found, args.notify, print, now)
        except OSError as error:
            sys.exit(f"megaboa fleet: alerts were not sent, as what is sent can't be noted: {error}")
    if args.json:
        print(json.dumps(_record(fleet, found), indent=1))
    elif not (args.prometheus or args.page or args.alert):
        _show(fleet, found)


def _span(text: str) -> float:
    try:
        return _amount(text[:-1]) * UNITS[text[-1:]]
    except (KeyError, ValueError):
        raise argparse.ArgumentTypeError(f"{text!r} is not a duration such as 90m, 12h or 7d") from None


def _amount(text: str) -> float:
    value = float(text)
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{text!r} must be above 0")
    return value


def _share(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be above 0 and at most 1, as in 0.9")
    return value


def _show(fleet: Fleet, found: list[alerts.Alert]) -> None:
    terminal = console()
    if not fleet.runs:
        print(f"{fleet.store}: no run{' in this time' if fleet.since else ' has begun'}")
    else:
        for table in (_experiments(fleet), _causes(fleet), _nodes(fleet)):
            if table.row_count:
                terminal.print(table)
                terminal.print()
    for alert in found:
        terminal.print(
            f"{alert.state.replace('_', ' ')}: {alert}", markup=False, style="bold red", highlight=False, soft_wrap=True
        )


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right", overflow="fold")
    return table


def _experiments(fleet: Fleet) -> Table:
    price = ("cost",) if fleet.price is not None else ()
    table = _table("experiments", "", "runs", "effective", unit(fleet), "lost", "tokens", *price)

    def row(name: str, found: str, use: Use, tokens: int) -> None:
        numbers = (share(use.effective), hours(use.held), hours(use.lost.total()), formats.count(tokens))
        table.add_row(escape(name), found, *numbers, *((cost(fleet, use),) if price else ()))

    for name, use in list(fleet.experiments.items())[:SHOWN]:
        row(name, states(fleet, name), use, sum(run.tokens for run in fleet.of(name)))
    if (more := len(fleet.experiments) - SHOWN) > 0:
        table.add_row(f"and {more} more")
    if len(fleet.experiments) > 1:
        row("all", "", fleet.total, sum(run.tokens for run in fleet.runs))
    return table


def _causes(fleet: Fleet) -> Table:
    table = _table("lost to", "", "ends", unit(fleet), "of all held")
    for name, count, seconds in causes(fleet):
        table.add_row(
            escape(name), str(count), hours(seconds), share(seconds / fleet.total.held if fleet.total.held else None)
        )
    return table


def _nodes(fleet: Fleet) -> Table:
    price = ("cost",) if fleet.price is not None else ()
    columns = (unit(fleet), "effective", "lost to", "tokens", *price, "lost because of it", "")
    table = _table("nodes, those that cost most first", "", *columns)
    for name, use in list(fleet.nodes.items())[:SHOWN]:
        blamed = hours(use.blamed) if use.blamed else ""
        avoided = "avoided" if fleet.avoided(name) else ""
        numbers = (hours(use.held), share(use.effective), escape(losses(use)), formats.count(round(use.tokens)))
        table.add_row(escape(name), *numbers, *((cost(fleet, use),) if price else ()), blamed, avoided)
    if (more := len(fleet.nodes) - SHOWN) > 0:
        table.add_row(f"and {more} more")
    return table


def _record(fleet: Fleet, found: list[alerts.Alert]) -> dict[str, object]:
    """Seconds are of ranks."""
    return {
        "store": str(fleet.store),
        "time": fleet.now,
        "since": fleet.since,
        **_use(fleet, fleet.total),
        "experiments": {name: _use(fleet, use) for name, use in fleet.experiments.items()},
        "nodes": {
            name: {**_use(fleet, use), "tokens": use.tokens, "blamed": use.blamed} for name, use in fleet.nodes.items()
        },
        "runs": [
            {
                "experiment": run.experiment,
                "run": run.run,
                "id": run.identity,
                "state": run.progress.state,
                "device": run.device,
                "step": run.progress.step,
                "tokens": run.tokens,
                "attempts": run.attempts,
                "ends": dict(run.ends),
                "queue_seconds": run.queue_seconds,
                "last_event": run.last_event,
                **_use(fleet, run.use),
            }
            for run in fleet.runs
        ],
        "alerts": [{"state": one.state, "subject": one.subject, "detail": one.detail} for one in found],
        "broken": {str(path): why for path, why in fleet.broken.items()},
    }


def _use(fleet: Fleet, use: Use) -> dict[str, object]:
    price = {"cost": fleet.cost(use)} if fleet.price is not None else {}
    spent, lost = dict(use.spent), dict(use.lost)
    return {"effective": use.effective, "held_seconds": use.held, "spent": spent, "lost": lost, **price}
