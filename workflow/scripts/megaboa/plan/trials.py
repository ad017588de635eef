"""The experiment of `snakemake tune`: which settings of a run are the fastest?

It is an ordinary experiment with its own results, whose runs are the settings to try: the user's run for a few steps
from random weights, in every legal layout that fits, as far as `tune.settings` allows. They aren't trained by a job
each: a single job tries them in turn (run/trials.py).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from megaboa.check import adviser, search_space
from megaboa.check.fact_sources import with_overrides
from megaboa.check.facts import Facts
from megaboa.check.search_space import Candidate
from megaboa.config import ConfigError, LoadedExperiment, Problem
from megaboa.fields import SAME_AS
from megaboa.paths import ExperimentFolder
from megaboa.plan import documents, proof
from megaboa.plan.choices import Choice
from megaboa.plan.plan import Run
from megaboa.plan.planner import make_plan
from megaboa.plan.quantities import overlay
from megaboa.plan.run_facts import known_facts
from megaboa.plan.screen import of_trials
from megaboa.records import Tree

PRECISION, MICRO_BATCH = "training.precision", "training.micro_batch_size"
LABEL = 60  # characters of a setting's name for the values of `tune.also`
WARMUP = 5  # steps in which kernels are selected and memory is allocated; graphs are captured in the fourth
# Sections that don't affect the speed, or only make sense in a complete run.
NOT_TAKEN = (*proof.NOT_TAKEN, "continue_from", "schedule", "recovery", "checkpoint")


@dataclass(frozen=True)
class Option:
    """A candidate combined with values of `tune.also`. `values`: its differences from the user's run."""

    name: str
    candidate: Candidate
    values: Tree
    kind: str = ""  # the values of `tune.also`


def experiment(loaded: LoadedExperiment, results: Path | str = "results") -> tuple[Tree, list[str]]:
    """The experiment's tree, and sentences about it. Raises ConfigError if there is nothing to try."""
    choice = proof.chosen(loaded, "tune", loaded.experiment.tune.run)
    if choice.reference is not None:  # its keys have no place in the experiment's file
        message = (
            f"the run {choice.name!r} repeats {choice.reference!r} for report.agreements, and is as fast: name that"
        )
        raise ConfigError([loaded.problem(("tune", "run"), message)])
    run = next((one for one in make_plan(loaded, results, only=(choice.name,)).runs if one.name == choice.name), None)
    if run is None:
        raise ConfigError([loaded.problem(("tune", "run"), f"the run {choice.name!r} is not legal itself")])
    known = known_facts(run, ExperimentFolder(Path(results, loaded.experiment.experiment)))
    if known is None or known.model.layers is None:
        message = f"the model of the run {run.name!r} is not here yet: call `snakemake data import` first"
        if run.run.is_recipe:
            message = f"preflight has not read the run {run.name!r} as it is now: call `snakemake preflight` first"
        raise ConfigError([loaded.problem(("tune", "run"), message)])
    _check_budget(loaded, run)
    tree = _base(loaded, run, overlay(loaded.raw, choice.values), _swept(choice))
    own, found, said = _options(loaded, tree, run, known)
    chosen = _first(found, loaded.experiment.tune.settings, own)
    said.insert(0, f"{len(found)} legal settings of {run.name} on {run.run.world_size} ranks; {len(chosen)} are tried")
    if len(chosen) < len(found) and chosen[0].candidate.seconds is None:
        said.append("nothing predicts step times here, so that some of each layout are tried: `megaboa calibrate`")
    tree["tune"]["predicted"] = {
        one.name: {"seconds": one.candidate.seconds, "gib": one.candidate.gib} for one in chosen
    }
    return {
        **tree,
        "sweep": {"skip_illegal": True, "runs": {one.name: _nothing_lost(one) for one in chosen}},
    }, said


def _check_budget(loaded: LoadedExperiment, run: Run) -> None:
    limit, hours = loaded.experiment.budget.gpu_hours, of_trials(loaded.experiment.tune, run.config.resources).hours
    if limit is not None and hours > limit:
        message = (
            f"{limit:,.6g} is less than the {hours:,.3g} GPU-hours that the job of all trials may take: lower "
            "tune.minutes or tune.trial_minutes, or raise it"
        )
        raise ConfigError([loaded.problem(("budget", "gpu_hours"), message)])


def _with_values(known: Facts, values: Tree) -> Facts:
    """A recipe's facts with these keys of the experiment applied, as far as they are facts: precision and overrides."""
    named = {key.removeprefix("overrides."): value for key, value in values.items() if key.startswith("overrides.")}
    precision = values.get(PRECISION, known.training.precision)
    return with_overrides(replace(known, training=replace(known.training, precision=precision)), named)


def _nothing_lost(option: Option) -> Tree:
    """An option's values for the sweep, where each run needs a key: the user's own setting repeats its micro-batch."""
    return option.values or {MICRO_BATCH: option.candidate.facts.training.mbs}


def _swept(choice: Choice) -> str:
    """Where the user's experiment has the run: as `tune.swept`."""
    if choice.place[:2] == ("sweep", "runs"):
        return "runs"
    return "grid" if choice.place else "no"


def _base(loaded: LoadedExperiment, run: Run, raw: Tree, swept: str) -> Tree:
    tune = loaded.experiment.tune
    tree = {name: value for name, value in raw.items() if name not in NOT_TAKEN}
    for section in ("training", "optimizer"):
        asked = getattr(run.config, section)
        tree[section] = {name: getattr(asked, name) for name in tree.get(section) or {}}
    tree["training"].pop("train_tokens", None)
    tree["training"] |= {"train_iters": WARMUP + tune.steps, "eval_iters": 0}
    # Random weights have the same speed, and need no import.
    tree["models"] = {
        name: value if value.get("recipe") else {**value, "init": "scratch"} for name, value in tree["models"].items()
    }
    tree["checkpoint"] = {"save_interval": 0}
    tree["profile"] = {"tool": "none", "steps": [WARMUP + 1, WARMUP + tune.steps]}
    tree["trackers"] = {"tensorboard": False}
    tree["experiment"] = f"{loaded.experiment.experiment}-tune-{run.name}"
    tree["device"] = loaded.experiment.device
    tree["tune"] = {**tune.model_dump(mode="json", exclude_unset=True, exclude={"run"}), "trials_of": run.name}
    tree["tune"]["swept"] = swept
    return tree


def _options(loaded: LoadedExperiment, tree: Tree, run: Run, known: Facts) -> tuple[str, list[Option], list[str]]:
    """The name of the user's own option (with facts `known`), all options, most promising first, and sentences about
    values of `tune.also` that aren't legal."""
    also = loaded.experiment.tune.also
    _check(loaded, also)
    every = [dict(zip(also, values, strict=True)) for values in itertools.product(*also.values())]
    combinations = [{key: one[key] for key in one if one[key] != _own_value(run, known, key)} for one in every]
    runs = {f"c{number}": values for number, values in enumerate(combinations) if values}
    facts: list[tuple[Tree, Facts]] = [({}, known)] if {} in combinations else []
    left_out: list[str] = []
    if runs:
        legal = {"own": {MICRO_BATCH: known.training.mbs}}  # a plan needs a run
        try:
            read = proof.read_back({**tree, "sweep": {"skip_illegal": True, "runs": legal | runs}})
            plan = make_plan(replace(read, machine_gpus=loaded.machine_gpus))
        except ConfigError as error:
            raise ConfigError([_in_users_file(loaded, also, problem) for problem in error.problems]) from None
        planned = {one.name: one.facts for one in plan.runs}
        for one in plan.invalid:
            values = ", ".join(f"{key}: {value}" for key, value in runs.get(one.name, {}).items())
            left_out.append(f"tune.also: {values or run.name} isn't tried: {'; '.join(one.reasons)}")
        if run.run.is_recipe:  # the plan has no facts of its own
            planned = {name: _with_values(known, values) for name, values in runs.items() if name in planned}
        facts += [(values, planned[name]) for name, values in runs.items() if name in planned]
    found: dict[str, Option] = {}
    for number, (values, one) in enumerate(facts):
        label = "".join(f"-{_label(key, value)}" for key, value in values.items())
        if len(label) > LABEL:  # names have a limit, and nobody reads such a long one: the table has the keys
            label = f"-also{number}"
        for candidate in search_space.candidates(one):
            differs = {**values, **adviser.differences(candidate.facts, known)}
            found.setdefault(candidate.name + label, Option(candidate.name + label, candidate, differs, label))
    own = next((name for name, option in found.items() if not option.values), None)
    if own is None:
        own = "own"
        found[own] = Option(own, Candidate(known, *search_space.predicted(known)), {})
    return own, sorted(found.values(), key=lambda option: option.candidate.seconds or 0.0), left_out


def _check(loaded: LoadedExperiment, also: Collection[str]) -> None:
    """Refuse keys in `tune.also` that layouts set themselves, that change what is trained, or that need another job."""
    problems = []
    for key in also:
        same = SAME_AS.get(key.removeprefix("overrides."), key)
        if same in adviser.SEARCHED:
            message = "is what the search itself varies: remove it"
        elif key == "overrides.model.recompute_modules":
            message = "says nothing without recompute_granularity, which the search itself varies: remove it"
        elif documents.is_trained(same):
            message = (
                "may decide what is trained, and settings are compared by their seconds per step alone: remove it, or "
                f"set {same} in the run itself"
            )
        elif key.startswith("resources."):
            message = "can't be tried: all trials share one job with the run's nodes: remove it"
        else:
            continue
        problems.append(loaded.problem(("tune", "also", key), message))
    if problems:
        raise ConfigError(problems)


def _in_users_file(loaded: LoadedExperiment, also: Collection[str], problem: Problem) -> Problem:
    """A problem of a run that was made of `tune.also`, whose file is gone when the problem is read."""
    _, _, key = problem.key.partition("sweep.runs.")[2].partition(".")
    at = next((("tune", "also", one) for one in also if key == one or key.startswith(f"{one}.")), ("tune", "also"))
    return loaded.problem(at, problem.message)


def _own_value(run: Run, known: Facts, key: str) -> object:
    """The user's run's value for a key; None if it isn't set, or unknown for a recipe."""
    section, _, name = key.partition(".")
    if section == "overrides":
        return run.config.overrides.get(name)
    asked = getattr(run.config, section, None)
    if run.run.is_recipe and name not in getattr(asked, "model_fields_set", ()):  # attributes would only be defaults
        return {PRECISION: known.training.precision, MICRO_BATCH: known.training.mbs}.get(key)
    return getattr(asked, name, None)


def _label(key: str, value: object) -> str:
    return re.sub(r"[^A-Za-z0-9._]+", "", f"{key.rpartition('.')[2]}.{value}")[:40]


def _first(options: list[Option], most: int, own: str) -> list[Option]:
    """The first options, including the user's own. Without predictions, a selection from all layouts."""
    if options and all(option.candidate.seconds is None for option in options):
        options = _in_turns(options)
    kept = [option for option in options if option.name == own]
    return (kept + [option for option in options if option.name != own])[:most]


def _in_turns(options: Iterable[Option]) -> list[Option]:
    """Options in rotation: the first of each combination of layout and further values, then the second of each, and so
    on."""
    groups: dict[object, list[Option]] = {}
    for option in options:
        groups.setdefault((option.candidate.facts.layout, option.kind), []).append(option)
    turns = itertools.zip_longest(*groups.values())
    return [option for turn in turns for option in turn if option is not None]
