"""What the CPU backend can't do, or could do only by training something else than was asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class RefusedOnCpu(ValueError):
    """A configuration asks for what only a GPU can do."""


class Rule(NamedTuple):
    field: str
    refused: Callable[[Any], bool]
    remedy: str


RULES = (
    Rule("model.fp8", bool, "train in fp32 or bf16_mixed"),
    Rule("model.fp4", bool, "train in fp32 or bf16_mixed"),
)


def _value(cfg: Any, field: str) -> Any:
    for name in field.split("."):
        cfg = getattr(cfg, name, None)
    return cfg


def refuse(cfg: Any) -> None:
    """Raise `RefusedOnCpu`, naming every such field of Bridge's ConfigContainer with its value and a remedy."""
    found = [(rule, _value(cfg, rule.field)) for rule in RULES]
    lines = [f"  {rule.field}: {value!r}: {rule.remedy}" for rule, value in found if rule.refused(value)]
    if lines:
        raise RefusedOnCpu("device: cpu can't do what is asked for:\n" + "\n".join(lines))
