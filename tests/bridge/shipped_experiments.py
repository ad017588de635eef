"""Preflight of the experiments that are shipped, in a process of its own, and without Snakemake, hub and tokenizers.

`python shipped_experiments.py FOLDER NAME...`: NAME is a file of config/experiments, or `FILE/RUN,RUN` for some of its
runs. Prints one row of preflight's table per run, and what DeepSeek-V2-Lite's recipe sets, as JSON.
"""

import inspect
import json
import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

from megaboa import files
from megaboa.bridge import process
from megaboa.bridge.quiet import quietly
from megaboa.config import load
from megaboa.estimate import overview
from megaboa.plan import make_plan
from megaboa.plan.shared import Shared

EXPERIMENTS = Path(__file__).parents[2] / "config" / "experiments"
RECIPES = Path(__file__).parents[2] / "recipes"


def rows(folder, name, runs):
    """A recipe keeps its own vocabulary, and a config has one, so that no tokenizer is needed."""
    from megaboa.bridge.preflight import check
    from megaboa.bridge.source import obtain

    plan = make_plan(load([EXPERIMENTS / f"{name}.yaml"]))
    plan.write(folder)
    asked = runs or [run.name for run in plan.runs]
    models = {plan[run].model for run in asked}
    for path, spec in Shared(plan, folder).specifications().items():
        if path.startswith("models/") and spec["name"] in models:
            without = {**spec, "store": str(folder / "store"), "tokenizer": None}
            files.write_json(folder / name / "models" / spec["name"] / "source.json", obtain(without))
    found = check(folder / name, asked)
    stated = {run: plan.models[plan[run].model].params for run in asked}
    return [{"model": plan[run].model, "stated_params": stated[run], **row_of(run, *found[run])} for run in asked]


def row_of(run, result, facts):
    row = overview.row(run, result, facts, None)
    sharding = facts.layout.fsdp_sharding if facts and facts.layout.fsdp == "megatron" else None
    return {**row, "sharding": sharding, "warnings": result.get("warnings", [])}


def deepseek():
    """What the recipe sets, for each dispatcher, and its arguments."""
    sys.path.insert(0, str(RECIPES))
    from deepseek_v2_lite import configure

    arguments = {name: one.default for name, one in inspect.signature(configure).parameters.items()}
    folder = str(RECIPES / "deepseek-v2-lite")
    return {
        "arguments": arguments,
        "null": plain_fields(configure(folder)),
        "deepep": plain_fields(configure(folder, "deepep")),
    }


def plain_fields(config):
    sections = ("model", "train", "validation", "scheduler", "checkpoint", "dataset")
    fields = {f"{name}.{field}": value for name in sections for field, value in vars(getattr(config, name)).items()}
    return {field: value for field, value in fields.items() if isinstance(value, str | int | float | None)}


def main(folder, names):
    process.prepare("cpu")
    experiments = {}
    for name in names:
        experiment, _, runs = name.partition("/")
        experiments[experiment] = rows(folder, experiment, [run for run in runs.split(",") if run])
    return {"experiments": experiments, "deepseek": deepseek()}


if __name__ == "__main__":
    with quietly():
        answer = main(Path(sys.argv[1]), sys.argv[2:])
    print(json.dumps(answer))
