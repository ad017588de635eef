"""What the profile stage captures."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field, NonNegativeInt, WithJsonSchema, model_validator

from megaboa.config.errors import nearest
from megaboa.config.models.section import Section, key

TOOLS = ("none", "pytorch", "nsys", "viztracer", "memory")


def _tool(value: str) -> str:
    """One of those that are known, or a Python file."""
    if value not in TOOLS and not value.endswith(".py"):
        hint = nearest(value, TOOLS)
        meant = f"; did you mean {hint!r}?" if hint else ""
        raise ValueError(f"is not allowed{meant}; allowed: {', '.join(TOOLS)}, or a Python file (.py)")
    return value


Tool = Annotated[
    str,
    AfterValidator(_tool),
    WithJsonSchema({"anyOf": [{"enum": list(TOOLS)}, {"type": "string", "pattern": r"\.py$"}]}),
]


class Profile(Section):
    tool: Tool = key(
        "none",
        f"profiler of the profile stage: {', '.join(TOOLS)} (nsys and memory: on GPUs only), or a Python file with a "
        "class `Profiler` of your own",
    )
    steps: Annotated[list[NonNegativeInt], Field(min_length=2, max_length=2)] = key(
        [2, 8], "first step, and the step before which capture ends; the first and the last are not analysed"
    )
    ranks: list[NonNegativeInt] = key([0], "ranks that are profiled, on whatever nodes they are", min_length=1)
    domains: list[str] = key(["cuda", "nvtx"], "what nsys traces (its `--trace`)", min_length=1)
    arguments: list[str] = key([], "further arguments of `nsys profile`, such as `--enable=efa_metrics`")

    @model_validator(mode="after")
    def _forward(self) -> Profile:
        if self.steps[0] >= self.steps[1]:
            raise ValueError(f"steps must go forward: {self.steps[0]} is not before {self.steps[1]}")
        return self
