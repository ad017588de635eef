"""Warnings of runs that only their comparison, or the whole plan, gives rise to."""

from __future__ import annotations

from collections.abc import Collection

from megaboa import blends
from megaboa.formats import listed
from megaboa.layout import AXES, Layout
from megaboa.plan.plan import Run
from megaboa.records import AgreementSpec

# Keys that only some decays read.
READERS = {
    "schedule.wsd_decay_iters": ("WSD",),
    "optimizer.min_lr": ("linear", "cosine", "inverse-square-root", "WSD"),
}


def unread_keys(runs: Collection[Run]) -> dict[str, list[str]]:
    """Warnings of keys that are set, and that no run's decay reads: each with its runs. What only a recipe knows may be
    read."""
    warnings: dict[str, list[str]] = {}
    for key, readers in READERS.items():
        section, _, name = key.partition(".")
        setting = [run for run in runs if getattr(getattr(run.config, section), name)]
        if {None, *readers} & {run.run.schedule.get("decay") for run in setting}:
            continue
        for run in setting:
            value, decay = getattr(getattr(run.config, section), name), run.config.schedule.decay
            message = f"{key}: {value} does nothing with schedule.decay: {decay}, but with {', '.join(readers)}"
            warnings.setdefault(message, []).append(run.name)
    return warnings


def other_weights(runs: Collection[Run], agreements: Collection[AgreementSpec]) -> dict[str, list[str]]:
    """Warnings of runs that must agree with a reference and begin with other random weights: each with its runs.

    Megatron seeds the weights' generator by the ranks of these axes (`_set_random_seed`), on GPUs and on the CPU.
    """
    by_name, found = {run.name: run for run in runs}, {}
    for one in agreements:
        reference = by_name.get(one.reference)
        if reference is None or one.within == "seed" or (of_reference := _draw(reference)) is None:
            continue
        for name in one.runs:
            own = _draw(by_name[name]) if name in by_name else None
            if own is None or own == of_reference:
                continue
            axis = next(axis for axis in own if own[axis] != of_reference[axis])
            message = (
                f"report.agreements: draws other initial weights than {one.reference}, as parallel.{axis} differs, so "
                f"their losses differ from step 1 on: set models.{reference.model}.init to pretrained (with a config "
                "too: every layout then imports the same random weights), let both continue_from one run, or set "
                "within: seed"
            )
            found.setdefault(message, []).append(name)
    return found


def sets_told_apart(runs: Collection[Run]) -> dict[str, dict[str, str]]:
    """By name the validation sets that have other documents in other runs: by run their names in the report."""
    sets = {
        run.name: {
            name: (blends.documents_of_set(run.run.data, blend, run.run.held_out),)
            for name, blend in blends.validation_sets(run.run.data).items()
        }
        for run in runs
    }
    found: dict[str, dict[str, str]] = {}
    for run, names in blends.told_apart(sets).items():
        for name, shown in names.items():
            found.setdefault(name, {})[run] = shown
    return found


def of_sets(apart: dict[str, dict[str, str]]) -> dict[str, list[str]]:
    """Warnings of such sets: each with its runs."""
    warnings = {}
    for name, shown in apart.items():
        message = (
            f"data.validation_sets.{name}: has other documents in other runs, so the report has "
            f"{listed([*dict.fromkeys(shown.values())])}: to compare the runs, name a corpus that none of them "
            "trains on"
        )
        warnings[message] = list(shown)
    return warnings


def _draw(run: Run) -> dict[str, int] | None:
    """The sizes on which a run's random initial weights depend; None if it has others, or the sizes are unknown."""
    sizes = Layout.of_run(run.run)
    if sizes is None or run.run.parent or run.config.models[run.model].init != "scratch":
        return None
    if run.run.overrides.get("model.use_cpu_initialization"):  # whole matrices are drawn there, and then divided
        return None
    # vpp doesn't divide weights, but changes the order in which a rank draws them.
    return {axis.name: sizes.size(axis.name) for axis in AXES if axis.weights or axis.name == "vpp"}
