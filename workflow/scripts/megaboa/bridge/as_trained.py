"""A recipe's run with the values that the recipe chose, read from the configuration that Bridge writes into
checkpoints. run.json only has the keys that the experiment sets."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from megaboa.fields import BRIDGE_FIELDS
from megaboa.paths import RunFolder
from megaboa.records import SECTIONS, RunSpec, TrainRecord, Tree, read

RUN_CONFIG = "run_config.yaml"
UNSAID = {"training.train_tokens", "training.precision", "parallel.fsdp"}  # not determined by a single field of Bridge


def as_trained(folder: RunFolder) -> RunSpec:
    """run.json of a trained run that has saved, completed with the recipe's own values."""
    run = folder.run
    if not run.is_recipe:
        return run
    checkpoint = read(TrainRecord, folder.train_manifest).checkpoint
    saved = yaml.safe_load(Path(checkpoint, RUN_CONFIG).read_text(encoding="utf-8"))
    found: dict[str, Tree] = {section: {} for section in SECTIONS}
    for key, fields in BRIDGE_FIELDS.items():
        section, _, name = key.partition(".")
        if section in found and key not in UNSAID:
            found[section][name] = _value(saved, fields[-1])
    found["training"]["precision"] = _precision(saved)
    return replace(run, **{section: {**values, **getattr(run, section)} for section, values in found.items()})


def _value(saved: Tree, field: str) -> Any:
    return functools.reduce(lambda part, name: (part or {}).get(name), field.split("."), saved)


def _precision(saved: Tree) -> str:
    """The value of `training.precision`, as far as the checkpoint tells."""
    mixed, model = saved.get("mixed_precision"), saved["model"]
    if isinstance(mixed, str):
        return mixed
    bits = "fp16" if model.get("fp16") else "bf16" if model.get("bf16") else None
    if bits is None:
        return "fp32"
    low = next((name for name in ("fp8", "fp4") if model.get(name) or (mixed or {}).get(name)), None)
    return f"{bits}_mixed" if low is None else f"{bits}_with_{low}_mixed"
