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
_ALIAS = re.compile(r"\b(?P<name>[a-z]\w*_config)\s+as\s+(?P<alias>[a-z]\w*)")  # older names of recipes
_FINE_TUNES = re.compile(r"_(?P<task>sft|peft)_")
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


def named(recipe: str) -> Found | None:
    """The recipe of a name, of either kind and also by an older name; None if the installed Bridge has none."""
    if recipe.startswith(PREFIX):
        return performance(recipe)
    known = functions("recipes")
    return known.get(recipe) or known.get(_aliases().get(recipe, "")) or performance(recipe)


def problem(recipe: str) -> str | None:
    """Why a recipe can't be trained here; None if it can, or if there is no Bridge to look in."""
    found = named(recipe)
    if found is None:
        return _unknown(recipe)
    if why := model_kinds.refusal(kind_of(found)):
        return f"{found.name} ({found.family}): {why}"
    if meant := _FINE_TUNES.search(found.name):
        return f"{recipe.removeprefix(PREFIX)} fine-tunes ({meant['task']}): only pretraining recipes are trained"
    return None


def _unknown(recipe: str) -> str | None:
    """The problem of a name that no recipe has, with the nearest of those that pretrain."""
    performs = functions("perf_recipes")
    known = performs if recipe.startswith(PREFIX) else {**functions("recipes"), **_aliases(), **performs}
    if not known:
        return None
    kind, name = "performance recipe" if recipe.startswith(PREFIX) else "recipe", recipe.removeprefix(PREFIX)
    nearest = difflib.get_close_matches(name, [one for one in known if "pretrain" in one], n=3)
    says = f"it has {' or '.join(nearest)}" if nearest else "`megaboa recipes` lists those that it has"
    return f"Bridge has no {kind} {name!r}; {says}"


@functools.cache
def _aliases() -> dict[str, str]:
    """The older names of training recipes in the installed Bridge, and the present one of each."""
    folder = _folder("recipes")
    texts = (path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.py"))) if folder else ()
    return {one["alias"]: one["name"] for text in texts for one in _ALIAS.finditer(text)}


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
