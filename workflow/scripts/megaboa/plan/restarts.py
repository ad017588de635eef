"""Runs that have begun before: which resume and which train again; edits must not abandon unfinished work unasked."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from megaboa.config.problems import choose
from megaboa.errors import InputError
from megaboa.formats import some_of
from megaboa.paths import RunFolder
from megaboa.plan.mismatches import obstacles
from megaboa.plan.plan import Plan, Run
from megaboa.records import Tree, plain
from megaboa.run import unfinished
from megaboa.run.identity import identity_of, is_trained
from megaboa.run.outlook import LENGTH, outlook

KEY = "restart"
SHOWN = 5
HOW_TO_END = "docs/how-to/checkpoints.md, 'End a run early'"


class UnfinishedWorkError(InputError):
    """A run would start at step 0, although a store has unfinished work of it."""


def split(given: Mapping[str, Any]) -> tuple[Tree, list[str]]:
    """`--config` without `restart`, and the runs that `restart` names."""
    asked = given.get(KEY, [])
    names = asked if isinstance(asked, list) else str(asked).split(",")
    return {key: value for key, value in given.items() if key != KEY}, [str(name).strip() for name in names]


def check(
    plan: Plan, results: str, restart: list[str], checked_by_jobs: Callable[[Run], bool] = lambda run: False
) -> list[str]:
    """The runs that restart on request; raises an error if any other run would restart.

    `checked_by_jobs`: whether a run's content isn't known yet, or this call doesn't train it. Its job checks again.
    """
    names = [run.name for run in plan.runs]
    for name in restart:
        if name != "all" and name not in names:
            raise UnfinishedWorkError(f"--config {KEY}: {choose(name, [*names, 'all'], 'run')}")
    told = [name for name in names if name in restart or "all" in restart]
    found: dict[str, str] = {}
    against: set[str] = set()
    step = 0
    for run in plan.runs:
        folder = run.folder(results, plan.name)
        if run.name not in told and (work := unfinished.other_work(folder)) and not is_trained(folder):
            if not unfinished.other_work(_folder(plan, run, results)):  # read only here, as most runs have none
                continue
            if all(one.by_content for one in work) and checked_by_jobs(run):
                continue
            found[run.name] = unfinished.explain(folder, work)
            against.update(*(obstacles(run, one.store, one.step) for one in work))
            step = max(step, *(one.step for one in work))
    if found:
        raise UnfinishedWorkError(_message(found, _keys_to_continue(against, step)))
    return told


def outlooks(
    plan: Plan,
    results: str,
    starting: Collection[str],
    restarted: Collection[str] = (),
    making: Callable[[str], Collection[str]] = lambda run: (),
) -> list[str]:
    """A line for each run that will start and has begun before: whether it resumes or trains again, and why.

    `making`: the jobs before a run that make its data or model again, after which it may be another run. Only the runs
    that are shown are read.
    """
    runs = [(run, _folder(plan, run, results)) for run in plan.runs if run.name in starting]
    begun = [(run, folder) for run, folder in runs if folder.attempts_link.exists() or folder.has_lost_its_store]
    names = {run.name for run, _ in begun}
    new = [run.name for run, _ in runs if run.launch.continues and not run.run.parent and run.name not in names]
    told = (
        (
            run.name,
            _after(folder, making(run.name), run.name in restarted)
            or _with_parent(plan, run, results, starting)
            or outlook(folder, run.name in restarted, functools.partial(obstacles, run)),
        )
        for run, folder in begun[:SHOWN]
    )
    lines = [f"{name} {said}" for name, said in told if said]
    if new:
        lines.append(f"nothing to continue from (continue_from: itself), so begins at step 0: {some_of(new)}")
    return [*lines, f"and {len(begun) - SHOWN} more that have begun"] if len(begun) > SHOWN else lines


def _folder(plan: Plan, run: Run, results: str) -> RunFolder:
    """The run's folder, with the identity of its parent as that is planned now: its train.json may be of what it was
    planned as before."""
    folder, parent = run.folder(results, plan.name), run.run.parent
    if parent is None or parent.identity or parent.experiment != plan.name:
        return folder
    try:
        identity = identity_of(_folder(plan, plan[parent.run], results)).digest
    except FileNotFoundError:  # what the parent reads isn't made yet
        return folder
    spec = replace(run.run, parent=replace(parent, identity=identity))
    return RunFolder(folder.path, {**folder.documents, "run": plain(spec)})


def _after(folder: RunFolder, making: Collection[str], restarts: bool) -> str | None:
    """What is said of a run whose data or model is made again before it."""
    if not making:
        return None
    step = 0 if restarts else unfinished.kept_step(folder)
    does = f"stops, and keeps its step {step}," if step else "trains again"
    return f"{does} if what it reads has changed, which is known after {', '.join(sorted(making))}"


def _with_parent(plan: Plan, run: Run, results: str, starting: Collection[str]) -> str | None:
    """What is said of a run if a run of this plan that it continues from, however far back, has become another one."""
    here, parent = {one.name for one in plan.runs} & set(starting), run.run.parent
    while parent and not parent.identity and parent.experiment == plan.name and parent.run in here - {run.name}:
        if unfinished.others(_folder(plan, plan[parent.run], results)):
            return f"trains again after {parent.run}, which it continues from"
        parent = plan[parent.run].run.parent
    return None


def _keys_to_continue(against: Collection[str], step: int) -> str | None:
    """The keys with which the runs continue from what they have trained; None if more than their length is against
    it."""
    if not against:
        return unfinished.IN_PLACE
    if set(against) == {LENGTH}:
        return f"{unfinished.IN_PLACE}, and {LENGTH} above {step}; {HOW_TO_END}"
    return None


def _message(found: dict[str, str], there: str | None) -> str:
    names = list(found)
    lines = [found[name] for name in names[:SHOWN]]
    if len(names) > SHOWN:
        lines.append(f"and so would {len(names) - SHOWN} more: {', '.join(names[SHOWN:])}")
    return "\n".join([*lines, unfinished.ways(f"--config {KEY}={','.join(names)}", there)])
