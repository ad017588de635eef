"""The page of a fleet: tables and bars of all runs of a store, in one self-contained file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megaboa import formats
from megaboa.observe.alerts import Alert
from megaboa.observe.fleet import USES, Fleet, Use, causes, cost, hours, losses, moment, share, states, unit
from megaboa.report.page import environment
from megaboa.report.style import PALETTE

NAMES = {
    "productive": "steps that counted",
    "checkpoint": "saves",
    "evaluation": "evaluation",
    "start": "first start",
    "idle": "between steps",
    "spare": "spare and replaced nodes",
    "lost": "lost to failures and stops",
}
COLOURS = {
    "productive": PALETTE[0],
    "checkpoint": PALETTE[2],
    "evaluation": PALETTE[4],
    "start": PALETTE[5],
    "idle": PALETTE[7],
    "spare": PALETTE[6],
    "lost": PALETTE[1],
}
MOST_BARS = 40
MOST_ROWS = 500  # limit for runs and for nodes


@dataclass(frozen=True)
class Bar:
    name: str
    parts: tuple[tuple[str, float], ...]  # uses and their shares
    effective: str


def render(fleet: Fleet, alerts: Sequence[Alert]) -> str:
    held = {name: use for name, use in fleet.experiments.items() if use.held}
    shown = [_bar(name, use) for name, use in list(held.items())[:MOST_BARS]]
    uses = [use for use in COLOURS if any(use == one for bar in shown for one, _ in bar.parts)]
    return (
        environment()
        .get_template("fleet.html.j2")
        .render(
            fleet=fleet,
            store=Path(fleet.store).absolute(),
            made=moment(fleet.now),
            since=moment(fleet.since) if fleet.since is not None else None,
            unit=unit(fleet),
            alerts=alerts,
            bars=shown,
            more_bars=len(held) - len(shown),
            uses=uses,
            colours=COLOURS,
            names=NAMES,
            causes=causes(fleet),
            hours=hours,
            losses=losses,
            share=share,
            cost=cost,
            states=states,
            short=formats.count,
            most=MOST_ROWS,
        )
    )


def _bar(name: str, use: Use) -> Bar:
    parts: Mapping[str, float] = {**{one: use.spent[one] for one in USES}, "lost": use.lost.total()}
    shares = tuple((one, parts[one] / use.held) for one in COLOURS if parts[one])
    return Bar(name, shares, share(use.effective))
