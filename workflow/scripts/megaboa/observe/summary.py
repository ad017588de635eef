"""Summarizes a run and decides whether it is valid: `summary.json`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from megaboa.formats import some_of
from megaboa.observe import performance
from megaboa.observe.numbers import WARMUP_STEPS, loss_summary, spread, without_nan
from megaboa.observe.steps import Row, is_finite, steps_in
from megaboa.records import (
    AttemptStart,
    Energy,
    Evaluated,
    Gpus,
    GradNorm,
    Memory,
    StepEvent,
    Stragglers,
    Summary,
    TrainRecord,
    Validation,
    parse,
    plain,
)
from megaboa.run.ledger import ran_on


def summarize(
    run: str,
    train: TrainRecord,
    attempts: Sequence[AttemptStart],
    events: Sequence[StepEvent],
    rows: list[Row],
    *,
    drift: Sequence[str] = (),
    peak_tflops: float | None = None,
    memory: Memory | None = None,
    energy: Energy | None = None,
    gpus: Gpus | None = None,
    stragglers: Stragglers | None = None,
) -> Summary:
    """Gates and numbers of a run, from its train manifest, its attempts' start lines, its events and its step rows.

    `drift`: deviations of the run from its configuration.
    """
    final = [row for row in rows if not row.replayed]
    reasons = [*invalid_reasons(train, attempts, final), *drift]
    timed = timed_rows(final)
    tflops = spread(performance.tflops(timed, events, train.world_size))
    throughput = spread([row.tokens / row.seconds for row in timed if row.tokens])
    summary = Summary(
        run=run,
        identity=train.identity,
        state="INVALID" if reasons else "PASS",
        reasons=tuple(reasons),
        world_size=train.world_size,
        train_iters=train.train_iters,
        parent=train.parent,
        steps=len(final),
        tokens=sum(row.tokens or 0 for row in final),
        skipped_steps=sum(row.skipped for row in final),
        nan_steps=sum(row.loss is not None and math.isnan(row.loss) for row in final),
        attempts=len(attempts),
        # more than one if packages or code changed between attempts
        ran_on=tuple(ran_on(attempts)),
        lost_steps=len(rows) - len(final),
        left_out=train.skipped,  # ranges of steps whose batches were left out after a loss spike
        warmup_steps_dropped=len(final) - len(timed),
        window=(timed[0].step, timed[-1].step) if timed else None,  # the steps that count for the speed
        step_seconds=spread([row.seconds for row in timed]),
        tokens_per_second=throughput,
        tokens_per_second_per_rank=throughput and throughput.median / train.world_size,
        tflops_per_rank=tflops,
        gpu=performance.gpu_of(events),
        mfu=performance.mfu(tflops, events, peak_tflops),
        memory=memory,
        energy=performance.power(energy, gpus),
        gpus=gpus,
        stragglers=stragglers,
        loss=loss_summary([row.step for row in final], [row.loss for row in final]),
        grad_norm=GradNorm(last=final[-1].grad_norm, max=_max([row.grad_norm for row in final])) if final else None,
        validation=validation(events),
    )
    return parse(Summary, without_nan(plain(summary)), f"the summary of {run}")


def invalid_reasons(train: TrainRecord, attempts: Sequence[AttemptStart], final: list[Row]) -> list[str]:
    """Why a completed run is invalid; empty if it is valid."""
    reasons = []
    # a step that fp16's loss scaling skipped has no finite loss by design
    bad = [row.step for row in final if not row.skipped and not is_finite(row.loss)]
    if bad:
        reasons.append(f"no finite loss at {_steps(bad)}")
    left_out = steps_in(train.skipped)
    own = range((train.parent.steps_done if train.parent else 0) + 1, train.train_iters + 1)
    missing = sorted(set(own) - {row.step for row in final} - left_out)
    if missing:
        reasons.append(f"{len(final)} of {len(own)} steps recorded; missing: {_steps(missing)}")
    wrong = sorted({start.world_size for start in attempts} - {train.world_size})
    if wrong:
        reasons.append(f"ran with {' and '.join(map(str, wrong))} ranks instead of {train.world_size}")
    return reasons


def timed_rows(final: list[Row]) -> list[Row]:
    """The steps that count for the speed: all but the first few of every attempt."""
    seen: dict[int, int] = {}
    timed = []
    for row in final:
        seen[row.attempt] = seen.get(row.attempt, 0) + 1
        if seen[row.attempt] > WARMUP_STEPS and row.seconds:
            timed.append(row)
    return timed


def validation(events: Sequence[StepEvent]) -> tuple[Validation, ...]:
    """Losses of every evaluation by step; of a repeated evaluation the last."""
    by_step = {event.step: event.losses for event in events if isinstance(event, Evaluated)}
    return tuple(Validation(step=step, losses=by_step[step]) for step in sorted(by_step))


def _max(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.max(known)) if known else None


def _steps(steps: list[int], shown: int = 5) -> str:
    return f"step{'' if len(steps) == 1 else 's'} {some_of(list(map(str, steps)), shown)}"
