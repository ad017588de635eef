"""Preflight of the experiments that are shipped, in a process of its own, and without Snakemake, hub and tokenizers.

Bridge's performance recipes read the configs of hf_configs.json. Runs of several experiments that differ in nothing but
their names are played once.

`python shipped_experiments.py FOLDER NAME...`: each NAME is a file of config/experiments. Prints, as
JSON, one row of preflight's table per run, and what some recipes set.
"""

import contextlib
import inspect
import json
import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

from megaboa import files, records
from megaboa.bridge import process
from megaboa.bridge.quiet import quietly
from megaboa.check import overview
from megaboa.config import load
from megaboa.paths import RunFolder
from megaboa.plan import make_plan, specifications
from megaboa.plan.shared import Shared

EXPERIMENTS = Path(__file__).parents[2] / "config" / "experiments"
RECIPES = Path(__file__).parents[2] / "recipes"
CHECKED, PLAYED = {}, {}
CONFIGS = Path(__file__).parents[1] / "fixtures" / "hf_configs.json"


def rows(folder, name):
    """A recipe keeps its own vocabulary, and a config has one, so that no tokenizer is needed."""
    from megaboa.bridge.source import obtain

    plan = make_plan(load([EXPERIMENTS / f"{name}.yaml"]))
    plan.write(folder)
    asked = [run.name for run in plan.runs]
    for path, spec in specifications.contents(Shared(plan, folder)).items():
        if path.startswith("models/"):
            without = {**spec, "store": str(folder / "store"), "tokenizer": None}
            source = obtain(records.parse(records.ModelSpec, without, path))
            records.write(folder / name / "models" / source.name / "source.json", source)
    found = {run: checked(RunFolder(folder / name / "runs" / run)) for run in asked}
    stated = {run: plan.models[plan[run].model].params for run in asked}
    return [{"model": plan[run].model, "stated_params": stated[run], **row_of(run, *found[run])} for run in asked]


def checked(run):
    """Once for each run.json and launch.json, where no file of the experiment is read."""
    from megaboa.bridge.preflight import check_run

    key = files.digest([run.document("run"), {**run.document("launch"), "store": None}])
    if key not in CHECKED or run.run.has_source:
        CHECKED[key] = check_run(run, PLAYED)
    return CHECKED[key]


@contextlib.contextmanager
def hub(folder):
    """transformers takes `Qwen/Qwen3-8B` for a folder, where there is one. The clone's recipes are there too."""
    for name, config in files.read_json(CONFIGS).items():
        files.write_json(folder / name / "config.json", config)
    (folder / "recipes").symlink_to(RECIPES)
    with contextlib.chdir(folder):
        yield


def row_of(run, result, facts):
    row = overview.row(run, result, facts, None)
    sharding = facts.layout.fsdp_sharding if facts and facts.layout.fsdp == "megatron" else None
    kept = {name: getattr(result, name) for name in ("warnings", "needs_image", "stopped_at")}
    return {**row, "sharding": sharding, **kept}


def recipes():
    """What some recipes set, and the arguments of one."""
    sys.path.insert(0, str(RECIPES))
    import deepseek_v2_lite
    import gpt3

    arguments = inspect.signature(deepseek_v2_lite.configure).parameters.items()
    folder = str(RECIPES / "deepseek-v2-lite")
    return {
        "arguments": {name: one.default for name, one in arguments},
        "deepseek": plain_fields(deepseek_v2_lite.configure(folder)),
        "deepseek, deepep": plain_fields(deepseek_v2_lite.configure(folder, "deepep")),
        "gpt3": plain_fields(gpt3.configure("2.7b")),
    }


def plain_fields(config):
    sections = ("model", "train", "validation", "optimizer", "scheduler", "checkpoint", "dataset")
    fields = {f"{name}.{field}": value for name in sections for field, value in vars(getattr(config, name)).items()}
    return {field: value for field, value in fields.items() if isinstance(value, str | int | float | None)}


def main(folder, names):
    process.prepare("cpu")
    with hub(folder / "hub"):
        return {"experiments": {name: rows(folder, name) for name in names}, "recipes": recipes()}


if __name__ == "__main__":
    with quietly():
        answer = main(Path(sys.argv[1]).absolute(), sys.argv[2:])
    print(json.dumps(answer))
