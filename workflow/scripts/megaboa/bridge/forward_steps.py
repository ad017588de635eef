"""The kind of a run's model (model_kinds.py), and its forward step, which reads a batch and computes the loss."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from megaboa import model_kinds
from megaboa.bridge import recipe_models
from megaboa.model_kinds import Kind
from megaboa.records import RunSpec

ForwardStep = Callable[..., Any]


def kind_of(model: Any, run: RunSpec) -> Kind:
    """The kind of the model that a configuration builds; raises ValueError if such models can't be trained here."""
    recipe = run.own_recipe
    if recipe and hasattr(recipe_models.module_of(recipe), model_kinds.OWN_STEP):
        return model_kinds.BY_NAME[model_kinds.OWN]
    declared = model_kinds.said_by(recipe).kind if recipe else None
    try:
        kind = model_kinds.of_provider(one.__name__ for one in type(model).__mro__)
    except model_kinds.UnknownKindError:
        if declared not in model_kinds.BY_NAME:
            raise
        kind = model_kinds.BY_NAME[declared]
    if why := model_kinds.refusal(kind):
        raise ValueError(f"model: {type(model).__name__} makes a model that can't be trained: {why}")
    if declared not in (None, kind.name):
        raise ValueError(
            f"{recipe}: {model_kinds.DECLARED} is {declared!r}, and the model that it makes is {kind.name}"
        )
    return kind


def step_of(kind: Kind, run: RunSpec) -> ForwardStep:
    if kind.name == model_kinds.OWN:
        return recipe_models.module_of(run.model["recipe"]).forward_step
    return getattr(importlib.import_module(kind.step), model_kinds.OWN_STEP)
