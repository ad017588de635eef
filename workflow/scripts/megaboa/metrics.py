"""What is measured: one line for each column of figures and tables.

The plan, the report, the bundle and published tables read it here. A new quantity is a line here, and a value at its
`source` in a run's summary.json (`observe/summary.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

# Which rows a figure may take it from, as `data` of a figure says.
Rows = Literal["runs", "steps", "validation", "time"]
# `file`: a column of the report's tables/runs.*; `machines`: of the page's table of what runs took of their GPUs;
# `published`: published tables may state it.
Use = Literal["figures", "file", "machines", "published"]
EVALUATION = "evaluation."  # then a key of what `evaluate` wrote
SECONDS, SHARE, GIB = "s", "share", "GiB"


@dataclass(frozen=True)
class Metric:
    """`source` is the way to a run's value through its documents: `summary` and `goodput`, as in these files, and
    `preflight`. Without it, the table's maker calculates the column."""

    name: str
    label: str = ""  # default: its name
    unit: str = ""
    source: tuple[str | int, ...] = ()
    scale: float | None = None
    spread: bool = False  # 5th and 95th percentile lie beside the median
    form: str = ".4g"  # in the page's tables
    less_is_better: bool = False
    timed: bool = False  # what a clock or a meter said: it is never the same twice
    uses: tuple[Use, ...] = ("figures",)

    def of(self, documents: Mapping[str, Any]) -> Any:
        """A run's value; None where it wasn't measured."""
        return self._at(self.source, documents)

    def columns(self, documents: Mapping[str, Any]) -> dict[str, Any]:
        parts = ("p5", "p95") if self.spread else ()
        ends = {f"{self.name}.{part}": self._at((*self.source[:-1], part), documents) for part in parts}
        return {self.name: self.of(documents), **ends}

    def _at(self, source: tuple[str | int, ...], documents: Mapping[str, Any]) -> Any:
        found: Any = documents
        for part in source:
            try:
                found = found[part]
            except (KeyError, IndexError, TypeError):
                return None
        return found if found is None or self.scale is None else found * self.scale


def _summary(name: str, label: str, *way: str | int, **more: Any) -> Metric:
    return Metric(name, label, source=("summary", *way), **more)


_LOSS: dict[str, Any] = {"less_is_better": True}
_SPEED: dict[str, Any] = {"timed": True, "spread": True, "uses": ("figures", "file", "published")}
_MACHINE: dict[str, Any] = {"timed": True, "uses": ("figures", "file", "machines")}
_MEMORY = ("memory", "peak_bytes")

METRICS: dict[Rows, tuple[Metric, ...]] = {
    "runs": (
        _summary("world_size", "ranks", "world_size"),
        Metric("layout"),
        Metric("setting"),
        _summary("steps", "", "steps"),
        _summary("attempts", "", "attempts"),
        Metric("goodput", unit=SHARE, source=("goodput", "goodput"), timed=True),
        _summary("loss.first", "first loss", "loss", "first", **_LOSS, uses=("figures", "file")),
        _summary("loss.last", "last loss", "loss", "last", **_LOSS, uses=("figures", "file")),
        _summary("loss.min", "smallest loss", "loss", "min", **_LOSS),
        _summary("loss.tail_mean", "loss, mean of the last tenth", "loss", "tail_mean", **_LOSS),
        _summary("validation", "", "validation", -1, "losses", "lm loss", **_LOSS, uses=("figures", "file")),
        _summary(
            "step_seconds",
            "step time (seconds)",
            *("step_seconds", "median"),
            unit=SECONDS,
            less_is_better=True,
            **_SPEED,
        ),
        _summary("tokens_per_second", "tokens per second", "tokens_per_second", "median", **_SPEED),
        _summary(
            "tokens_per_second_per_gpu",
            "tokens per second and GPU",
            "tokens_per_second_per_rank",
            timed=True,
            uses=("figures", "published"),
        ),
        _summary(
            "tflops_per_gpu",
            "TFLOP/s per GPU",
            *("tflops_per_rank", "median"),
            form=".0f",
            timed=True,
            uses=("figures", "file", "machines", "published"),
        ),
        _summary(
            "mfu",
            "MFU",
            *("mfu", "median"),
            unit=SHARE,
            form=".0%",
            timed=True,
            uses=("figures", "file", "machines", "published"),
        ),
        Metric("scaling_efficiency", "scaling efficiency", SHARE, timed=True),
        Metric("memory.predicted_gib", "predicted memory (GiB)", GIB, ("preflight", "tensors_gib")),
        _summary(
            "memory.measured_gib",
            "measured memory (GiB)",
            *(*_MEMORY, "allocated"),
            unit=GIB,
            scale=1 / 2**30,
            form=".1f",
            uses=("figures", "file", "machines"),
        ),
        _summary("memory_mib", "reserved (MiB)", *_MEMORY, "reserved", scale=1 / 2**20, uses=("published",)),
        _summary(
            "energy.joules_per_gpu",
            "joules per GPU and step",
            *("energy", "joules_per_gpu_and_step", "median"),
            form=",.0f",
            less_is_better=True,
            **_MACHINE,
        ),
        _summary("energy.watts_per_gpu", "watts per GPU", "energy", "watts_per_gpu", "median", form=",.0f", **_MACHINE),
        _summary(
            "stragglers.slowest_over_fastest",
            "slowest over fastest rank",
            *("stragglers", "slowest_over_fastest", "median"),
            form=".3f",
            less_is_better=True,
            **_MACHINE,
        ),
    ),
    "steps": (
        Metric("run"),
        Metric("step"),
        Metric("tokens"),
        Metric("loss", **_LOSS),
        Metric("grad_norm", "gradient norm"),
        Metric("lr", "learning rate"),
        Metric("seconds", unit=SECONDS, less_is_better=True, timed=True),
        Metric("tokens_per_second", "tokens per second", timed=True),
        Metric("warm"),
    ),
    "validation": (Metric("run"), Metric("step"), Metric("set"), Metric("loss", **_LOSS)),
    "time": (
        Metric("run"),
        Metric("kind"),
        Metric("time_share", unit=SHARE, timed=True),
        Metric("seconds", unit=SECONDS, less_is_better=True, timed=True),
    ),
}
# Of columns that are keys of the experiment.
KEYS = {"optimizer.lr": "learning rate", "training.global_batch_size": "global batch size"}
_BY_NAME = {metric.name: metric for rows in reversed(METRICS.values()) for metric in rows}


def columns(rows: Rows) -> list[str]:
    """What a figure may show of these rows."""
    shown = (metric for metric in METRICS[rows] if "figures" in metric.uses)
    return [name for metric in shown for name in metric.columns({})]


def used(use: Use) -> tuple[Metric, ...]:
    """Of a run, in the order of the table."""
    return tuple(metric for metric in METRICS["runs"] if use in metric.uses)


def named(name: str) -> Metric:
    """Of any column, also of a key of the experiment, a further loss, or a value that `evaluate` found."""
    if name in _BY_NAME:
        return _BY_NAME[name]
    unit = SECONDS if name.endswith("seconds") else ""
    label = KEYS.get(name, name.removeprefix(EVALUATION))
    return Metric(name, label, unit, less_is_better=name.startswith("losses/"))


def label(name: str) -> str:
    return named(name).label or name


def is_timed(column: str) -> bool:
    """Also of one that a figure has made of it: `seconds.p25`."""
    name = column if column in _BY_NAME else column.rpartition(".")[0]
    return column == "time" or named(name).timed
