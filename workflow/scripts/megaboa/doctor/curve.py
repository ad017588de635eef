"""The loss curve of a run that passed: does it learn, and is it calm? Pure functions over its steps."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from megaboa.records import Step

WINDOW = 50  # steps before one, with which it is compared
SPREADS = 8  # median deviations above the median of these: a spike
RISE = 0.1  # of the loss: less is noise, however calm the curve
CLIPPED = 0.5  # of the steps after warm-up
ENOUGH = 200  # steps: of shorter runs nothing is said
FLAT = 0.02  # of all that was won, in the second half
MOVED = 0.05  # of the first loss


@dataclass(frozen=True)
class Course:
    """What a run was asked for, as far as its curve depends on it."""

    lr: float | None = None
    warmup: int = 0
    clip: float | None = None
    pretrained: bool = False


def findings(steps: Sequence[Step], course: Course) -> list[str]:
    """Lines to say. `steps`: of every step the last time that it was done."""
    known = [step for step in steps if isinstance(step.loss, float) and not step.skipped]
    if len(known) < ENOUGH:
        return []
    return [*_spikes(known, course), *_clipped(known, course), *_slow(known, course)]


def _spikes(steps: Sequence[Step], course: Course) -> list[str]:
    found = spikes(steps)
    if not found:
        return []
    step, before, loss = max(found, key=lambda one: one[2] / one[1])
    lines = [f"{len(found)} loss spike(s), the largest at step {step}: {before:.3g} to {loss:.3g}"]
    early = all(one[0] <= 2 * course.warmup + WINDOW for one in found)
    if early:
        return [*lines, f"  try: schedule.warmup_iters: {max(2 * course.warmup, 2 * WINDOW)} (now {course.warmup})"]
    lower = f" (optimizer.lr: {course.lr / 2:g})" if course.lr else ""
    return [*lines, f"  try: half the learning rate{lower}, or recovery.loss_spike, which leaves such batches out"]


def spikes(steps: Sequence[Step]) -> list[tuple[int, float, float]]:
    """Step, what was usual before it, and its loss; steps beside each other are one spike, at its top."""
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


def _slow(steps: Sequence[Step], course: Course) -> list[str]:
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
