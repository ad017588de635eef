"""Findings about runs that passed but could be faster, or whose loss curve isn't smooth.

These are pure functions of the plan, metrics, steps and profile. Each returns lines, the first without indentation;
none if it finds nothing.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megaboa import peaks
from megaboa.check import calibration, flops, memory, parameters, speed, table
from megaboa.check.facts import Facts
from megaboa.check.stages import Stage, stages
from megaboa.doctor.troubles import AVOID
from megaboa.formats import counted
from megaboa.records import Analysis, ExamplesRead, Gpus, GpuUse, RankSteps, Step, Summary
from megaboa.run.gpu_troubles import troubles_of

LOW = 0.2  # share of the peak: half of what large models reach
UNBALANCED = 0.05  # share of a step: excess of the fullest stage over the mean, and saving by a better split
WAITING = 0.1  # share of a step spent loading data
STARVED = 0.2  # share of a step in which GPUs wait for the host to launch
GRAPH = {
    "model.cuda_graph_impl": "full_iteration",
    "model.cuda_graph_modules": "[]",
    "model.use_te_rng_tracker": "true",
    "ddp.check_for_nan_in_grad": "false",
    "rerun_state_machine.check_for_nan_in_loss": "false",
}
MOST_GPUS = 8  # number of findings shown
LOOK = f"look at the node (nvidia-smi -q), and keep runs away from it: {AVOID}"
WINDOW = 50  # number of earlier steps that a step is compared with
SPREADS = 8  # a spike is so many median absolute deviations above their median
RISE = 0.1  # share of the loss: smaller rises are noise, however smooth the curve
CLIPPED = 0.5  # share of the steps after warm-up
ENOUGH = 200  # number of steps: no findings about shorter runs
MOSTLY = 0.5  # share of the examples
FEW_COUNT = 0.02  # share of the tokens: answers of two words to prompts of a page
FLAT = 0.02  # share of the total improvement that the second half brought
MOVED = 0.05  # share of the first loss


def slow(f: Facts, summary: Summary) -> list[str]:
    """A run far below its GPUs' peak, with the parts of a step according to the speed model."""
    timed, peak = summary.step_seconds, peaks.operations(f.cluster.gpu)
    if f.cluster.device != "cuda" or peak is None or not timed or not memory.is_known(f) or not speed.is_known(f):
        return []
    seconds = timed.median
    share = flops.of_step(f) / (seconds * (f.layout.world_size or 1) * peak)
    if share >= LOW:
        return []
    expected, by = speed.of_step(f), calibration.told(f.cluster.gpu, f.cluster.nodes, f.training.precision)
    spent = expected.shares(0.1)
    return [
        f"at {share:.0%} of its GPUs' peak: a step takes {seconds:.3g} s",
        f"  the speed model expects {expected.seconds:.3g} s ({spent}; {by}); if it takes longer, profile a few steps",
        "  try: megaboa advise lists layouts that should be faster",
    ]


def unbalanced(f: Facts, analysis: Analysis | None) -> list[str]:
    """A stage with more computation than the others, usually the one with the loss."""
    if f.layout.pp == 1 or not memory.is_known(f) or f.layout.stages is not None:
        return []
    work = works(f)
    fullest, mean = max(work), sum(work) / len(work)
    best = better_split(f)
    won = 1 - max(works(best)) / fullest if best else 0.0
    if best is None or fullest / mean - 1 < UNBALANCED or won < UNBALANCED:
        return []
    ends = best.layout.first_stage_layers, best.layout.last_stage_layers
    keys = ("model.num_layers_in_first_pipeline_stage", "model.num_layers_in_last_pipeline_stage")
    split = ", ".join(f"{key}: {size}" for key, size in zip(keys, ends, strict=True) if size is not None)
    return [
        f"stage {work.index(fullest)} has {fullest / mean - 1:.0%} more computation than the mean of "
        f"{f.layout.pp} stages, by counted operations",
        *_measured_bubble(analysis),
        f"  try: overrides: {{{split}}}: the fullest stage then has {won:.0%} less",
    ]


def works(f: Facts) -> list[float]:
    """Operations per token of every stage: its layers, and the output projection on the stage of the loss."""
    layers = [flops.of_layer(f, layer) for layer in range(f.model.layers or 0)]
    loss = (f.model.hidden or 0) * parameters.padded_vocabulary(f)
    return [_work(stage, layers, loss) for stage in stages(f)]


def _work(stage: Stage, layers: list[float], loss: float) -> float:
    extra = stage.mtp * (layers[-1] + loss)
    return sum(layers[layer] for layer in stage.layers) + (loss if stage.loss else 0.0) + extra


def better_split(f: Facts) -> Facts | None:
    """The legal split whose fullest stage has the least work, with other sizes of the first and last stage."""
    each = (f.model.layers or 0) // f.layout.pp
    sizes = [None, *range(max(1, each - 4), each + 5)]
    plain = dataclasses.replace(f.layout, embedding_counts=False, loss_counts=False)
    layouts = [
        dataclasses.replace(plain, first_stage_layers=first, last_stage_layers=last)
        for first in sizes
        for last in sizes
    ]
    legal = [one for layout in layouts if table.is_legal(one := dataclasses.replace(f, layout=layout))]
    return min(legal, key=lambda one: max(works(one)), default=None)


def _measured_bubble(analysis: Analysis | None) -> list[str]:
    found = analysis and analysis.pipeline
    if not found or found.ideal is None:
        return []
    return [f"  profile: stages stand still for {found.measured:.0%} of a step; with even ones {found.ideal:.0%}"]


def waits_for_data(analysis: Analysis | None, workers: int | None) -> list[str]:
    """A run whose host waits for data: the largest share over the ranks, by a profile."""
    shares = [share for rank in analysis.ranks if (share := _loading(analysis, rank))] if analysis else []
    most = max(shares, default=0.0)
    if most < WAITING:
        return []
    have = "" if workers is None else f" (now {workers})"
    return [
        f"{most:.0%} of a step are spent loading data, by its profile",
        f"  try: data.num_workers: {max(2 * (workers or 0), 2)}{have}; an index on a local disk",
    ]


def _loading(analysis: Analysis, rank: RankSteps) -> float | None:
    phases = analysis.details[str(rank.rank)].phases
    host = next((row.host_ms for row in phases if row.phase == "data"), None)
    wall = rank.ms["wall"].median
    return host / wall if host and wall else None


def waits_for_host(f: Facts, analysis: Analysis | None) -> list[str]:
    """A run whose GPU idles because nothing has been launched: the largest share over the ranks, by a profile."""
    timed = [rank.ms for rank in analysis.ranks if rank.ms["wall"].median] if analysis else []
    most = max((ms["starved"].median / ms["wall"].median for ms in timed if ms.get("starved")), default=0.0)
    if f.kernels.graphs != "none" or most < STARVED:
        return []
    plain_stages = {"model.batch_p2p_sync": "false"} if f.layout.pp > 1 and not f.layout.vpp else {}
    graph = ", ".join(f"{name}: {value}" for name, value in {**GRAPH, **plain_stages}.items())
    return [
        f"{most:.0%} of a step the GPU waits for the host to launch, by its profile",
        f"  try: overrides: {{{graph}}}: one launch a step, where the model can be captured; else larger micro-batches",
    ]


def casts_single_rows(f: Facts) -> list[str]:
    """A run that keeps weights in FP8: the distributed optimizer casts them as tensors of one row, with a slow kernel.

    This takes 50 of 334 ms on an H200, with megatron-core 0.19.2 and Transformer Engine 2.20.2, see
    docs/benchmarks/h200.md.
    """
    precision = f.training.precision or ""
    if "fp8_current_scaling" not in precision or not f.training.fp8_weights or not f.layout.distributed_optimizer:
        return []
    return [
        f"{precision} keeps the weights in FP8, which makes the optimizer's casts slow: 15% of a step of GPT2-large",
        "  try: overrides: {mixed_precision.fp8_param_gather: false}: faster, with 2 bytes a weight to gather, not 1",
    ]


def of_examples(read: ExamplesRead | None) -> list[str]:
    """A fine-tuned run whose examples had little to learn from."""
    if read is None:
        return []
    if read.silent > MOSTLY * read.examples:
        return [
            f"{read.silent:,} of {read.examples:,} examples are so long that no token which counts is left of them",
            f"  try: a higher training.seq_length: the longest has {read.longest:,} tokens",
        ]
    if read.counted < FEW_COUNT * read.tokens:
        return [
            f"{read.counted:,} of {read.tokens:,} tokens count in the loss: it is learned from hardly anything",
            f"  try: another tuning.template or tuning.loss_on (the template is {read.template}); the report "
            "marks what counts in an example",
        ]
    return []


def gpu_findings(found: Gpus | None) -> list[str]:
    """Findings about single GPUs, each by host and index."""
    if found is None:
        return []
    lines = [f"{_named(one)} {said}" for one, _, said in troubles_of(found)]
    more = [f"  and {counted(len(lines) - MOST_GPUS, 'more such finding')}"] if len(lines) > MOST_GPUS else []
    return [*lines[:MOST_GPUS], *more, *([f"  try: {LOOK}"] if lines else [])]


def _named(one: GpuUse) -> str:
    return f"{one.host}, GPU {one.index}:"


@dataclass(frozen=True)
class Course:
    """The settings of a run that influence its loss curve."""

    lr: float | None = None
    warmup: int = 0
    clip: float | None = None
    pretrained: bool = False


def curve_findings(
    steps: Sequence[Step], course: Course, read: Callable[[int], list[str]] = lambda step: []
) -> list[str]:
    """Problems of a loss curve: spikes, clipped gradients, hardly any progress.

    `steps`: the last record of each step. `read`: describes the data that a step read, in lines.
    """
    known = [step for step in steps if isinstance(step.loss, float) and not step.skipped]
    if len(known) < ENOUGH:
        return []
    return [*_spikes(known, course, read), *_clipped(known, course), *_hardly_learns(known, course)]


def _spikes(steps: Sequence[Step], course: Course, read: Callable[[int], list[str]]) -> list[str]:
    found = spikes(steps)
    if not found:
        return []
    step, before, loss = max(found, key=lambda one: one[2] / one[1])
    lines = [
        f"{counted(len(found), 'loss spike')}, the largest at step {step}: {before:.3g} to {loss:.3g}",
        *read(step),
    ]
    early = all(one[0] <= 2 * course.warmup + WINDOW for one in found)
    if early:
        return [*lines, f"  try: schedule.warmup_iters: {max(2 * course.warmup, 2 * WINDOW)} (now {course.warmup})"]
    lower = f" (optimizer.lr: {course.lr / 2:g})" if course.lr else ""
    return [*lines, f"  try: half the learning rate{lower}, or recovery.loss_spike, which leaves such batches out"]


def spikes(steps: Sequence[Step]) -> list[tuple[int, float, float]]:
    """Loss spikes: the step, the median loss before it, and its loss.

    Steps near each other are one spike, represented by its highest step.
    """
    losses = [step.loss for step in steps]
    found: list[tuple[int, float, float]] = []
    for index in range(WINDOW, len(losses)):
        before = losses[index - WINDOW : index]
        usual = statistics.median(before)
        spread = statistics.median(abs(loss - usual) for loss in before)
        if losses[index] <= usual + max(SPREADS * spread, RISE * usual):
            continue
        one = (steps[index].step, usual, losses[index])
        if found and one[0] - found[-1][0] <= WINDOW:
            found[-1] = max(found[-1], one, key=lambda spike: spike[2])
        else:
            found.append(one)
    return found


def _clipped(steps: Sequence[Step], course: Course) -> list[str]:
    norms = [step.grad_norm for step in steps[course.warmup :] if step.grad_norm is not None]
    if not course.clip or not norms:
        return []
    share = sum(norm > course.clip for norm in norms) / len(norms)
    if share < CLIPPED:
        return []
    usual = statistics.median(norms)
    return [
        f"gradients are clipped in {share:.0%} of the steps: their norm is {usual:.3g} in the median, "
        f"optimizer.clip_grad {course.clip:g}",
        "  try: a longer warm-up or a lower learning rate; clipping then catches only what is unusual",
    ]


def _hardly_learns(steps: Sequence[Step], course: Course) -> list[str]:
    tenth = len(steps) // 10
    first, middle, last = (_mean(steps, begin, tenth) for begin in (0, len(steps) // 2, len(steps) - tenth))
    if not course.pretrained and first - last < MOVED * first:
        higher = f" (optimizer.lr: {course.lr * 3:g})" if course.lr else ""
        return [
            f"hardly learns: a loss of {first:.3g} in the first tenth, {last:.3g} in the last",
            f"  try: a higher learning rate{higher}; is the data what it should be?",
        ]
    if first > last and middle - last < FLAT * (first - last):
        return [
            f"the second half brought {max(middle - last, 0):.2g} of {first - last:.3g}: {middle:.3g} to {last:.3g}",
            "  try: schedule.decay and min_lr, so that the learning rate falls; or stop earlier",
        ]
    return []


def _mean(steps: Sequence[Step], begin: int, count: int) -> float:
    return statistics.fmean(step.loss for step in steps[begin : begin + count])
