"""Bridge's own pretraining recipes for language models, and preflight's verdict on each, unmodified."""

from __future__ import annotations

import contextlib
import math
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megaboa import bridge_recipes, files, formats, model_kinds
from megaboa.bridge import preflight
from megaboa.check import memory, overview, parameters, tensors
from megaboa.check.facts import Facts
from megaboa.check.stages import stages
from megaboa.layout import AXES, Layout
from megaboa.paths import RunFolder
from megaboa.records import RunCheck, StageParameters, Tree

GPUS = re.compile(r"_(\d+)gpu_")
NO_CONFIG = "Unrecognized model"
COLUMNS = ("recipe", "parameters", "off by", "GPUs", "layout", "result", "why")


def names() -> list[str]:
    """Each recipe once, under its longest name, which includes the number of GPUs."""
    from megatron.bridge import recipes

    longest: dict[int, str] = {}
    for name in dir(recipes):
        made = getattr(recipes, name)
        if "pretrain" not in name or not callable(made) or model_kinds.refusal(model_kinds.of_recipe(made.__module__)):
            continue
        longest[id(made)] = max(longest.get(id(made), ""), name, key=len)
    return sorted(longest.values())


def table(recipes: Iterable[str], configs: Mapping[str, Any]) -> str:
    """A Markdown table of preflight's verdicts; `configs`: Hugging Face configs, by model id."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        # transformers takes `Qwen/Qwen3-8B` for a folder, if one exists
        for name, config in configs.items():
            files.write_json(Path(name, "config.json"), config)
        return markdown(rows(recipes, Path(folder)))


def rows(recipes: Iterable[str], folder: Path) -> Iterator[dict[str, str]]:
    """A row of the table for each recipe. `folder`: for the runs' files."""
    for name in recipes:
        world = int(said[1]) if (said := GPUS.search(name)) else _smallest_world(name)
        result, facts = preflight.check_run(_run(folder / "runs" / name, name, world), {})
        yield _row(name, world, result, facts)


def _smallest_world(name: str) -> int:
    """Number of ranks for one copy of the model; used if the recipe's name has no number of GPUs."""
    from megatron.bridge import recipes

    try:
        model = getattr(recipes, name)().model
    except Exception:  # check_run runs into the same error, and reports it
        return 1
    layout = Layout(**{axis.name: getattr(model, axis.argument) for axis in AXES})
    return math.lcm(layout.model_ranks, layout.expert_ranks)


def _run(path: Path, name: str, world: int) -> RunFolder:
    """A run with a recipe and no other settings."""
    meant = bridge_recipes.purpose(name)
    per_node = meant.gpus_per_node if meant else 8
    model = {"name": name, "recipe": name, "args": {}, "tokenizer": None, "init": "scratch"}
    sections: Tree = {part: {} for part in ("data", "training", "optimizer", "schedule", "parallel")}
    run = {"model": model, **sections, "world_size": world, "device": "cuda", "overrides": {}}
    nodes = {"nodes": max(1, world // per_node), "gpus_per_node": min(world, per_node)}
    launch = {"checkpoint": {}, **nodes, "gpu": None, "overrides": {}}
    profile = {"tool": "none", "steps": [2, 8], "ranks": [0]}
    return RunFolder(path, {"run": run, "launch": launch, "profile": profile})


def _row(name: str, world: int, result: RunCheck, facts: Facts | None) -> dict[str, str]:
    state, why = _verdict(result, facts)
    known = facts is not None and memory.is_known(facts)
    return {
        "recipe": name,
        "parameters": formats.count(round(parameters.of_model(facts))) if facts is not None and known else "-",
        "off by": _deviation(result.parameters, facts) if facts is not None and known else "-",
        "GPUs": str(world),
        "layout": overview.layout(facts) if facts is not None else "-",
        "result": state,
        "why": why.replace("|", "\\|"),
    }


def _verdict(result: RunCheck, facts: Facts | None, most: int = 300) -> tuple[str, str]:
    """A state, and its explanation."""
    reasons = "; ".join(result.reasons or ())
    if result.state == "NOT_RUN" or (facts is None and NO_CONFIG in reasons):
        return "not built", "not tried: the Hugging Face config of its model was not at hand"
    package = model_kinds.BY_NAME[facts.model.kind].package if facts is not None else None
    if package and package in reasons:
        return f"needs {package}", "no environment of envs/ and no image of containers/ has the package"
    if tensors.sizes_are_set.__name__ in reasons:
        return "not built", "the recipe leaves the model's sizes open: they are meant to be set by overrides"
    if result.stopped_at:
        return "needs the image", result.stopped_at
    text = reasons or "; ".join([*(result.needs_image or ()), *result.warnings])
    return result.state, text if len(text) <= most else f"{text[:most].rstrip()}..."


def _deviation(built: Sequence[StageParameters] | None, f: Facts) -> str:
    """Relative error of our parameter count, compared with the stages that were built, where it is largest."""
    if not built:
        return "-"
    by_stage = {one.number: parameters.of_stage(f, one).total for one in stages(f)}
    errors = [by_stage[one.stage] / (one.dense + one.expert) - 1 for one in built]
    return f"{max(errors, key=abs):+.1%}"


def markdown(table: Iterable[dict[str, str]]) -> str:
    lines = ["| " + " | ".join(COLUMNS) + " |", "|---|---:|---:|---:|---|---|---|"]
    for row in table:
        cells = {**row, "recipe": f"`{row['recipe']}`"}
        lines.append("| " + " | ".join(cells[column] for column in COLUMNS) + " |")
    return "\n".join(lines) + "\n"
