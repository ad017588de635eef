"""The experiment of `snakemake prove`: does stopping and resuming change what a run trains?

It is an ordinary experiment with its own results and store, whose runs are short versions of the user's run: `whole`
trains N + M steps in one go; `resumed` trains N, is stopped, and trains M more; for each further layout, a run
continues from the checkpoint of `resumed`; and a twin of `whole` measures the effect of rounding. An agreement compares
them.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from megaboa import files
from megaboa.config import ConfigError, LoadedExperiment, keys, load
from megaboa.config.problems import choose
from megaboa.plan.choices import Choice, choices_of
from megaboa.plan.plan import Run
from megaboa.plan.planner import make_plan
from megaboa.plan.quantities import overlay
from megaboa.records import Tree

WHOLE, RESUMED = "whole", "resumed"
STOP = f"overrides.{keys.STOP}"
# Sections that only concern the user's own runs and their report.
NOT_TAKEN = (
    "sweep",
    "report",
    "export",
    "evaluate",
    "generate",
    "profile",
    "trackers",
    "budget",
    "load",
    "prove",
    "tune",
)
RESOLVED = ("training", "optimizer", "schedule")  # sections whose expressions would have other values in another layout


def experiment(loaded: LoadedExperiment, results: Path | str = "results") -> tuple[Tree, list[str]]:
    """The experiment's tree, and sentences about what it can't prove. Raises ConfigError if nothing can be proven."""
    choice = chosen(loaded, "prove", loaded.experiment.prove.run)
    run = next(one for one in make_plan(loaded, results, only=(choice.name,)).runs if one.name == choice.name)
    if run.config.continue_from:
        message = (
            f"the run {run.name!r} continues from {run.config.continue_from}: name a run that starts at step 0, as a "
            f"resumption is proven the same way in both"
        )
        raise ConfigError([loaded.problem(("prove", "run"), message)])
    base, unproven = _base(loaded, choice, run), []
    if run.config.parallel.fsdp != "none":
        unproven.append(
            "not proven: what rounding can do is not measured, as FSDP holds weights in pieces that no twin can have "
            "moved: only a difference of nothing at all is told from rounding"
        )
    wanted = loaded.experiment.prove.layouts
    if run.run.is_tuned:
        wanted = {}
        unproven.append(
            f"not proven: resuming in another layout, as a run with task: {run.config.task} takes the weights of "
            "another alone"
        )
    if wanted is None:
        label, values, why = _another_layout(loaded, base, run, results)
        wanted = {label: values} if label else {}
        unproven += [f"not proven: resuming in another layout, as no other is legal here: {why}"] if why else []
    return _with_legs(base, run, wanted, unproven), unproven


def chosen(loaded: LoadedExperiment, section: str, wanted: str | None) -> Choice:
    """The run named by `<section>.run`, or else the first one."""
    choices = {choice.name: choice for choice in choices_of(loaded)}
    if wanted is None:
        return next(iter(choices.values()))
    if wanted not in choices:
        raise ConfigError([loaded.problem((section, "run"), choose(wanted, list(choices), "run"))])
    return choices[wanted]


def _base(loaded: LoadedExperiment, choice: Choice, run: Run) -> Tree:
    """The common part of all runs of the proof: the user's run for N + M steps, with its own learning rates."""
    tree = {name: value for name, value in overlay(loaded.raw, choice.values).items() if name not in NOT_TAKEN}
    for section in RESOLVED:
        asked = getattr(run.config, section)
        tree[section] = {name: getattr(asked, name) for name in tree.get(section) or {}}
    proven = loaded.experiment.prove
    last = run.config.training.train_iters
    tree["training"].pop("train_tokens", None)
    tree["training"]["train_iters"] = proven.steps + proven.more
    if last is not None and run.config.schedule.decay_iters is None:
        tree["schedule"]["decay_iters"] = last
    # Saves after N and N + M steps, readable in any layout. A stop leaves a checkpoint, not a copy on the nodes.
    unused = ("keep_last", "keep_every", "local")
    kept = {name: value for name, value in (tree.get("checkpoint") or {}).items() if name not in unused}
    tree["checkpoint"] = {**kept, "save_interval": proven.steps}
    recovery = {
        name: value for name, value in (tree.get("recovery") or {}).items() if name not in ("notify", "actions")
    }
    tree["recovery"] = {**recovery, "backoff_seconds": 0}
    tree["experiment"] = f"{loaded.experiment.experiment}-proof-{choice.name}"
    tree["device"] = loaded.experiment.device
    return tree


def _with_legs(base: Tree, run: Run, layouts: dict[str, Tree], unproven: list[str]) -> Tree:
    parent = {"continue_from": f"{base['experiment']}/{RESUMED}@{base['checkpoint']['save_interval']}"}
    legs: dict[str, Tree] = {WHOLE: {}, RESUMED: {STOP: base["checkpoint"]["save_interval"]}}
    legs |= {label: {**parent, **values} for label, values in layouts.items()}
    agreement: Tree = {"reference": WHOLE, "runs": [RESUMED, *layouts], "tensors": True}
    if run.config.parallel.fsdp == "none":
        agreement["twins"] = 1
    question = f"Does it change what the run {run.name} trains if it is stopped and resumed?"
    report = {
        "title": f"Proof of {base['experiment'].rpartition('-proof-')[0]}/{run.name}",
        "question": " ".join([question, *unproven]),
        "agreements": [agreement],
    }
    return {**base, "sweep": {"runs": legs}, "report": report}


def _another_layout(loaded: LoadedExperiment, base: Tree, run: Run, results: Path | str) -> tuple[str, Tree, str]:
    """The first other legal layout: its name and values, or the reason why there is none."""
    why = []
    for label, values in _candidates(run):
        tree = _with_legs(base, run, {label: values}, [])
        try:
            make_plan(replace(read_back(tree), machine_gpus=loaded.machine_gpus), results)
        except ConfigError as error:
            why.append(f"{label}: {error.problems[0].message}")
        else:
            return label, values, ""
    return "", {}, "; ".join(why)


def read_back(tree: Tree) -> LoadedExperiment:
    with tempfile.TemporaryDirectory() as folder:
        return load([write(tree, Path(folder, "experiment.yaml"))], variables=os.environ)


def write(tree: Tree, path: Path) -> Path:
    files.write_if_changed(path, yaml.safe_dump(json.loads(json.dumps(tree)), sort_keys=False))
    return path


def _candidates(run: Run) -> Iterator[tuple[str, Tree]]:
    sizes, asked = run.config.parallel, run.config.resources
    alone: dict[str, Any] = {"resources.gpus_per_node": 2} if asked.nodes * asked.gpus_per_node == 1 else {}
    if sizes.tp == 1:
        yield "tp2", {**alone, "parallel.tp": 2}
        yield "tp2-sp", {**alone, "parallel.tp": 2, "parallel.sp": True}  # experts want it
    else:
        yield "tp1", {"parallel.tp": 1, "parallel.sp": False}
    yield ("pp2", {**alone, "parallel.pp": 2}) if sizes.pp == 1 else ("pp1", {"parallel.pp": 1, "parallel.vpp": 1})
    if alone:
        yield "dp2", alone
