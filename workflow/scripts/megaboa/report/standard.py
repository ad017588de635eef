"""The figures that every report has, as specifications like those of `report.figures`. One without data isn't drawn."""

from __future__ import annotations

from megaboa.config.models.outputs import Figure
from megaboa.report.frames import SEED, Frames

LOSS = Figure(name="loss", kind="line", data="steps", x="step", y="loss", y_label="training loss")
VALIDATION = Figure(
    name="validation",
    kind="line",
    data="validation",
    x="step",
    y="loss",
    filter={"set": "main"},
    y_label="validation loss",
)
LOSS_BY_TOKENS = Figure(name="loss_by_tokens", kind="line", data="steps", x="tokens", y="loss", y_label="training loss")
LEARNING_RATE = Figure(name="learning_rate", kind="line", data="steps", x="step", y="lr")
STEP_TIME = Figure(name="step_time", kind="bar", x="run", y="step_seconds")
STEP_TIMES = Figure(
    name="step_times",
    kind="box",
    data="steps",
    x="run",
    y="seconds",
    filter={"warm": "true"},
    y_label="time of a step (seconds)",
)
THROUGHPUT = Figure(name="throughput", kind="bar", x="run", y="tokens_per_second")
MFU = Figure(name="mfu", kind="bar", x="run", y="mfu")
SCALING = Figure(name="scaling", kind="scatter", x="world_size", y="scaling_efficiency", hue="layout")
MEMORY = Figure(
    name="memory", kind="scatter", x="memory.predicted_gib", y="memory.measured_gib", hue="layout", diagonal=True
)
FIGURES = (LOSS, VALIDATION, LOSS_BY_TOKENS, LEARNING_RATE, STEP_TIME, STEP_TIMES, THROUGHPUT, MFU, SCALING, MEMORY)
SWEPT = "sweep"  # the heat map of a sweep over two numbers


def standard_figures(frames: Frames) -> list[Figure]:
    """Seeds of a sweep are drawn as their mean; the loss by tokens only where steps differ in them."""
    figures = [figure for figure in FIGURES if figure is not LOSS_BY_TOKENS or _steps_differ(frames)]
    if frames.varies(SEED):
        curves = {"loss", "validation", "loss_by_tokens"}
        figures = [one.model_copy(update={"over": SEED}) if one.name in curves else one for one in figures]
    return [*figures, *_heat_map(frames)]


def _steps_differ(frames: Frames) -> bool:
    return (frames.varies("gbs") or frames.varies("seq_length")) and not frames.steps.empty


def _heat_map(frames: Frames) -> list[Figure]:
    """Where two axes of a sweep are numbers, and every run has its own pair of them or another seed."""
    axes = [name for name in frames.swept if name != SEED and frames.varies(name) and frames.is_number(name)]
    if len(axes) != 2 or min(frames.runs[name].nunique() for name in axes) < 2 or len(frames.runs) < 4:
        return []
    return [Figure(name=SWEPT, kind="heat", x=axes[0], y=axes[1], value="loss.tail_mean")]
