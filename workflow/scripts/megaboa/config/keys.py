"""The dotted keys of the experiment file: which exist, which may be swept, and the paths that dotted names mean."""

from __future__ import annotations

import functools
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from megaboa.config.formula import Formula
from megaboa.config.models.experiment import Experiment
from megaboa.config.models.model import Model
from megaboa.config.notify import KEY as NOTIFY
from megaboa.config.problems import Problem, nearest, show
from megaboa.fields import (
    FINER,
    INSTEAD_OF_OVERRIDES,
    INTERPOLATED,
    NON_PERSISTENT,
    OWN_FIELDS,
    SAME_AS,
    interpolated,
    key_of,
)
from megaboa.records import SECTIONS
from megaboa.secrets import is_secret_name

Path = tuple[str, ...]

NOT_SWEPT = {
    "experiment": "a sweep belongs to one experiment",
    "device": "all runs of an experiment share the device",
    "store": "all runs share the store",
    "tokenizers": "tokenizers are shared by all runs: define several, and sweep `model`",
    "image": "all runs of an experiment share the image",
    "corpora": "corpora are shared by all runs: define several, and sweep `data.blend`",
    "budget": "it is the whole plan's",
    **dict.fromkeys(("evaluate", "export", "generate", "prove", "report", "tune"), "it isn't a property of a run"),
    "sweep": "a sweep can't contain itself",
    NOTIFY: "tables would publish its values, which may hold a webhook's address: the command has $MEGABOA_RUN",
}

STOP = "train.exit_interval"  # by which a proof stops a run
ENDS_EARLY = "ends the ranks before the last step, which counts as their failure, and the run is resumed: remove it"

# Short names of the axes of scaling-law sweeps, below models.<name>.config.
CONFIG_SHORT = {
    "hidden_size": "h",
    "num_hidden_layers": "l",
    "intermediate_size": "ffn",
    "moe_intermediate_size": "moeffn",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv",
    "num_experts": "experts",
    "num_local_experts": "experts",
    "n_routed_experts": "experts",
    "num_experts_per_tok": "topk",
}


@dataclass(frozen=True)
class Key:
    """A leaf of the experiment file. `<name>` in it stands for a name chosen by the user."""

    dotted: str
    section: type[BaseModel]
    field: FieldInfo

    @property
    def short(self) -> str | None:
        extra = self.field.json_schema_extra
        return typing.cast(str, extra.get("short")) if isinstance(extra, dict) else None


def submodel(annotation: Any) -> tuple[type[BaseModel] | None, str]:
    """The section that a field holds, and the way to it: directly, by name or in a list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, ""
    arguments = typing.get_args(annotation)
    container = typing.get_origin(annotation)
    if container is dict and isinstance(arguments[1], type) and issubclass(arguments[1], BaseModel):
        return arguments[1], ".<name>"
    if container is list and isinstance(arguments[0], type) and issubclass(arguments[0], BaseModel):
        return arguments[0], "[]"
    for argument in arguments if type(None) in arguments else ():
        if (found := submodel(argument))[0]:
            return found
    return None, ""


def _walk(section: type[BaseModel], prefix: str) -> Iterator[Key]:
    for name, field in section.model_fields.items():
        inner, step = submodel(field.annotation)
        if inner:
            yield from _walk(inner, f"{prefix}{name}{step}.")
        else:
            yield Key(prefix + name, section, field)


@functools.cache
def all_keys() -> dict[str, Key]:
    return {key.dotted: key for key in _walk(Experiment, "")}


@functools.cache
def is_own(dotted: str) -> bool:
    """Whether this is a key of the experiment file or a section of it, and not a field of Bridge."""
    return any(f"{key}.".startswith(f"{dotted}.") for key in all_keys())


@functools.cache
def sweepable() -> dict[str, Key]:
    """The keys that may be axes, except for those below `models` and `overrides`, which depend on the file."""
    refused = {*NOT_SWEPT, "models", "overrides"}
    return {dotted: key for dotted, key in all_keys().items() if refused.isdisjoint({dotted, dotted.split(".")[0]})}


def _parts(annotation: Any) -> set[Any]:
    """The types inside an annotation, and the types of its metadata."""
    inner = (*typing.get_args(annotation), *map(type, getattr(annotation, "__metadata__", ())))
    return {annotation}.union(*map(_parts, inner)) if inner else {annotation}


@functools.cache
def formula_keys() -> dict[str, bool]:
    """Keys that accept an expression in place of a number; true if it must be a whole number."""
    found = {}
    for dotted, key in sweepable().items():
        parts = _parts(key.field.annotation) | set(map(type, key.field.metadata))
        if Formula in parts:
            found[dotted] = int in parts
    return found


def split(dotted: str, names: dict[str, list[str]], value: Any = ...) -> Path:
    """A dotted key as a path in the tree. `names` are the names defined under `models`, which may contain dots.

    An override that is only another spelling of one of our keys becomes that key, unless its value says more.
    """
    head, _, rest = dotted.partition(".")
    if head == "overrides" and rest:
        return tuple(SAME_AS[rest].split(".")) if rest in SAME_AS and not is_emptied(rest, value) else (head, rest)
    if head in names:
        for name in sorted(names[head], key=len, reverse=True):
            if rest == name or rest.startswith(name + "."):
                tail = rest[len(name) + 1 :]
                return (head, name, *tail.split(".")) if tail else (head, name)
    return tuple(dotted.split("."))


def is_emptied(field: str, value: Any) -> bool:
    """Whether an override sets a field to null whose key has another meaning for that: `not set`, which leaves a recipe
    its own value."""
    key = SAME_AS.get(field)
    if value is not None or key is None or key.partition(".")[0] not in SECTIONS:
        return False
    return type(None) in typing.get_args(all_keys()[key].field.annotation)


def emptied(path: Path, overrides: Any) -> str | None:
    """The field of a key that these overrides set to null; None if there is none."""
    given = overrides if isinstance(overrides, dict) else {}
    return next((field for field in given if SAME_AS.get(field) == ".".join(path)), None)


def _key_of_override(path: Path) -> Path:
    """The path of the key that sets the same field as an override; any other path as it is."""
    same = SAME_AS.get(path[1]) if path[0] == "overrides" and len(path) > 1 else None
    return tuple(same.split(".")) if same else path


def sweep_problem(dotted: str, path: Path, models: list[str]) -> str | None:
    """Why a dotted key can't be swept; None if it can."""
    head = path[0]
    if why := NOT_SWEPT.get(head) or NOT_SWEPT.get(".".join(path)):
        return f"can't be swept: {why}"
    if head == "overrides":
        return "name a field, as in overrides.model.moe_permute_fusion" if len(path) < 2 else override_problem(path[1])
    if head == "models":
        return _model_key_problem(path, models)
    if ".".join(path) in sweepable():
        return None
    inside = [key for key in sweepable() if key.startswith(dotted + ".")]
    if inside:
        return f"is a section, not a key: sweep a key of it, such as {inside[0]}"
    hint = _nearest_key(dotted, [*sweepable(), *(f"models.{m}.config" for m in models)])
    return "unknown key" + (f"; did you mean {hint}?" if hint else "; config/README.md lists the keys")


def _nearest_key(dotted: str, options: list[str]) -> str | None:
    by_short = {key.short: name for name, key in sweepable().items() if key.short}
    return by_short.get(dotted) or nearest(dotted, options)


def _model_key_problem(path: Path, models: list[str]) -> str | None:
    if len(path) < 3 or path[1] not in models:
        hint = nearest(path[1], models) if len(path) > 1 else None
        known = ", ".join(models) or "none"
        return "needs the name of a model and a key of it" + (
            f"; did you mean {hint}?" if hint else f"; models: {known}"
        )
    if path[2] not in Model.model_fields:
        hint = nearest(path[2], Model.model_fields)
        return f"unknown key {path[2]}" + (
            f"; did you mean {hint}?" if hint else f"; known: {', '.join(Model.model_fields)}"
        )
    if len(path) > 3 and path[2] not in ("config", "args"):
        return f"{path[2]} has no keys below it"
    return None


def override_problem(field: str) -> str | None:
    """Why a field of Bridge can't be set under `overrides`; None if it can."""
    if field in {f"checkpoint.{name}" for name in NON_PERSISTENT}:
        return "saves what a run would never resume from: set checkpoint.local instead"
    if field == "train.exit_duration_in_mins":
        return f"{ENDS_EARLY}; resources.runtime limits a job's time, before which it saves"
    if field in OWN_FIELDS:
        return "is set by Megaboa itself: remove it"
    if is_secret_name(field.rpartition(".")[2].rpartition("_")[2]):  # so not moe_token_dispatcher_type
        return "is a secret, which would be written to disk: remove it, and export it as an environment variable"
    key = key_of(field)
    if key in INSTEAD_OF_OVERRIDES and field not in SAME_AS and field not in FINER:
        return f"is set by the key {key}: set that instead"
    return None


def override_value_problem(value: Any) -> str | None:
    """Why a field of Bridge can't have this value, whatever the field; None if it can. Bridge checks all else."""
    text = interpolated(value)
    return None if text is None else f"{show(text)} {INTERPOLATED}"


def names_clash(one: Path, other: Path) -> bool:
    """Whether two paths set the same key, or one of them a part of the other's value."""
    one, other = _key_of_override(one), _key_of_override(other)
    shorter = min(len(one), len(other))
    return one[:shorter] == other[:shorter]


def problem_at(places: dict[Any, tuple[str, int]], path: tuple[str | int, ...], key: str, message: str) -> Problem:
    """A problem at the place of the value at `path`, or of the nearest value around it."""
    for length in range(len(path), 0, -1):
        if path[:length] in places:
            file, line = places[path[:length]]
            return Problem(key, message, file, line or None)
    return Problem(key, message, places[()][0] if () in places else None)
