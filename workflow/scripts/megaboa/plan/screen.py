"""What a dry run ends with: one screen of runs, what is swept, jobs by kind, hours and warnings."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from megaboa.check.refusals import some, some_of
from megaboa.plan.model import Plan

LINES = 40
SWEPT = 5  # keys that are named
WIDTH = 110  # of a line that lists names
DETAILS = "-p --quiet host"  # also under a profile that is quiet about jobs
FEWEST = 3  # warnings that are shown however long the rest is


@dataclass(frozen=True)
class Job:
    """A job that a call would do. `of` is the run, model or corpus that it is for, '' where there is only one."""

    kind: str
    of: str
    reason: str


@dataclass
class Kind:
    """The jobs of one rule."""

    count: int = 0
    reasons: dict[str, list[str]] = field(default_factory=dict)  # with the names that have it


def lines(plan: Plan, jobs: Collection[Job], submission: Sequence[str], everything: bool = False) -> list[str]:
    """The screen. `submission`: what training asks of a cluster; `everything`: no warning is left out."""
    order = {run.name: index for index, run in enumerate(plan.runs)}
    rows = table(sorted(jobs, key=lambda job: order.get(job.of, 0)), list(dict.fromkeys(job.kind for job in jobs)))
    shown = [heading(plan), *swept(plan), "", *rows, *submission]
    shown += [] if everything else [f"every job with its files and command: the same call with {DETAILS}"]
    noted = [*plan.notes, *map(str, plan.invalid), *warnings(plan)]
    room = len(noted) if everything else max(FEWEST, LINES - len(shown) - 2)
    if len(noted) > room:
        noted = [*noted[: room - 1], f"and {len(noted) - room + 1} more: {DETAILS} shows all"]
    return [*shown, *([""] if noted else []), *noted]


def heading(plan: Plan) -> str:
    count = len(plan.runs)
    return (
        f"experiment {plan.name}: {count} run{'s' if count > 1 else ''} on {plan.experiment.device}, "
        f"in results/{plan.name}/"
    )


def warnings(plan: Plan) -> list[str]:
    return [f"warning: {text} ({some(runs)})" for text, runs in plan.warnings.items()]


def swept(plan: Plan) -> list[str]:
    """The keys in which the runs differ, with their values."""
    values: dict[str, dict[str, None]] = {}
    for run in plan.runs:
        for key, value in run.values.items():
            values.setdefault(key, {})[_value(value)] = None
    listed = [f"  {key}: {_fitting(list(seen), WIDTH - len(key))}" for key, seen in values.items()]
    if len(listed) > SWEPT:
        names = _fitting(list(values)[SWEPT - 1 :], WIDTH)
        listed = [*listed[: SWEPT - 1], f"  and {len(listed) - SWEPT + 1} more keys: {names}"]
    return ["swept:", *listed] if listed else []


def table(jobs: Iterable[Job], order: Iterable[str]) -> list[str]:
    """A line for each rule: how many jobs, and why."""
    kinds = {name: Kind() for name in order}
    for job in jobs:
        kind = kinds[job.kind]
        kind.count += 1
        names = kind.reasons.setdefault(job.reason, [])
        if job.of not in names:
            names.append(job.of)
    if not kinds:
        return ["Nothing to be done: everything is there, and nothing has changed."]
    width = max(len("jobs to do"), *map(len, kinds))
    rows = [f"{'jobs to do':{width}}  count  why"]
    rows += [f"{name:{width}}  {kind.count:>5}  {_why(kind)}" for name, kind in kinds.items()]
    return [*rows, f"{'total':{width}}  {sum(kind.count for kind in kinds.values()):>5}"]


def _why(kind: Kind) -> str:
    """The reasons; names only where not all jobs of the kind have the same one."""
    if len(kind.reasons) == 1:
        (reason, names), *_ = kind.reasons.items()
        return f"{reason}: {some_of(names)}" if reason and any(names) else reason
    return "; ".join(f"{reason}: {some_of(names)}" for reason, names in kind.reasons.items())


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _fitting(names: Sequence[str], width: int) -> str:
    """As many as fit in a line, and how many more there are."""
    text = ""
    for index, name in enumerate(names):
        longer = f"{text}, {name}" if text else name
        if text and len(longer) > width:
            return f"{text} and {len(names) - index} more"
        text = longer
    return text
