"""Runs that continue in place, with other settings but under the same name (`continue_from: itself`).

The earlier state of the run keeps its store and its identity, and becomes the parent. A run that has saved nothing yet
begins at step 0, so that one key serves an experiment to which runs are added. A copy of its manifests is kept
in `runs/<run>/earlier/<id>/`, because those in the run's folder will be replaced.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megaboa.files import write_json
from megaboa.harmless import without_harmless
from megaboa.paths import EarlierRun, RunFolder
from megaboa.plan.plan import Plan, Run
from megaboa.records import (
    Identity,
    Kept,
    Parent,
    Saved,
    TrainRecord,
    Tree,
    parse,
    plain,
    read,
    read_if_there,
    read_ledger,
    read_steps,
    write,
)
from megaboa.run import checkpoints, completion, ledger, progress, unfinished
from megaboa.run.identity import asked_as, stored
from megaboa.store_paths import RunStore


@dataclass(frozen=True)
class Before:
    """An earlier state of a run, and the step of the checkpoint to continue from; None: its last one."""

    store: RunStore
    identity: Identity
    step: int | None


def before(folder: RunFolder, run: Run, wanted: int | None = None) -> Before | None:
    """The state of the run in this folder before the plan changes it; None if it has not been trained.

    A run that was already planned with these settings keeps its parent, however far it has come, unless another step is
    `wanted`, or what it reads has another content by now: then it continues from what it has trained. Settings that
    were planned and never begun count for nothing.
    """
    if not folder.file("run").exists() or not folder.file("launch").exists():
        return None
    now = folder.document("run")
    parent = folder.run.parent if folder.is_in_place else None
    known = [(store, identity) for store, identity in stored(folder) if checkpoints.latest(store.checkpoints)]
    if parent and wanted in (None, parent.iteration) and _same(_alone(now), _alone(plain(run.run))):
        left = unfinished.left_by_other_content(folder)
        if left and not completion.all_saved(left):
            return Before(left, read(Identity, left.identity), None)
        return next(
            (Before(store, one, parent.iteration) for store, one in known if one.digest == parent.identity), None
        )
    mine = [(store, one) for store, one in known if _same(one.run, asked_as(folder, one))]
    if mine:
        store, identity = max(mine, key=lambda one: checkpoints.latest(one[0].checkpoints))
        return Before(store, identity, None)
    if parent:  # planned but not saved yet: starts from the same checkpoint
        return next(
            (Before(store, one, parent.iteration) for store, one in known if one.digest == parent.identity), None
        )
    if not folder.attempts_link.exists():
        return None
    # Planned with other settings, and ended before it began with them: what it began last is what it was.
    last = RunStore.of(folder.attempts_link).path
    return next((Before(store, one, None) for store, one in known if store.path.resolve() == last), None)


def is_as_planned(folder: RunFolder, run: Run, before: Before) -> bool:
    """Whether this state is of a run that began at step 0 just as it is planned now: it has nothing to continue with.

    If what it reads has another content by now, it is another run, unless it is finished: then its job says so, once
    what it reads is up to date.
    """
    if before.step is not None or folder.run.parent or not _same(folder.document("run"), plain(run.run)):
        return False
    if completion.all_saved(before.store) and _same(before.identity.run, asked_as(folder, before.identity)):
        return True
    return unfinished.present(folder).is_of(before.identity)


def is_trained_and_unsaved(folder: RunFolder, run: Run) -> bool:
    """Whether the run has been trained to its end with other settings, and has no checkpoint to continue from."""
    trained = read_if_there(TrainRecord, folder.train_manifest)
    if trained is None or trained.checkpoints or not folder.file("run").exists():
        return False
    return not _same(folder.document("run"), plain(run.run))


def has_saved(folder: RunFolder, run: Run) -> bool:
    """Whether the run has ever saved a checkpoint, also one that has been lost since, with the results or the store."""
    link = folder.attempts_link
    trained = read_if_there(TrainRecord, folder.train_manifest)
    if (
        folder.has_lost_its_store
        or (trained and trained.checkpoints)
        or (folder.file("run").exists() and folder.is_in_place)
    ):
        return True
    roots = {str(run.launch.store), *([str(folder.launch.store)] if folder.file("launch").exists() else [])}
    places = [Path(root, "runs", folder.experiment, folder.name) for root in roots]
    stores = {RunStore(path) for place in places if place.is_dir() for path in place.iterdir() if path.is_dir()}
    return any(map(_has_saved, {*stores, *([RunStore.of(link)] if link.exists() else [])}))


def _has_saved(store: RunStore) -> bool:
    return bool(
        checkpoints.latest(store.checkpoints)
        or any(end.iteration for end in ledger.ends(read_ledger(store.ledger)))
        or any(isinstance(event, Saved) for attempt in store.attempts for event in read_steps(attempt.steps))
    )


def keep(plan: Plan, results: Path) -> None:
    """Copy the manifests of runs that continue in place. Must be called before the plan is written."""
    for run in plan.runs:
        folder = RunFolder(results / plan.name / "runs" / run.name)
        parent = run.run.parent
        if parent is None or not run.folder(results, plan.name).is_in_place:
            continue
        earlier = EarlierRun(folder.path, identity=str(parent.identity))
        if earlier.train_manifest.exists():
            continue
        store, identity = next(one for one in stored(folder) if one[1].digest == parent.identity)
        write_json(earlier.file("run"), identity.run)
        write_json(earlier.file("launch"), folder.document("launch"))
        write(earlier.train_manifest, _manifest(run.name, store, identity, parent))


def _manifest(name: str, store: RunStore, identity: Identity, parent: Parent) -> TrainRecord:
    """The train.json of a run that ended with this checkpoint."""
    kept = checkpoints.sizes(store.checkpoints)
    own = identity.run.get("parent")
    return TrainRecord(
        run=name,
        identity=identity.digest,
        store=str(store.path),
        iteration=parent.iteration,
        train_iters=progress.last_step(store),
        checkpoint=str(checkpoints.folder(store.checkpoints, parent.iteration)),
        checkpoints=tuple(Kept(iteration=step, bytes=size) for step, size in kept.items()),
        bytes=sum(kept.values()),
        parent=parse(Parent, own, store.identity) if own else None,
        world_size=identity.run["world_size"],
        skipped=tuple(ledger.skipped_steps(read_ledger(store.ledger))),
    )


def _alone(run: Tree) -> Tree:
    return {key: value for key, value in run.items() if key != "parent"}


def _same(one: Tree, other: Tree) -> bool:
    return without_harmless(one) == without_harmless(other)
