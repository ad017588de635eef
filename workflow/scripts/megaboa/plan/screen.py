"""Summary of a call's plan: the screen of a dry run, and the requests of training to a cluster.

The screen shows the runs, swept keys, jobs by kind, hours and warnings.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megaboa.check.refusals import some
from megaboa.config.models.outputs import Tune
from megaboa.config.models.resources import Resources
from megaboa.formats import counted, some_of
from megaboa.plan.plan import Plan, Run
from megaboa.run.recovery import wall_seconds

LINES = 40
SWEPT = 5  # number of keys that are named
WIDTH = 110  # width of a line that lists names
DETAILS = "-p --quiet host"  # options that show jobs even under a quiet profile
FEWEST = 3  # minimum number of warnings, however long the rest is

Range = tuple[float, float]


@dataclass(frozen=True)
class Job:
    """A job that a call would run. `of`: the run, model or corpus that it is for; empty if there is only one."""

    kind: str
    of: str
    reason: str


@dataclass
class Kind:
    """The jobs of one rule."""

    count: int = 0
    reasons: dict[str, dict[str, None]] = field(default_factory=dict)  # reason -> names of the jobs, in order


def lines(
    plan: Plan,
    jobs: Collection[Job],
    submission: Sequence[str],
    everything: bool = False,
    outlooks: Sequence[str] = (),
) -> list[str]:
    """The lines of the screen.

    `submission`: what training asks of a cluster; `everything`: show all warnings; `outlooks`: where runs that have
    begun will start.
    """
    if plan.experiment.image.runtime == "none":  # the job has the name of what it makes with a container
        packages = "no container: it lists this Python's packages"
        jobs = [replace(job, reason=f"{job.reason} ({packages})") if job.kind == "image" else job for job in jobs]
    order = {run.name: index for index, run in enumerate(plan.runs)}
    rows = table(sorted(jobs, key=lambda job: order.get(job.of, 0)), list(dict.fromkeys(job.kind for job in jobs)))
    shown = [heading(plan), *swept(plan), *continued(plan), "", *rows, *outlooks, *submission]
    shown += [] if everything else [f"every job with its files and command: the same call with {DETAILS}"]
    noted = [*plan.notes, *plan.left_out, *warnings(plan)]
    room = len(noted) if everything else max(FEWEST, LINES - len(shown) - 2)
    if len(noted) > room:
        noted = [*noted[: room - 1], f"and {len(noted) - room + 1} more: {DETAILS} shows all"]
    return [*shown, *([""] if noted else []), *noted]


def heading(plan: Plan) -> str:
    count = counted(len(plan.runs), "run")
    return f"experiment {plan.name}: {count} on {plan.experiment.device}, in results/{plan.name}/"


def warnings(plan: Plan) -> list[str]:
    return [f"warning: {text} ({some(runs)})" for text, runs in plan.warnings.items()]


def swept(plan: Plan) -> list[str]:
    """The keys in which runs differ, with their values."""
    values: dict[str, dict[str, None]] = {}
    for run in plan.runs:
        for key, value in run.values.items():
            values.setdefault(key, {})[_value(value)] = None
    listed = [f"  {key}: {_fitting(list(seen), WIDTH - len(key))}" for key, seen in values.items()]
    if len(listed) > SWEPT:
        names = _fitting(list(values)[SWEPT - 1 :], WIDTH)
        listed = [*listed[: SWEPT - 1], f"  and {len(listed) - SWEPT + 1} more keys: {names}"]
    return ["swept:", *listed] if listed else []


def continued(plan: Plan) -> list[str]:
    """The runs that continue from a checkpoint, and the steps that they train."""
    groups: dict[str, list[str]] = {}
    for run in plan.runs:
        if parent := run.run.parent:
            groups.setdefault(parent.steps(run.facts.training.iters), []).append(run.name)
    listed = [f"  {some_of(names)}: {steps}" for steps, names in groups.items()]
    if len(listed) > SWEPT:
        listed = [*listed[: SWEPT - 1], f"  and {len(listed) - SWEPT + 1} more parents"]
    return ["continue from a checkpoint:", *listed] if listed else []


def table(jobs: Iterable[Job], order: Iterable[str]) -> list[str]:
    """A line for each rule: the number of jobs, and the reasons."""
    kinds = {name: Kind() for name in order}
    for job in jobs:
        kind = kinds[job.kind]
        kind.count += 1
        kind.reasons.setdefault(job.reason, {})[job.of] = None
    if not kinds:
        return ["Nothing to be done: everything exists, and nothing has changed."]
    width = max(len("jobs to do"), *map(len, kinds))
    rows = [f"{'jobs to do':{width}}  count  why"]
    rows += [f"{name:{width}}  {kind.count:>5}  {_why(kind)}" for name, kind in kinds.items()]
    return [*rows, f"{'total':{width}}  {sum(kind.count for kind in kinds.values()):>5}"]


def _why(kind: Kind) -> str:
    """The reasons, each with the names of its jobs, if they have any."""
    if len(kind.reasons) == 1:
        (reason, names), *_ = kind.reasons.items()
        return f"{reason}: {some_of(list(names))}" if reason and any(names) else reason
    return "; ".join(f"{reason}: {some_of(list(names))}" for reason, names in kind.reasons.items())


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _fitting(names: Sequence[str], width: int) -> str:
    """As many names as fit into the width, and the number of others."""
    text = ""
    for index, name in enumerate(names):
        longer = f"{text}, {name}" if text else name
        if text and len(longer) > width:
            return f"{text} and {len(names) - index} more"
        text = longer
    return text


@dataclass(frozen=True)
class Submission:
    """The training jobs that a call would submit; `ranks` are GPUs, or processes on the CPU."""

    runs: int  # in the plan, including trained ones
    jobs: int  # one for each run that isn't trained yet
    nodes: int = 0  # of the largest job, like ranks_per_node
    ranks_per_node: int = 0
    spares: int = 0  # its spare nodes
    alike: bool = True  # whether all jobs have that size
    ranks: int = 0  # of all jobs together
    wall_seconds: Range = (0, 0)  # of a job: shortest and longest
    hours: float = 0.0  # rank-hours, if each job uses up its wall time once
    estimated: int = 0  # runs with known seconds per step; the following refers to these
    by: tuple[str, ...] = ()  # where these seconds come from
    links: Range | None = None  # number of consecutive jobs that a run needs
    expected_hours: float = 0.0


def submission(runs: Collection[Run], trained: Collection[str] = ()) -> Submission:
    """Totals of the runs that still need training; `trained`: names of the others."""
    wanted = [run for run in runs if run.name not in trained]
    if not wanted:
        return Submission(len(runs), 0)
    resources = [run.config.resources for run in wanted]
    largest = max(resources, key=lambda asked: (_ranks(asked), asked.nodes))
    walls = [wall_seconds(asked.runtime) for asked in resources]
    counts = {run.name: run.jobs for run in wanted}
    jobs = [count for count in counts.values() if count is not None]
    estimated = [run for run in wanted if counts[run.name] is not None]
    return Submission(
        runs=len(runs),
        jobs=len(wanted),
        nodes=largest.nodes,
        ranks_per_node=largest.gpus_per_node,
        spares=largest.spare_nodes,
        alike=len({(asked.nodes, asked.gpus_per_node, asked.spare_nodes) for asked in resources}) == 1,
        ranks=sum(map(_ranks, resources)),
        wall_seconds=_range(walls),
        hours=sum(_held(asked) * wall for asked, wall in zip(resources, walls, strict=True)) / 3600,
        estimated=len(estimated),
        by=_sources(estimated),
        links=_range(jobs) if jobs else None,
        expected_hours=sum(map(_expected_hours, estimated)),
    )


def describe(found: Submission, device: str) -> list[str]:
    """For people, in one line or two."""
    unit = "GPU" if device == "cuda" else "rank"
    trained = found.runs - found.jobs
    if not found.jobs:
        return [f"training: nothing to submit, {counted(trained, 'run')} trained"]
    rest = f" ({counted(trained, 'run')} trained already)" if trained else ""
    size = f"{counted(found.nodes, 'node')} x {counted(found.ranks_per_node, unit)}"
    size += f" and {counted(found.spares, 'spare')}" if found.spares else ""
    hours, wall = _hours(found.hours, unit), _span(found.wall_seconds, _duration)
    if found.jobs == 1:
        lines = [f"training: 1 job{rest}, {size}; at most {hours} for the job of {wall}"]
    else:
        which = "each" if found.alike else "the largest"
        total = f"{counted(found.jobs, 'job')}{rest}, {which} {size}, {counted(found.ranks, unit)} in all"
        lines = [f"training: {total}; at most {hours} for one job each of {wall}"]
    if found.links:
        part = "" if found.estimated == found.jobs else f" ({found.estimated:,} of {found.jobs:,} runs)"
        chain = " jobs, one after the other" if found.links[1] > 1 else " job"
        lines.append(
            f"by {' and '.join(found.by)}{part}: a run needs {_span(found.links, '{:,}'.format)}{chain}; "
            f"about {_hours(found.expected_hours, unit)} in all"
        )
    return lines


@dataclass(frozen=True)
class Trials:
    """The job of `snakemake tune`, which tries all settings in turn."""

    nodes: int
    ranks_per_node: int
    seconds: float  # at most: no trial begins after tune.minutes, and none takes longer than tune.trial_minutes

    @property
    def hours(self) -> float:
        """Rank-hours."""
        return self.nodes * self.ranks_per_node * self.seconds / 3600


def of_trials(tune: Tune, asked: Resources) -> Trials:
    seconds = min(wall_seconds(asked.runtime), 60 * (tune.minutes + tune.trial_minutes))
    return Trials(asked.nodes, asked.gpus_per_node, seconds)


def describe_trials(found: Trials, settings: int, device: str) -> str:
    unit = "GPU" if device == "cuda" else "rank"
    size = f"{counted(found.nodes, 'node')} x {counted(found.ranks_per_node, unit)}"
    hours = f"{_hours(found.hours, unit)} in {_duration(found.seconds)} of trials"
    return f"tuning: 1 job for {counted(settings, 'setting')}, {size}; at most {hours}"


def _ranks(asked: Resources) -> int:
    return asked.nodes * asked.gpus_per_node


def _held(asked: Resources) -> int:
    """GPUs that a job holds, including those on spare nodes."""
    return (asked.nodes + asked.spare_nodes) * asked.gpus_per_node


def _expected_hours(run: Run) -> float:
    asked = run.config.resources
    return _held(asked) * (run.facts.training.own_iters or 0) * (run.step_seconds or 0) / 3600


def _sources(runs: Iterable[Run]) -> tuple[str, ...]:
    """Where the runs' step times come from; a prediction with its error, unless there are several."""
    sources = dict.fromkeys(run.costs.source if run.costs else "given" for run in runs)
    several = sum(source.startswith("predicted") for source in sources) > 1

    def told(source: str) -> str:
        if source.startswith("predicted"):
            return "predicted step times" if several else f"step times {source}"
        words = {"given": "resources.step_seconds", "measured": "step times of earlier runs"}
        return words.get(source, "budget.mfu")

    return tuple(dict.fromkeys(map(told, sources)))


def _range(values: Iterable[float]) -> Range:
    values = list(values)
    return min(values), max(values)


def _hours(hours: float, unit: str) -> str:
    return f"{hours:,.0f} {unit}-hours" if hours >= 10 else f"{hours:.2g} {unit}-hours"


def _span(values: Range, shown: Callable[[float], str]) -> str:
    first, last = (shown(value) for value in values)
    return first if first == last else f"{first} to {last}"


def _duration(seconds: float) -> str:
    """`45m`, `4h`, `2d`, as in resources.runtime."""
    minutes = round(seconds / 60)
    for size, unit in ((1440, "d"), (60, "h")):
        if minutes % size == 0:
            return f"{minutes // size}{unit}"
    return f"{minutes}m"
