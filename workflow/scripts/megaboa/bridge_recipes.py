"""Megatron-Bridge's recipes and the purposes in their names: `llama3_8b_pretrain_8gpu_h100_bf16_config`.

The plan and `megaboa recipes` parse Bridge's sources without importing them, which would take ten seconds. There are
two kinds: training recipes (`megatron.bridge.recipes`), and performance recipes (`megatron.bridge.perf_recipes`), with
which NVIDIA measured its published numbers, each for one GPU, number of GPUs and precision.
"""

from __future__ import annotations

import difflib
import functools
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

from megaboa import model_kinds

PREFIX = "perf_recipes."  # disambiguates names that recipes of both kinds have
MODULE = "megatron.bridge.perf_recipes"
_KINDS = ("recipes", "perf_recipes")
_NAME = re.compile(
    r"^(?P<model>\w+?)_(?P<task>pretrain|sft|peft)_(?P<gpus>\d+)gpu_(?P<gpu>[a-z]+\d+)_(?P<precision>[a-z0-9]+)"
    r"(?:_(?P<variant>\w+))?_config$"
)
_FUNCTION = re.compile(r'^def (?P<name>[a-z]\w*_config)\([^)]*\)[^\n]*:\n    """(?P<text>[^\n"]*)', re.MULTILINE)
PRECISIONS = {  # the value of `training.precision`, and the words for it
    "bf16": ("bf16_mixed", "BF16"),
    "fp8cs": ("bf16_with_fp8_current_scaling_mixed", "FP8 by tensors"),
    "fp8ds": ("bf16_with_fp8_delayed_scaling_mixed", "FP8, delayed scaling"),
    "fp8sc": ("bf16_with_fp8_subchannel_scaling_mixed", "FP8 by blocks"),
    "fp8mx": ("bf16_with_mxfp8_mixed", "MXFP8"),
    "nvfp4": ("bf16_with_nvfp4_mixed", "NVFP4"),
}
_RACKS = ("gb200", "gb300", "vr200", "r100")  # NVL72 has four GPUs to a host, the others have eight


@dataclass(frozen=True)
class Purpose:
    """The purpose of a recipe, parsed from its name."""

    model: str
    task: str
    gpus: int
    gpu: str
    precision: str
    variant: str | None = None

    @property
    def gpus_per_node(self) -> int:
        return min(self.gpus, 4 if self.gpu in _RACKS else 8)


@dataclass(frozen=True)
class Found:
    """A recipe function in Bridge's sources. `module`: below `megatron.bridge.recipes` or `perf_recipes`."""

    name: str
    module: str
    text: str

    @property
    def family(self) -> str:
        return self.module.split(".")[0]


def purpose(recipe: str) -> Purpose | None:
    """The purpose of a recipe; None if its name doesn't mention GPUs."""
    said = _NAME.match(recipe.removeprefix(PREFIX))
    return Purpose(**{**said.groupdict(), "gpus": int(said["gpus"])}) if said else None


def performance(recipe: str) -> Found | None:
    """The performance recipe of a name. Without the prefix a training recipe of the same name wins."""
    name = recipe.removeprefix(PREFIX)
    if name == recipe and name in functions("recipes"):
        return None
    return functions("perf_recipes").get(name)


def kind_of(found: Found) -> model_kinds.Kind:
    return model_kinds.of_recipe(found.module)


def name_of(found: Found, kind: str) -> str:
    """The name of a recipe in an experiment."""
    return f"{PREFIX}{found.name}" if kind == "perf_recipes" and found.name in functions("recipes") else found.name


def tuned_for(recipe: str | None) -> tuple[str, int] | None:
    """The GPU and number of GPUs that a performance recipe is tuned for; None for any other recipe."""
    meant = purpose(recipe) if recipe and performance(recipe) else None
    return (meant.gpu, meant.gpus) if meant else None


def precision_of(recipe: str | None) -> str | None:
    """The precision of a performance recipe, as a value of `training.precision`."""
    meant = purpose(recipe) if recipe and performance(recipe) else None
    return PRECISIONS.get(meant.precision, (None,))[0] if meant else None


def problem(recipe: str) -> str | None:
    """Why a recipe can't be trained here; None if it can, or if only Bridge can tell."""
    found = performance(recipe)
    if (one := found or functions("recipes").get(recipe)) and (why := model_kinds.refusal(kind_of(one))):
        return f"{one.name} ({one.family}): {why}"
    if found is None:
        known = functions("perf_recipes")
        if not recipe.startswith(PREFIX) or not known:
            return None
        nearest = difflib.get_close_matches(recipe.removeprefix(PREFIX), known, n=3)
        says = " or ".join(nearest) or f"{len(known)} others, which `megaboa recipes` lists"
        return f"Bridge has no performance recipe {recipe.removeprefix(PREFIX)!r}; it has {says}"
    if (meant := purpose(recipe)) and meant.task != "pretrain":
        return f"{found.name} fine-tunes ({meant.task}): only pretraining recipes are trained"
    return None


@functools.cache
def functions(kind: str) -> dict[str, Found]:
    """The recipes of one kind in the installed Bridge; empty without Bridge."""
    found = {}
    for path in sorted(folder.rglob("*.py")) if (folder := _folder(kind)) else []:
        module = ".".join(path.relative_to(folder).with_suffix("").parts)
        for one in _FUNCTION.finditer(path.read_text(encoding="utf-8")):
            found[one["name"]] = Found(one["name"], module, one["text"].strip())
    return found


def _folder(kind: str) -> Path | None:
    if kind not in _KINDS:
        raise ValueError(f"there are no {kind}: {' or '.join(_KINDS)}")
    megatron = importlib.util.find_spec("megatron")  # a namespace package, so find_spec imports nothing
    places = (Path(place, "bridge", kind) for place in (megatron.submodule_search_locations or () if megatron else ()))
    return next((place for place in places if place.is_dir()), None)
