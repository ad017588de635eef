"""Measured quantities: one line per column of figures and tables.

The plan, the report, the bundle and published tables all read this table. A new quantity needs a line here and a value
at its `source` in a run's summary.json (`observe/summary.py`, with a field in `records/summaries.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

# The tables that a figure can be drawn from: the values of a figure's `data`.
Rows = Literal["runs", "steps", "validation", "time", "exports"]
# `file`: a column of the report's tables/runs.* (the page's table of runs is page.html.j2's own); `settings`: its mean
# over seeds is in tables/settings.*; `machines`: a column of the page's table of GPU use; `published`: a quantity that
# published tables may state.
Use = Literal["figures", "file", "settings", "machines", "published"]
EVALUATION = "evaluation."  # prefix; a key of the file that `evaluate` wrote follows
VALIDATION_SET = "valid/"  # prefix; the name of a further validation set follows: its loss
LOSSES = ("losses/", VALIDATION_SET)
BITS = "bits_per_byte"  # of text: a validation loss that can be compared between tokenizers
SECONDS, SHARE, GIB = "s", "share", "GiB"


@dataclass(frozen=True)
class Metric:
    """A measured quantity. `source` is the dotted path of its value in a run's documents (`summary`, `goodput`,
    `preflight`). Without a source, the code that makes the table calculates the column."""

    name: str
    label: str = ""  # default: its name
    source: str = ""
    unit: str = ""
    form: str = ".4g"  # format in the page's tables
    scale: float | None = None
    spread: bool = False  # also has columns for the 5th and 95th percentile
    less_is_better: bool = False
    timed: bool = False  # comes from a clock or a meter, so it differs between repetitions
    uses: tuple[Use, ...] = ("figures",)

    def of(self, documents: Mapping[str, Any]) -> Any:
        """A run's value; None where it wasn't measured."""
        return self._at(self.source, documents)

    def columns(self, documents: Mapping[str, Any]) -> dict[str, Any]:
        around = self.source.removesuffix("median")
        ends = {f"{self.name}.{end}": self._at(around + end, documents) for end in ("p5", "p95")} if self.spread else {}
        return {self.name: self.of(documents), **ends}

    def _at(self, source: str, documents: Mapping[str, Any]) -> Any:
        found: Any = documents
        for part in source.split("."):
            try:
                found = found[-1 if part == "last" and isinstance(found, list) else part]
            except (KeyError, IndexError, TypeError):
                return None
        return found if found is None or self.scale is None else found * self.scale


FILE: tuple[Use, ...] = ("figures", "file")
MEANS: tuple[Use, ...] = (*FILE, "settings")
MACHINES: tuple[Use, ...] = (*FILE, "machines")
PUBLISHED: tuple[Use, ...] = (*FILE, "published")
ALL: tuple[Use, ...] = (*MACHINES, "published")
LESS: dict[str, Any] = {"less_is_better": True}
TIMED: dict[str, Any] = {"timed": True}

METRICS: dict[Rows, tuple[Metric, ...]] = {
    "runs": (
        Metric("world_size", "ranks", "summary.world_size"),
        Metric("layout"),
        Metric("setting"),
        Metric("steps", "", "summary.steps"),
        Metric("attempts", "", "summary.attempts"),
        Metric("trained_tokens", "training tokens"),
        Metric("train_flops", "compute (FLOP, 6 × parameters × tokens)"),
        Metric("goodput", "", "goodput.goodput", SHARE, **TIMED),
        Metric("loss.first", "first loss", "summary.loss.first", **LESS, uses=FILE),
        Metric("loss.last", "last loss", "summary.loss.last", **LESS, uses=MEANS),
        Metric("loss.min", "smallest loss", "summary.loss.min", **LESS),
        Metric("loss.tail_mean", "loss, mean of the last tenth", "summary.loss.tail_mean", **LESS,
               uses=("figures", "settings")),
        Metric("validation", "validation loss", "summary.validation.last.losses.lm loss", **LESS, uses=MEANS),
        Metric(BITS, "bits per byte", **LESS, uses=FILE),
        Metric("step_seconds", "step time (seconds)", "summary.step_seconds.median",
               SECONDS, spread=True, **LESS, **TIMED, uses=PUBLISHED),
        Metric("tokens_per_second", "tokens per second", "summary.tokens_per_second.median",
               spread=True, **TIMED, uses=PUBLISHED),
        Metric("tokens_per_second_per_gpu", "tokens per second and GPU", "summary.tokens_per_second_per_rank",
               **TIMED, uses=("figures", "published")),
        Metric("tflops_per_gpu", "TFLOP/s per GPU", "summary.tflops_per_rank.median", form=".0f", **TIMED, uses=ALL),
        Metric("mfu", "MFU", "summary.mfu.median", SHARE, ".0%", **TIMED, uses=ALL),
        Metric("scaling_efficiency", "scaling efficiency", "", SHARE, **TIMED),
        Metric("memory.predicted_gib", "predicted memory (GiB)", "preflight.tensors_gib", GIB),
        Metric("memory.measured_gib", "measured memory (GiB)", "summary.memory.peak_bytes.allocated",
               GIB, ".1f", 2**-30, uses=MACHINES),
        Metric("memory_mib", "reserved (MiB)", "summary.memory.peak_bytes.reserved", scale=2**-20,
               **LESS, uses=("published",)),
        Metric("energy.joules_per_gpu", "joules per GPU and step", "summary.energy.joules_per_gpu_and_step.median",
               form=",.0f", **LESS, **TIMED, uses=MACHINES),
        Metric("energy.watts_per_gpu", "watts per GPU", "summary.energy.watts_per_gpu.median",
               form=",.0f", **TIMED, uses=MACHINES),
        Metric("gpus.watts_peak", "peak watts of a GPU", "summary.gpus.total.watts_peak",
               form=",.0f", **TIMED, uses=MACHINES),
        Metric("gpus.celsius_most", "hottest GPU (°C)", "summary.gpus.total.celsius_most",
               form=".0f", **LESS, **TIMED, uses=MACHINES),
        Metric("gpus.power_capped", "time at the power limit", "summary.gpus.total.power_capped",
               SHARE, ".0%", **TIMED, uses=MACHINES),
        Metric("gpus.too_hot", "time slowed by heat", "summary.gpus.total.too_hot",
               SHARE, ".0%", **LESS, **TIMED, uses=MACHINES),
        Metric("gpus.power_braked", "time slowed by the power supply", "summary.gpus.total.power_braked",
               SHARE, ".0%", **LESS, **TIMED, uses=MACHINES),
        Metric("stragglers.slowest_over_fastest", "slowest over fastest rank",
               "summary.stragglers.slowest_over_fastest.median", form=".3f", **LESS, **TIMED, uses=MACHINES),
    ),
    "steps": (
        Metric("run"),
        Metric("step"),
        Metric("tokens"),
        Metric("loss", **LESS),
        Metric("grad_norm", "gradient norm"),
        Metric("lr", "learning rate"),
        Metric("seconds", "", "", SECONDS, **LESS, **TIMED),
        Metric("tokens_per_second", "tokens per second", **TIMED),
        Metric("warm"),
    ),
    "validation": (Metric("run"), Metric("step"), Metric("set"), Metric("loss", **LESS),
                   Metric(BITS, "bits per byte", **LESS)),
    "exports": (Metric("run"), Metric("step"), Metric("name"), Metric("value")),
    "time": (
        Metric("run"),
        Metric("kind"),
        Metric("time_share", "", "", SHARE, **TIMED),
        Metric("seconds", "", "", SECONDS, **LESS, **TIMED),
    ),
}  # fmt: skip
# The column that tells apart what is measured of one run: of one step, if the table has steps.
SERIES: dict[Rows, str] = {"validation": "set", "exports": "name", "time": "kind"}
# Labels of columns that are keys of the experiment.
KEYS = {
    "params": "parameters",
    "optimizer.lr": "learning rate",
    "training.global_batch_size": "global batch size",
    "training.train_iters": "steps",
    "training.seed": "seed",
}
_BY_NAME = {metric.name: metric for rows in reversed(METRICS.values()) for metric in rows}
# What the report's tables call columns of their own, in which scores stand, too.
_OWN = {"run", "step", "model", "n", "missing", "validation_loss"}
_OWN |= {*KEYS.values(), *(metric.label or metric.name for metric in METRICS["runs"])}


def columns(rows: Rows) -> list[str]:
    """The columns of this table that a figure may show."""
    shown = (metric for metric in METRICS[rows] if "figures" in metric.uses)
    return [name for metric in shown for name in metric.columns({})]


def used(use: Use) -> tuple[Metric, ...]:
    """The metrics of runs with this use, in the order of the table."""
    return tuple(metric for metric in METRICS["runs"] if use in metric.uses)


def named(name: str) -> Metric:
    """The metric of a column: a measured quantity, a key of the experiment, a loss, or a value from `evaluate`."""
    if name in _BY_NAME:
        return _BY_NAME[name]
    unit = SECONDS if name.endswith("seconds") else ""
    key = name.removeprefix(EVALUATION)
    label = KEYS.get(name, key if key == name else score(key))
    return Metric(name, label, "", unit, less_is_better=name.startswith(LOSSES))


def score(key: str) -> str:
    """What tables call a value from `evaluate`: its key, or `evaluation.step` where a column of their own is called
    `step`. Different keys have different names: a key `evaluation.step` is `evaluation.evaluation.step`."""
    return f"{EVALUATION}{key}" if key.split(EVALUATION)[-1] in _OWN else key


def label(name: str) -> str:
    return named(name).label or name


def is_timed(column: str) -> bool:
    """Whether a column comes from a clock or a meter, or is a statistic of such a column: `seconds.p25`."""
    name = column if column in _BY_NAME else column.rpartition(".")[0]
    return column == "time" or named(name).timed
