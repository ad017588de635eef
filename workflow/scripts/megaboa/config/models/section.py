"""What all sections of the experiment file are made of: the section, its keys, and kinds of values."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, WithJsonSchema

from megaboa.config.formula import Formula
from megaboa.secrets import has_credentials, is_secret_name

# Names become file and folder names: letters first, then letters, digits, '.', '_', '-'.
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z][A-Za-z0-9._-]*$", max_length=100)]

Count = Annotated[int, Field(gt=0), Formula()]
Whole = Annotated[int, Field(ge=0), Formula()]
Positive = Annotated[float, Field(gt=0), Formula()]
NonNegative = Annotated[float, Field(ge=0), Formula()]
Share = Annotated[float, Field(ge=0, lt=1), Formula()]
Fraction = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    """No unknown keys, no silent conversion ('yes' is not true, '8' is not 8), immutable once read."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, protected_namespaces=())


def key(default: Any = ..., description: str = "", short: str | None = None, **kwargs: Any) -> Any:
    extra = {"short": short} if short else None
    return Field(default=default, description=description, json_schema_extra=extra, **kwargs)


def _patterns(value: Any) -> Any:
    """`all` is the pattern that every run matches."""
    if value == "all":
        return ["*"]
    if isinstance(value, list):
        return value
    raise ValueError("must be a list of names or glob patterns of runs, or `all`")


Runs = Annotated[
    list[str],
    BeforeValidator(_patterns),
    WithJsonSchema({"anyOf": [{"const": "all"}, {"type": "array", "items": {"type": "string"}}]}),
]


_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")  # shells read these names


def harmless[Values: Mapping[str, str | None]](values: Values, instead: str) -> Values:
    """Variables that may stand in a file."""
    for name, value in values.items():
        if not _VARIABLE.fullmatch(name):
            raise ValueError(f"{name!r} is not the name of a variable: take letters, digits and _, and no digit first")
        if value and (is_secret_name(name) or has_credentials(value)):
            raise ValueError(
                f"{name} is named like a secret, which would be written to disk: remove it here, and export it in the "
                f"shell that calls Snakemake; {instead}"
            )
    return values
