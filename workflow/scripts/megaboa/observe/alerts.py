"""Alerts about a fleet that no single run reports. Each is sent once."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megaboa import store_paths
from megaboa.observe.fleet import Fleet, RunUse
from megaboa.records import SentAlerts, read_if_there, write
from megaboa.run.announce import notify
from megaboa.run.node_memory import DAY
from megaboa.run.progress import format_age
from megaboa.store import locked

RECENT_DAYS = 7.0  # no alerts about runs whose last event is older
LEAST_HELD_SECONDS = 3600.0  # less time would be dominated by starts
SILENT_DAYS = 1.0  # an alert isn't repeated within this time


@dataclass(frozen=True)
class Alert:
    state: Literal["quiet", "lost", "ineffective", "bad_node"]
    subject: str  # `<experiment>/<run>`, an experiment, or a node
    detail: str
    key: str  # identifies the occasion, so that it is reported once
    run: RunUse | None  # the run whose recovery.notify sends the alert

    def __str__(self) -> str:
        return f"{self.subject}: {self.detail}"


def alerts(fleet: Fleet, least: float | None = None) -> list[Alert]:
    """The alerts of a fleet. `least`: an experiment with a lower effective share of its time gets an alert."""
    recent = [run for run in fleet.latest if fleet.now - run.last_event < RECENT_DAYS * DAY]
    found = [alert for run in recent for alert in _of_run(run, fleet.now)]
    found += _of_experiments(fleet, recent, least) if least else []
    return [*found, *_of_nodes(fleet)]


def _of_run(run: RunUse, now: float) -> Iterator[Alert]:
    progress, key = run.progress, f"{run.name} {run.identity} {run.progress.attempt}"
    if progress.state == "lost" or (progress.state == "interrupted" and progress.goes_on):
        why = progress.detail or "its job is gone"
        yield Alert("lost", run.name, f"nobody trains it any more ({why}): call again", f"lost {key}", run)
    silent = now - run.last_event
    if run.quiet_limit is not None and silent > run.quiet_limit:
        usual = format_age(run.quiet_limit)
        text = f"has done nothing for {format_age(silent)}, at step {progress.step} (limit by its own past: {usual})"
        yield Alert("quiet", run.name, text, f"quiet {key}", run)


def _of_experiments(fleet: Fleet, recent: Sequence[RunUse], least: float) -> Iterator[Alert]:
    newest = {run.experiment: run for run in recent}  # ordered by their last event
    for experiment, run in newest.items():
        use, held = fleet.experiments[experiment], sum(one.held_seconds for one in fleet.of(experiment))
        if held >= LEAST_HELD_SECONDS and use.effective is not None and use.effective < least:
            text = f"{use.effective:.1%} of its time was effective, less than {least:.0%}"
            yield Alert("ineffective", experiment, text, f"ineffective {experiment}", run)


def _of_nodes(fleet: Fleet) -> Iterator[Alert]:
    runs = {run.name: run for run in fleet.latest}
    for cluster, nodes in fleet.remembered.items():
        for node in (node for node in nodes if node.avoided):
            last = node.troubles[-1]
            what = f"{last.what.replace('_', ' ')}{f': {last.detail}' if last.detail else ''}"
            text = f"its troubles count {node.score:.1f}, so runs avoid it; the last one: {what}"
            yield Alert("bad_node", node.node, text, f"bad_node {cluster} {node.node}", runs.get(last.run or ""))


def send(store: Path, found: Sequence[Alert], command: str | None, say: Callable[[str], None], now: float) -> None:
    """Send the alerts that this user hasn't been sent yet, with `command` or else the run's recovery.notify.

    If the command fails, the next call sends the alert again.
    """
    path = store_paths.sent_alerts(store, os.geteuid())
    with locked(path.with_suffix(".lock")):
        before = read_if_there(SentAlerts, path)
        sent = dict(before.alerts) if before else {}
        current = {alert.key for alert in found}
        sent = {key: when for key, when in sent.items() if key in current or now - when < SILENT_DAYS * DAY}
        write(path, SentAlerts(alerts=sent))  # before any command runs: if this can't be written, nothing is sent
        for alert in (alert for alert in found if alert.key not in sent):
            say(str(alert))
            if why := None if command else _has_no_command(alert.run):
                say(f"  not sent: {why} (--notify COMMAND sends all)")
            elif problem := _send(alert, command or str(alert.run.notify)):
                say(f"  {problem}")
                continue
            sent[alert.key] = now
            write(path, SentAlerts(alerts=sent))  # this process may be killed during a command, which may take a minute


def _has_no_command(run: RunUse | None) -> str | None:
    if run is None or not run.notify:
        return "no recovery.notify is known for it"
    return None if run.is_ours else "others can have written its recovery.notify, which isn't executed"


def _send(alert: Alert, command: str) -> str | None:
    run = alert.run
    about = {"experiment": run.experiment if run else "", "run": run.run if run else ""}
    if alert.state == "ineffective":
        about["run"] = ""
    node = alert.subject if alert.state == "bad_node" else ""
    return notify(command, **about, node=node, state=alert.state, detail=str(alert))
