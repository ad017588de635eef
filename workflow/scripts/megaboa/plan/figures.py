"""What a figure of the report can show: the columns of its tables by name, looked up before anything has run.

`megaboa.report.frames` fills them.
"""

from __future__ import annotations

from collections.abc import Iterable

from megaboa.config.errors import choose
from megaboa.config.models.report import Figure
from megaboa.plan.documents import COLUMNS as PLAN

STEPS = ("run", "step", "tokens", "loss", "grad_norm", "lr", "seconds", "tokens_per_second", "warm")
VALIDATION = ("run", "step", "set", "loss")
TIME = ("run", "kind", "time_share", "seconds")
MEASURED = (
    *("layout", "setting", "steps", "attempts", "goodput"),
    *("loss.first", "loss.last", "loss.min", "loss.tail_mean", "validation"),
    *("step_seconds", "step_seconds.p5", "step_seconds.p95"),
    *("tokens_per_second", "tokens_per_second.p5", "tokens_per_second.p95", "tokens_per_second_per_gpu"),
    *("tflops_per_gpu", "mfu", "scaling_efficiency"),
    *("memory.predicted_gib", "memory.measured_gib"),
)
RUNS = (*(name for name in PLAN if name not in ("tokens", "state", "why")), *MEASURED)
TABLES = {"steps": STEPS, "validation": VALIDATION, "time": TIME, "runs": RUNS}
EVALUATION = "evaluation."  # then a key of what `evaluate` wrote


def problem(figure: Figure, swept: Iterable[str]) -> tuple[str, str] | None:
    """The key of a figure that names no column, and why; None where all do. `swept`: the keys of the sweep."""
    known = dict.fromkeys([*TABLES[figure.data], *RUNS, *swept])
    for key in ("x", "y", "value", "hue", "facet", "over"):
        name = getattr(figure, key)
        if name is not None and name not in known and not name.startswith((EVALUATION, "losses/", "valid/")):
            return key, choose(name, known, "column")
    for name in figure.filter:
        if name not in known and not name.startswith(EVALUATION):
            return "filter", choose(name, known, "column")
    return None
