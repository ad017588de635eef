"""What a call is asked for: its configuration, its words, and the experiments that `prove` and `tune` run instead."""

from __future__ import annotations

import functools
import itertools
import json
import operator
import os
import shlex
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from megaboa import files
from megaboa.calls import say
from megaboa.config import DEFAULT_CONFIG, LoadedExperiment, load
from megaboa.errors import InputError
from megaboa.paths import ExperimentFolder
from megaboa.plan import proof, restarts, trials
from megaboa.plan.plan import Run
from megaboa.plan.shared import Shared
from megaboa.records import Tree

OWN_TARGETS = {"prove": proof.experiment, "tune": trials.experiment}
BEFORE_TRAINING = {"image", "preflight", "data", "import"}  # targets
LOOKS = {
    *("--dag", "--rulegraph", "--filegraph", "--d3dag", "--summary", "-S", "--detailed-summary", "-D", "--lint"),
    *("--list-rules", "--list", "-l", "--list-target-rules", "--lt", "--list-changes", "--list-untracked", "--lu"),
    *("--report", "--unlock", "--cleanup-metadata", "--print-compilation", "--archive"),
}  # Snakemake's other options that inspect a workflow without running its jobs


def files_and_values(workflow: Any, config: Tree) -> tuple[list[Path], Tree]:
    """The experiment's files, and the values from the command line that override them.

    As a module, Megaboa gets its configuration from the surrounding workflow: all of it, or a part, which is written to
    a file of its own.
    """
    given = list(workflow.config_settings.configfiles)
    if workflow.modifier.is_main_snakefile():
        return list(map(Path, workflow.configfiles)) or [DEFAULT_CONFIG], workflow.config_settings.config
    if workflow.modifier.modify_path("results") != "results":
        raise InputError("as a module, Megaboa takes neither `prefix` nor `replace_prefix`: it writes to results/")
    if config == workflow.modifier_stack[0].globals["config"]:
        declared = [path for path in map(Path.absolute, map(Path, workflow.configfiles)) if path not in given]
        return [*declared, *given], workflow.config_settings.config
    path = Path("results", ".modules", f"{workflow.modifier.namespace}.yaml")
    files.write_if_changed(path, yaml.safe_dump(json.loads(json.dumps(config)), sort_keys=False))
    told = workflow.config_settings.config
    return [path], {key: told[key] for key in (restarts.KEY,) if key in told}


def looks_only(dry_run: bool, words: Collection[str]) -> bool:
    """Whether a call of Snakemake with these words submits nothing."""
    return dry_run or not LOOKS.isdisjoint(words)


def runs_of_job(words: Sequence[str]) -> set[str]:
    """The runs that a job is for, from the command line of the Snakemake inside it; none if it isn't for runs."""
    if "--target-jobs" not in words:
        return set()
    after = itertools.islice(words, words.index("--target-jobs") + 1, None)
    targets = [target.partition(":")[2] for target in itertools.takewhile(lambda word: not word.startswith("-"), after)]
    wildcards = [dict(pair.split("=", 1) for pair in target.split(",") if pair) for target in targets]
    return {one["run"] for one in wildcards} if all("run" in one for one in wildcards) else set()


def call_again(config_files: Sequence[str | Path], given: dict[str, Any], target: str | None) -> str:
    """A command that repeats this call, without its profile and cores. Its target comes first, as `--configfile` would
    take it for a file."""
    named = ["--configfile", *map(os.path.relpath, config_files)] if config_files else []
    return shlex.join(["snakemake", *([target] if target else []), *named, *given_values(given)])


def own_target(words: Collection[str]) -> str | None:
    """The target among a call's words that runs another experiment than the user's; None without one."""
    found = OWN_TARGETS.keys() & words
    if len(found) > 1:
        raise InputError(f"{' and '.join(sorted(found))} each run an experiment of their own: call one after the other")
    return next(iter(found), None)


def own_experiment(workflow: Any, loaded: LoadedExperiment, target: str) -> tuple[list[Path], LoadedExperiment]:
    """Replace the user's experiment by the one that `snakemake prove` or `snakemake tune` runs; return its file and
    content.

    Its jobs read that file alone: values from `--config` are included in it. Problems name the user's own file where
    the value is the user's.
    """
    tree, said = OWN_TARGETS[target](loaded)
    path = proof.write(tree, ExperimentFolder(Path("results", tree["experiment"])).own_config)
    for sentence in said:
        say(sentence)
    workflow.config_settings.config_args = []
    own = load([path], variables=os.environ)
    kept = {at: place for at, place in loaded.places.items() if at in own.places and _same(at, loaded.raw, own.raw)}
    places = own.places | kept
    return [path], replace(own, places=places, notes=loaded.notes, machine_gpus=loaded.machine_gpus)


def _same(at: Sequence[str | int], one: Any, other: Any) -> bool:
    try:
        first, second = (functools.reduce(operator.getitem, at, tree) for tree in (one, other))
    except (LookupError, TypeError):  # a later file replaced what was there
        return False
    return bool(first == second)


def left_to_jobs(shared: Shared, words: Collection[str]) -> Callable[[Run], bool]:
    """Whether what a run reads may be made again before its job starts, or no such job is asked for."""
    return lambda run: not BEFORE_TRAINING.isdisjoint(words) or shared.is_outdated(run)


def compared(shared: Shared) -> list[str]:
    if not shared.tensors:
        raise InputError(
            "`prove` plans an experiment of its own: call `snakemake prove` alone, in a clone, not as a module's rule"
        )
    return shared.tensors


def tuned(shared: Shared) -> str:
    if not shared.plan.experiment.tune.trials_of:
        raise InputError(
            "`tune` plans an experiment of its own: call `snakemake tune` alone, in a clone, not as a module's rule"
        )
    return str(shared.paths.tuning)


def given_values(values: dict[str, Any]) -> list[str]:
    """The words of `--config` from its values, which Snakemake has already parsed."""
    if not values:
        return []
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in values.items()}
    return ["--config", *(f"{key}={text}" for key, text in texts.items())]
