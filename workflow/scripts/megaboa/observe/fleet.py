"""All runs of a store: how their ranks' time was used, what it was lost to, and on which nodes.

`goodput.courses` classifies every second, as in a run's own report. Here the seconds are multiplied by the number of
ranks and clipped to the window, and the cost of a failure is charged to its cause.
"""

from __future__ import annotations

import itertools
import json
import os
import stat
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from megaboa import store_paths
from megaboa.causes import CAUSES
from megaboa.observe.goodput import NOT_ALLOCATED, Course, courses
from megaboa.observe.queue import Queue, with_queue
from megaboa.observe.steps import read_events, step_rows, steps_in
from megaboa.records import (
    AttemptEnd,
    AttemptStart,
    Called,
    Evaluated,
    Event,
    Identity,
    LaunchSpec,
    Left,
    Recovery,
    Saved,
    Step,
    StepEvent,
    Tested,
    TrainStart,
    Unhealthy,
    parse,
    read,
    read_ledger,
)
from megaboa.run import claims, ledger, node_memory
from megaboa.run.node_memory import Remembered
from megaboa.run.progress import Progress, read_progress
from megaboa.scheduler.answers import Life
from megaboa.scheduler.registry import cluster
from megaboa.store_paths import AttemptFolder, RunStore

# Uses of ranks' time that isn't lost to a failure. `start`: of the first attempt, including compilation in its first
# steps. `idle`: between steps. `spare`: nodes that wait to replace others, or were replaced and are still held.
USES = ("productive", "checkpoint", "evaluation", "start", "idle", "spare")
UNRECORDED = "lost"  # the cause of an end that no process could record
REFUSED = {Unhealthy.event: "failed health check", Left.event: "avoided nodes"}  # nodes refused before an attempt
QUIET_SECONDS, QUIET_GAPS = 600.0, 3.0
USUAL_START_MINUTES = 60.0  # the default of recovery.start_minutes


@dataclass
class Use:
    """Rank-seconds. A rank has a GPU, unless it trains on the CPU."""

    spent: Counter[str] = field(default_factory=Counter)  # by use, see USES
    lost: Counter[str] = field(default_factory=Counter)  # by the cause of the attempt's end, or by REFUSED

    @property
    def held(self) -> float:
        return self.spent.total() + self.lost.total()

    @property
    def effective(self) -> float | None:
        """The share of time in steps that counted, as goodput in a report. Spares are excluded."""
        own = self.held - self.spent["spare"]
        return self.spent["productive"] / own if own else None

    def add(self, other: Use) -> None:
        self.spent.update(other.spent)
        self.lost.update(other.lost)


@dataclass
class NodeUse(Use):
    blamed: float = 0.0  # rank-seconds of all nodes, lost to ends and refusals that name this node
    tokens: float = 0.0  # the node's share of the tokens in steps that counted


@dataclass(frozen=True)
class RunUse:
    """One identity of a run."""

    experiment: str
    run: str
    store: RunStore
    device: str
    progress: Progress
    use: Use
    nodes: Mapping[str, NodeUse]
    tokens: int  # in steps that counted
    queue_seconds: float
    held_seconds: float  # wall time, not multiplied by ranks
    attempts: int
    ends: Counter[str]  # number of attempts, by cause
    last_event: float
    quiet_limit: float | None  # seconds without an event that are unusual for this run; None if it isn't training
    notify: str | None  # recovery.notify
    is_ours: bool  # no other user can have written `notify`

    @property
    def name(self) -> str:
        return f"{self.experiment}/{self.run}"

    @property
    def identity(self) -> str:
        return self.store.path.name


@dataclass(frozen=True)
class Fleet:
    store: Path
    now: float
    since: float | None
    price: float | None  # per rank-hour
    runs: tuple[RunUse, ...]
    remembered: Mapping[str, Sequence[Remembered]]  # by cluster
    broken: Mapping[Path, str]  # unreadable ledgers, and why

    @cached_property
    def total(self) -> Use:
        return _sum(run.use for run in self.runs)

    @cached_property
    def experiments(self) -> dict[str, Use]:
        """Use by experiment, largest first."""
        found: dict[str, Use] = defaultdict(Use)
        for run in self.runs:
            found[run.experiment].add(run.use)
        return dict(sorted(found.items(), key=lambda one: -one[1].held))

    @cached_property
    def nodes(self) -> dict[str, NodeUse]:
        """Use by node; those that cost most come first."""
        found: dict[str, NodeUse] = defaultdict(NodeUse)
        for run in self.runs:
            for name, use in run.nodes.items():
                found[name].add(use)
                found[name].blamed += use.blamed
                found[name].tokens += use.tokens
        return dict(sorted(found.items(), key=lambda one: (-one[1].blamed, -one[1].held, one[0])))

    def of(self, experiment: str) -> list[RunUse]:
        return [run for run in self.runs if run.experiment == experiment]

    def cost(self, use: Use) -> float | None:
        return None if self.price is None else self.price * use.held / 3600

    def avoided(self, node: str) -> bool:
        return any(one.node == node and one.avoided for nodes in self.remembered.values() for one in nodes)

    @property
    def ends(self) -> Counter[str]:
        return sum((run.ends for run in self.runs), Counter())

    @property
    def has_only_gpus(self) -> bool:
        return all(run.device != "cpu" for run in self.runs)

    @property
    def latest(self) -> list[RunUse]:
        """The newest identity of every run, as earlier ones are over; sorted by their last event."""
        by_time = sorted(self.runs, key=lambda run: run.last_event)
        return sorted({run.name: run for run in by_time}.values(), key=lambda run: run.last_event)


def read_fleet(store: Path, queue: Queue, now: float, since: float | None = None, price: float | None = None) -> Fleet:
    """Read the whole store. Time before `since` isn't counted; `price` is that of a rank-hour."""
    broken: dict[Path, str] = {}
    ledgers: dict[RunStore, list[Event]] = {}
    for one in store_paths.stores(store):
        try:
            if since is None or _touched(one) >= since:
                ledgers[one] = read_ledger(one.ledger)
        except Exception as error:  # one broken ledger must not hide the others
            broken[one.ledger] = _named(one.ledger, error)
    lives = _lives(ledgers.values())
    runs = []
    for one, entries in ledgers.items():
        try:
            if ledger.starts(entries):
                runs.append(_run(one, entries, lives, queue, now, since or 0.0))
        except Exception as error:
            broken[one.ledger] = _named(one.ledger, error)
    remembered = node_memory.of_store(store, now, node_memory.USUAL_DAYS)
    return Fleet(store, now, since, price, tuple(sorted(runs, key=lambda run: run.name)), remembered, broken)


def _named(path: Path, error: Exception) -> str:
    """An error's message, with the ledger's path if the message doesn't name it."""
    return str(error) if str(path.parent) in str(error) else f"{path}: {type(error).__name__}: {error}"


def _touched(store: RunStore) -> float:
    """The time of the run's last event, by the ledger and the newest attempt's file of steps."""
    newest = [store.attempts[-1].steps] if store.attempts else []
    return max(path.stat().st_mtime for path in (store.ledger, *newest) if path.exists())


def _lives(ledgers: Iterable[Sequence[Event]]) -> list[Life] | None:
    """All jobs' records in the scheduler's accounts, from a single query."""
    jobs = sorted(set().union(*(_jobs(entries) for entries in ledgers)))
    return cluster().lives(jobs)


def _jobs(entries: Sequence[Event]) -> set[str]:
    return {entry.job for entry in entries if isinstance(entry, AttemptStart | Called) and entry.job}


def _run(
    store: RunStore, entries: list[Event], lives: list[Life] | None, queue: Queue, now: float, since: float
) -> RunUse:
    jobs = _jobs(entries)
    own = [life for life in lives or () if life.job in jobs] or None
    events = read_events(store)
    rows = step_rows(events, steps_in(ledger.skipped_steps(entries)))
    found = courses(entries, events, rows, own)
    charges = list(_charges(found, entries, since))
    use, nodes = _booked(charges)
    counted = Counter[int]()  # tokens by attempt
    for row in rows:
        if not row.replayed and row.time >= since:
            counted[row.attempt] += row.tokens or 0
    for course in found:
        if tokens := counted[course.start.attempt]:
            names = _nodes_of(course.start)
            for name in names:
                nodes[name].tokens += tokens / len(names)
    waits = [span for course in found for span in course.before if span[0] == "queue"]
    progress = read_progress(store.path, run=store.path.parent.name, now=now)
    progress = with_queue(progress, queue, (), claims.last_holder(store.claims))
    asked, is_ours = _asked(store.attempt(found[-1].start.attempt))
    return RunUse(
        experiment=store.path.parents[1].name,
        run=store.path.parent.name,
        store=store,
        device=read(Identity, store.identity).run.get("device", "cuda"),
        progress=progress,
        use=use,
        nodes=nodes,
        tokens=counted.total(),
        queue_seconds=sum(_within(begin, end, since) for _, begin, end in waits),
        held_seconds=sum(charge.seconds for charge in charges),
        attempts=sum(course.start.time >= since for course in found),
        ends=Counter(end.cause for end in ledger.ends(entries) if end.cause and end.time >= since),
        last_event=max([entries[-1].time, *(event.time for event in events[-1:])]),
        quiet_limit=_quiet_limit(found, asked) if progress.state == "running" else None,
        notify=asked and asked.notify,
        is_ours=is_ours,
    )


@dataclass(frozen=True)
class _Reason:
    """A use of time or, if it was lost, the end that cost it."""

    used: str | None = None
    cause: str = UNRECORDED
    blamed: tuple[str, ...] = ()  # nodes


@dataclass(frozen=True)
class _Charge:
    seconds: float
    start: AttemptStart  # the attempt whose nodes were held
    reason: _Reason

    def book(self, use: Use, ranks: float) -> None:
        if self.reason.used:
            use.spent[self.reason.used] += self.seconds * ranks
        else:
            use.lost[self.reason.cause] += self.seconds * ranks


def _booked(charges: Iterable[_Charge]) -> tuple[Use, defaultdict[str, NodeUse]]:
    use, nodes = Use(), defaultdict(NodeUse)
    for one in (one for one in charges if one.seconds):
        names = _nodes_of(one.start)
        of_a_node = one.start.world_size / len(names)
        one.book(use, one.start.world_size)
        for name in names:
            one.book(nodes[name], of_a_node)
        for name in (*one.start.spares, *one.start.unused):
            use.spent["spare"] += one.seconds * of_a_node
            nodes[name].spent["spare"] += one.seconds * of_a_node
        for name in one.reason.blamed:
            nodes[name].blamed += one.seconds * one.start.world_size / len(one.reason.blamed)
    return use, nodes


def _nodes_of(start: AttemptStart) -> tuple[str, ...]:
    return start.nodes or (start.host,)


def _charges(found: Sequence[Course], entries: Sequence[Event], since: float) -> Iterator[_Charge]:
    """The charges of a run's attempts.

    A failure costs the steps that are repeated, the time until the next attempt begins, and that attempt's start. An
    attempt without a step is lost completely. Refused nodes cost the time until their refusal.
    """
    ends = {end.attempt: end for end in ledger.ends(entries)}
    previous, begun = None, _Reason("start")
    for course in found:
        own = _cost_of(course.start, ends.get(course.start.attempt))
        for kind, begin, end in course.before:
            if kind not in NOT_ALLOCATED:
                held_by = previous.start if previous and kind == "idle" else course.start
                for left, right, reason in _refusals(begin, end, entries, begun):
                    yield _Charge(_within(left, right, since), held_by, reason)
        wasted = own and not any(isinstance(event, Step) for event in course.events)
        for number, (kind, begin, end) in enumerate(course.during, start=1):
            if wasted or kind == "lost" or (kind == "idle" and own and number == len(course.during)):
                reason = own or _Reason()
            elif kind in ("startup", "compile"):
                reason = begun
            else:
                reason = _Reason(kind)
            yield _Charge(_within(begin, end, since), course.start, reason)
        previous, begun = course, own or _Reason()


def _refusals(
    begin: float, end: float, entries: Sequence[Event], otherwise: _Reason
) -> Iterator[tuple[float, float, _Reason]]:
    """Split a time without ranks into the parts that refused nodes cost, each from the ledger's previous entry on, and
    the rest."""
    for previous, entry in itertools.pairwise(entries):
        if isinstance(entry, Unhealthy | Left) and begin < entry.time <= end:
            middle = min(max(begin, previous.time), entry.time)
            bad = entry.bad_nodes if isinstance(entry, Unhealthy) else entry.nodes
            yield begin, middle, otherwise
            yield middle, entry.time, _Reason(cause=entry.event, blamed=bad)
            begin = entry.time
    yield begin, end, otherwise


def _cost_of(start: AttemptStart, end: AttemptEnd | None) -> _Reason | None:
    """The reason that the costs of an attempt's end are charged to; None if it hasn't ended, or ended successfully."""
    if end is None or (end.cause is None and end.outcome == "completed"):
        return None
    known = {*start.nodes, *start.spares}
    return _Reason(cause=end.cause or UNRECORDED, blamed=tuple(node for node in end.bad_nodes if node in known))


def _within(begin: float, end: float, since: float) -> float:
    return max(0.0, end - max(begin, since))


def _sum(uses: Iterable[Use]) -> Use:
    total = Use()
    for use in uses:
        total.add(use)
    return total


def _asked(attempt: AttemptFolder) -> tuple[Recovery | None, bool]:
    """The run's recovery settings (older attempts have none), and whether only this user can have written them."""
    try:
        descriptor = os.open(attempt.asked, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return None, False
    with open(descriptor, encoding="utf-8") as stream:
        facts = os.fstat(descriptor)
        asked = parse(LaunchSpec, json.load(stream).get("launch", {}), attempt.asked)
    writable = stat.S_IWGRP | stat.S_IWOTH
    return asked.recovery, facts.st_uid == os.geteuid() and not facts.st_mode & writable


def _quiet_limit(found: Sequence[Course], asked: Recovery | None) -> float:
    """The silence that is unusual for a run: a multiple of its longest one in normal operation.

    Before the present attempt's first step it is a multiple of the slowest start.
    """
    gaps = [gap for course in found for gap in _gaps(course.events)]
    if any(isinstance(event, Step) for event in found[-1].events) and gaps:
        return max(QUIET_SECONDS, QUIET_GAPS * max(gaps))
    starts = [first.time - course.start.time for course in found if (first := _first_step(course.events))]
    if not starts:
        return 60 * (asked.start_minutes if asked else USUAL_START_MINUTES)
    return max(QUIET_SECONDS, QUIET_GAPS * max(starts))


def _gaps(events: Sequence[StepEvent]) -> Iterator[float]:
    done = [event.time for event in events if isinstance(event, TrainStart | Step | Saved | Evaluated | Tested)]
    return (right - left for left, right in itertools.pairwise(done))


def _first_step(events: Sequence[StepEvent]) -> Step | None:
    return next((event for event in events if isinstance(event, Step)), None)


# Output for people


def causes(fleet: Fleet) -> list[tuple[str, int, float]]:
    """The noun of each cause, the number of attempts that it ended, and the rank-seconds lost to it; largest loss
    first."""
    lost, ends = fleet.total.lost, fleet.ends
    names = sorted({*lost, *ends}, key=lambda one: (-lost[one], -ends[one], one))
    return [(_noun(name), ends[name], lost[name]) for name in names]


def losses(use: Use) -> str:
    """Hours lost by cause, largest first: `node failure 1.2, hang 0.3`."""
    return ", ".join(f"{_noun(cause)} {hours(seconds)}" for cause, seconds in use.lost.most_common() if seconds)


def _noun(cause: str) -> str:
    return CAUSES[cause].noun if cause in CAUSES else REFUSED.get(cause, cause)


def unit(fleet: Fleet) -> str:
    return "GPU-hours" if fleet.has_only_gpus else "rank-hours"


def hours(seconds: float) -> str:
    """Hours with two significant digits if below 1, and without decimals from 100 on."""
    value = seconds / 3600
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2g}"


def share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def cost(fleet: Fleet, use: Use) -> str:
    value = fleet.cost(use)
    return "" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:,.2f}"


def states(fleet: Fleet, experiment: str) -> str:
    """The present states of an experiment's runs: `3 running, 2 done`."""
    found = [run.progress.state for run in fleet.latest if run.experiment == experiment]
    return ", ".join(f"{found.count(state)} {state}" for state in sorted(set(found)))


def moment(when: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(when))
