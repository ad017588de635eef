"""The axes of an experiment."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, WithJsonSchema, model_validator

from megaboa.config.models.section import Name, Section, key


def _axis(value: Any) -> Any:
    """A list of values, or a mapping from labels to the keys that each of them sets."""
    if not value:
        raise ValueError("is empty: give it values or remove it")
    if isinstance(value, dict):
        for label, keys in value.items():
            if not isinstance(keys, dict) or not keys:
                raise ValueError(
                    f"{label!r} must be a mapping from dotted keys to values (or give the axis a list of values)"
                )
    elif not isinstance(value, list):
        raise ValueError("must be a list of values, or a mapping from labels to dotted keys with values")
    return value


Axis = Annotated[
    list[Any] | dict[str, dict[str, Any]],
    BeforeValidator(_axis),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "array", "minItems": 1},
                {"type": "object", "minProperties": 1, "additionalProperties": {"type": "object", "minProperties": 1}},
            ]
        }
    ),
]


class Sweep(Section):
    """Every block given multiplies the number of runs. A value may stand for any key of the file, dotted."""

    grid: dict[str, Axis] = key({}, "axes of which every combination is run", min_length=1)
    zip: dict[str, Axis] = key({}, "axes of equal length that advance together", min_length=1)
    runs: dict[Name, dict[str, Any]] = key({}, "named runs: for each its own values, by dotted key", min_length=1)
    skip_illegal: bool = key(
        False, "leave out runs that could never work, and list them as INVALID; else they stop the plan"
    )

    @model_validator(mode="after")
    def _something(self) -> Sweep:
        if not (self.grid or self.zip or self.runs):
            raise ValueError("is empty: give it grid, zip or runs, or remove it")
        lengths = {name: len(axis) for name, axis in self.zip.items()}
        if len(set(lengths.values())) > 1:
            listed = ", ".join(f"{name} has {length}" for name, length in lengths.items())
            raise ValueError(f"the axes of zip must be of equal length: {listed}")
        return self
