"""What training asks of a cluster: how many jobs, how large, and how many hours."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from megaboa.config.models.resources import Resources
from megaboa.plan.model import Run
from megaboa.run.recovery import wall_seconds

Range = tuple[float, float]


@dataclass(frozen=True)
class Submission:
    """The training jobs that a call would submit; `ranks` are GPUs, or processes on the CPU."""

    runs: int  # of the plan, trained ones too
    jobs: int  # one for each run that isn't trained yet
    nodes: int = 0  # of the largest job, as ranks_per_node
    ranks_per_node: int = 0
    alike: bool = True  # whether all jobs are of that size
    ranks: int = 0  # of all jobs together
    wall_seconds: Range = (0, 0)  # of a job: shortest and longest
    hours: float = 0.0  # rank-hours, if each job uses up its wall time once
    estimated: int = 0  # runs whose seconds per step are given; what follows is about these
    links: Range | None = None  # jobs that a run needs, one after the other
    expected_hours: float = 0.0


def submission(runs: Collection[Run], trained: Collection[str] = ()) -> Submission:
    """Sum up the runs that are still to be trained; `trained` are the names of the others."""
    wanted = [run for run in runs if run.name not in trained]
    if not wanted:
        return Submission(len(runs), 0)
    resources = [run.config.resources for run in wanted]
    largest = max(resources, key=lambda asked: (_ranks(asked), asked.nodes))
    walls = [wall_seconds(asked.runtime) for asked in resources]
    estimated = [run for run in wanted if run.row["jobs"] is not None]
    return Submission(
        runs=len(runs),
        jobs=len(wanted),
        nodes=largest.nodes,
        ranks_per_node=largest.gpus_per_node,
        alike=len({(asked.nodes, asked.gpus_per_node) for asked in resources}) == 1,
        ranks=sum(map(_ranks, resources)),
        wall_seconds=_range(walls),
        hours=sum(_ranks(asked) * wall for asked, wall in zip(resources, walls, strict=True)) / 3600,
        estimated=len(estimated),
        links=_range([run.row["jobs"] for run in estimated]) if estimated else None,
        expected_hours=sum(map(_expected_hours, estimated)),
    )


def describe(found: Submission, device: str) -> list[str]:
    """For people, in one line or two."""
    unit = "GPU" if device == "cuda" else "rank"
    trained = found.runs - found.jobs
    if not found.jobs:
        return [f"training: nothing to submit, {_count(trained, 'run')} trained"]
    rest = f" ({_count(trained, 'run')} trained already)" if trained else ""
    size = f"{_count(found.nodes, 'node')} x {_count(found.ranks_per_node, unit)}"
    hours, wall = _hours(found.hours, unit), _span(found.wall_seconds, _duration)
    if found.jobs == 1:
        lines = [f"training: 1 job{rest}, {size}; at most {hours} for the job of {wall}"]
    else:
        which = "each" if found.alike else "the largest"
        total = f"{_count(found.jobs, 'job')}{rest}, {which} {size}, {_count(found.ranks, unit)} in all"
        lines = [f"training: {total}; at most {hours} for one job each of {wall}"]
    if found.links:
        part = "" if found.estimated == found.jobs else f" ({found.estimated:,} of {found.jobs:,} runs)"
        chain = " jobs, one after the other" if found.links[1] > 1 else " job"
        lines.append(
            f"by resources.step_seconds{part}: a run needs {_span(found.links, '{:,}'.format)}{chain}; "
            f"about {_hours(found.expected_hours, unit)} in all"
        )
    return lines


def _ranks(asked: Resources) -> int:
    return asked.nodes * asked.gpus_per_node


def _expected_hours(run: Run) -> float:
    asked = run.config.resources
    return _ranks(asked) * run.row["train_iters"] * (asked.step_seconds or 0) / 3600


def _range(values: Iterable[float]) -> Range:
    values = list(values)
    return min(values), max(values)


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


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
