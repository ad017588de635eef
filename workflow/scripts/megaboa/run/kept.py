"""Which of a run's checkpoints is exported: the last, the best, or one by its number. Standard library only."""

from __future__ import annotations

from megaboa.errors import InputError
from megaboa.paths import RunStore
from megaboa.records import Evaluated, read_steps
from megaboa.run import checkpoints

LOSS = "lm loss"


def chosen(run: str, store: RunStore, wanted: str | int) -> int:
    """The iteration that `export.checkpoint` means: `final`, `best` (lowest validation loss) or an iteration."""
    kept = checkpoints.complete_iterations(store.checkpoints)
    if not kept:
        raise InputError(
            f"run {run} has no checkpoint to export: set checkpoint.save_interval above 0, or train it again"
        )
    if wanted == "final":
        return kept[-1]
    if wanted == "best":
        return _best(run, store, kept)
    if wanted not in kept:
        there = ", ".join(map(str, kept))
        raise InputError(
            f"run {run}: export.checkpoint is {wanted}, and the kept checkpoints are {there}: name one of them"
        )
    return int(wanted)


def _best(run: str, store: RunStore, kept: list[int]) -> int:
    losses = {iteration: event.losses[LOSS] for iteration, event in evaluations(store).items() if iteration in kept}
    if not losses:
        raise InputError(
            f"run {run}: export.checkpoint is best, and none of the kept checkpoints ({', '.join(map(str, kept))}) was "
            "evaluated: let training.eval_interval be a multiple of checkpoint.save_interval, or name an iteration"
        )
    return min(losses, key=lambda iteration: (losses[iteration], -iteration))


def evaluations(store: RunStore) -> dict[int, Evaluated]:
    """By step, the last time that it was evaluated."""
    events = [event for attempt in store.attempts for event in read_steps(attempt.steps)]
    found = [event for event in events if isinstance(event, Evaluated) and LOSS in event.losses]
    return {event.step: event for event in found}


def require_sound(run: str, store: RunStore, iteration: int) -> None:
    """Refuse a checkpoint whose files are no longer those that were written."""
    if problem := checkpoints.damage(store.checkpoints, iteration):
        others = [kept for kept in checkpoints.complete_iterations(store.checkpoints) if kept != iteration]
        remedy = f"export another one (export.checkpoint: {others[-1]})" if others else "train the run again"
        raise InputError(f"run {run}: checkpoint {iteration} is damaged: {problem}; nothing is exported: {remedy}")
