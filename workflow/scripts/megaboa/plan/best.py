"""`export.checkpoint: best`: whether a run will have checkpoints with a validation loss, from which one is chosen."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from megaboa import blends
from megaboa.errors import InputError
from megaboa.formats import some_of
from megaboa.paths import RunFolder
from megaboa.plan.parent_runs import SHOWN, is_trained_as_planned, will_keep
from megaboa.plan.plan import Run
from megaboa.run.versions import before


def no_loss(run: Run, folder: RunFolder) -> str | None:
    """Why no checkpoint of a run will have a validation loss; None if one will, or if only its recipe knows."""
    why = _never_evaluated(run)
    return None if why is None or _was_evaluated(run, folder) else why


def _never_evaluated(run: Run) -> str | None:
    data, split = run.run.data, run.run.data.get("split")
    if run.run.training.get("eval_iters") == 0:
        return "training.eval_iters is 0: set it to 1 or more"
    if data.get("blend") and split and not blends.shares_of_splits(split)[blends.SPLITS.index("valid")]:
        return f"data.split is {split!r}, which leaves nothing for validation: raise its second share"
    if data.get("blend_per_split") and "valid" not in blends.split_blends(data):
        return f"{blends.key_of_validation(data)} is not set: name a corpus"
    return None


def only_last(run: Run, folder: RunFolder) -> str | None:
    """Why the last checkpoint will be the best one, whatever its loss: no other is kept and evaluated. None if another
    is, if nobody knows yet, or if the run is trained: the export then says what it chose from."""
    kept, training = will_keep(run), run.run.training
    interval = training.get("eval_interval")
    is_unknown = not kept or (run.run.is_recipe and interval is None)
    if is_unknown or is_trained_as_planned(run, folder) or _was_evaluated(run, folder):
        return None
    *others, last = kept
    said = f"export.checkpoint: best is the checkpoint of the last step, {last}, as "
    if not others:
        return f"{said}no other is kept: lower checkpoint.save_interval, or raise keep_last"
    if interval and any(step % interval == 0 for step in others):
        return None
    save = run.launch.checkpoint["save_interval"]
    set_to = (
        f"training.eval_interval is {interval}, and checkpoint.save_interval {save}"
        if interval
        else ("training.eval_interval is not set")
    )
    return (
        f"{said}none of the others ({some_of(list(map(str, others)), SHOWN)}) is evaluated: {set_to}; set "
        f"training.eval_interval to {_nearest(interval or save, save, others)}"
    )


def _nearest(interval: int, save: int, others: Sequence[int]) -> int:
    """The interval of evaluations nearest to the given one at which some of these saved steps are evaluated: a divisor
    of the interval of saves, or one of the steps."""
    divisors = (number for number in range(1, save + 1) if save % number == 0)
    return min((*divisors, *others), key=lambda number: (abs(number - interval), number))


def _was_evaluated(run: Run, folder: RunFolder) -> bool:
    """Whether kept checkpoints of the run's earlier versions have a validation loss."""
    with contextlib.suppress(InputError):  # damaged files: they are made again
        return any(version.losses for version in before(folder, run.run.parent))
    return False
