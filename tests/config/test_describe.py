"""The JSON schema and the table of keys are current, and say the same as the models."""

from __future__ import annotations

import copy
import functools
from pathlib import Path

import jsonschema
import pytest
import yaml

from megaboa.config.describe import json_schema, markdown, schema_text

ROOT = Path(__file__).resolve().parents[2]
REMEDY = "run megaboa write-schema"


@functools.cache
def validator() -> jsonschema.Draft202012Validator:
    """`jsonschema.validate` would check the schema itself at every call, too."""
    return jsonschema.Draft202012Validator(json_schema())


def test_schema_is_current() -> None:
    is_current = (ROOT / "workflow/schemas/experiment.schema.json").read_text(encoding="utf-8") == schema_text()
    assert is_current, REMEDY  # without hundreds of lines of JSON


def test_table_of_keys_is_current() -> None:
    is_current = markdown() in (ROOT / "config/README.md").read_text(encoding="utf-8")
    assert is_current, REMEDY


def test_the_shipped_experiment_is_valid() -> None:
    jsonschema.Draft202012Validator.check_schema(json_schema())
    validator().validate(yaml.safe_load((ROOT / "config/config.yaml").read_text(encoding="utf-8")))


GOOD = {
    "models": {"m": {"hf": "org/name"}},
    "training": {"train_iters": "20 * params / (gbs * seq_length)", "micro_batch_size": 2},
    "data": {"blend": {"a": 1, "b": 2.5}, "validation_sets": {"law": "b", "both": {"a": 1, "b": 1}}},
    "overrides": {"model.x": {"y": 1}},
    "sweep": {
        "grid": {"parallel.tp": [1, 2], "models.m.config.hidden_size": [64], "layout": {"a": {"parallel.pp": 2}}},
        "zip": {"optimizer.lr": [0.1]},
        "runs": {"one": {"parallel.tp": 1, "overrides.model.x": False}},
    },
    "export": {"runs": "all"},
}


def test_expressions_and_dotted_axes_are_valid() -> None:
    validator().validate(GOOD)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("trainning", {}),
        ("training.lr", 1),
        ("training.micro_batch_size", 0),
        ("training.micro_batch_size", 1.5),
        ("training.precision", "fp31"),
        ("parallel", {"sp": "yes"}),
        ("data.blend", {"a": 0}),
        ("data.blend_per_split", {"valid": "a"}),
        ("data.validation_sets", {"law": None}),
        ("data.fim", {"rate": 2}),
        ("sweep.grid", {"parallel.tp": 2}),
        ("sweep.grid", {"parallel.tp": []}),
        ("models", {}),
        ("models.m.tokeniser", "x"),
    ],
)
def test_mistakes_are_not_valid(path: str, value: object) -> None:
    changed = copy.deepcopy(GOOD)
    *parents, last = path.split(".")
    node = changed
    for part in parents:
        node = node[part]
    node[last] = value
    with pytest.raises(jsonschema.ValidationError):
        validator().validate(changed)
