"""Generates the JSON schema and the table of keys from the typed models."""

from __future__ import annotations

import json
import re
import typing
from typing import Any

from pydantic.json_schema import GenerateJsonSchema

from megaboa.blends import SPLITS
from megaboa.config import keys
from megaboa.config.formula import NAMES
from megaboa.config.models.experiment import Experiment
from megaboa.records import Tree


class _Plain(GenerateJsonSchema):
    """A schema without titles, which would only repeat the names."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def json_schema() -> Tree:
    """The schema for editors: completion, descriptions, and a check of most values. The plan checks more."""
    schema = Experiment.model_json_schema(schema_generator=_Plain)
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": "A Megaboa experiment",
    }
    for definition in schema["$defs"].values():
        definition.pop("title", None)
        for property_ in definition["properties"].values():
            property_.pop("short", None)
    for property_ in schema["properties"].values():
        property_.pop("short", None)
        if isinstance(property_.get("default"), dict):  # the section's own keys have the defaults
            del property_["default"]
    axes = {dotted: {"description": key.field.description} for dotted, key in keys.sweepable().items()}
    definition = schema["$defs"]["Sweep"]["properties"]
    for block in ("grid", "zip"):
        schema["$defs"]["Axis"] = definition[block]["additionalProperties"]
        definition[block]["additionalProperties"] = {"$ref": "#/$defs/Axis"}
        definition[block]["properties"] = {key: {**text, "$ref": "#/$defs/Axis"} for key, text in axes.items()}
    for run in definition["runs"]["patternProperties"].values():
        run["properties"] = axes
    return schema


def schema_text() -> str:
    return json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n"


def key_table() -> str:
    """A Markdown table with a row for every key."""
    rows = ["| key | type | default | meaning | in names |", "|---|---|---|---|---|"]
    for dotted, key in keys.all_keys().items():
        default = (
            "**required**"
            if key.field.is_required()
            else f"`{_yaml(key.field.get_default(call_default_factory=True))}`"
        )
        cells = (
            f"`{dotted}`",
            _type(dotted, key),
            default,
            key.field.description,
            f"`{key.short}`" if key.short else "",
        )
        rows.append("| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows)


def markdown() -> str:
    """The table of config/README.md, with a note."""
    names = ", ".join(f"`{name}`" for name in NAMES)
    note = f"Keys of the types *number* and *whole number* marked with ƒ also take an expression of {names}."
    return f"{note}\n\n{key_table()}"


def _yaml(value: Any) -> str:
    return json.dumps(value)


def _type(dotted: str, key: keys.Key) -> str:
    blend = "name, or names with weights"
    special = {
        "data.blend": blend,
        **{f"data.blend_per_split.{split}": blend for split in SPLITS},
        "data.validation_sets": "mapping from names to blends",
        "export.runs": "list of names, or `all`",
    }
    if dotted in special:
        return special[dotted]
    return _type_name(key.field.annotation) + (" ƒ" if dotted in keys.formula_keys() else "")


def _type_name(annotation: Any) -> str:
    simple = {bool: "true or false", int: "whole number", float: "number", str: "text", Any: "anything"}
    if annotation in simple:
        return simple[annotation]
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return ", ".join(f"`{argument}`" for argument in arguments)
    if origin is list:
        return f"list of {_plural(_type_name(arguments[0]))}"
    if origin is dict:
        return "mapping"
    if origin is typing.Annotated:
        return _type_name(arguments[0])
    return " or ".join(_type_name(argument) for argument in arguments if argument is not type(None))


def _plural(name: str) -> str:
    return re.sub(r"number$", "numbers", name)
