"""Every performance recipe of Bridge's, built in a process of its own, and without the hub.

`python performance_recipes.py FOLDER` prints, as JSON, by name what the recipe sets, or why it can't be built; with
`--preflight` what preflight says of it.
"""

import contextlib
import json
import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

from megaboa import bridge_recipes, files
from megaboa.bridge import process
from megaboa.bridge.quiet import quietly
from megaboa.layout import AXES, Layout

CONFIGS = Path(__file__).parents[1] / "fixtures" / "hf_configs.json"


def built(name):
    from megaboa.bridge import config_facts, recipe_models

    try:
        config = recipe_models.named(name, "models.m")()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    layout = Layout(**{axis.name: getattr(config.model, axis.argument) for axis in AXES})
    return {
        "ranks": [layout.model_ranks, layout.expert_ranks],
        "precision": config_facts._precision(config),
        "optimizer": [config.optimizer.optimizer, config.optimizer.use_precision_aware_optimizer],
        "environment": config.env_vars,
    }


def main(folder, preflight):
    process.prepare("cpu")
    for name, config in files.read_json(CONFIGS).items():
        files.write_json(folder / name / "config.json", config)
    names = [f"{bridge_recipes.PREFIX}{name}" for name in bridge_recipes.functions("perf_recipes")]
    names = [name for name in names if bridge_recipes.problem(name) is None]
    with contextlib.chdir(folder):
        return {name: built(name) for name in names} if not preflight else rows(names, folder)


def rows(names, folder):
    from megaboa.bridge import recipes

    return {row["recipe"]: row for row in recipes.rows(names, folder)}


if __name__ == "__main__":
    with quietly():
        answer = main(Path(sys.argv[1]).absolute(), "--preflight" in sys.argv)
    print(json.dumps(answer))
