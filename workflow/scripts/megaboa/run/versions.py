"""The versions of a run, and which of their checkpoints is exported: with `continue_from: itself` each continues from
a checkpoint of an earlier one. Standard library only."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megaboa.blends import documents_of_set, split_blends
from megaboa.errors import InputError
from megaboa.paths import EarlierRun, RunFolder
from megaboa.records import LM_LOSS, Best, Identity, Parent, RunSpec, TrainRecord, parse, read, read_if_there
from megaboa.run import checkpoints
from megaboa.run.identity import stored
from megaboa.store_paths import RunStore


@dataclass(frozen=True)
class Version:
    """A version of a run. `until`: the step from which the next one continues; None: it is the newest."""

    store: RunStore
    until: int | None = None

    @property
    def kept(self) -> list[int]:
        """The steps of its complete checkpoints that the newest version has, too."""
        complete = checkpoints.complete_iterations(self.store.checkpoints)
        return [step for step in complete if self.until is None or step <= self.until]

    @property
    def identity(self) -> Identity:
        return read(Identity, self.store.identity)

    @property
    def validation(self) -> tuple[str | None, list[str | None]]:
        """The documents on which it is evaluated, and their corpora's digests."""
        identity = self.identity
        run = parse(RunSpec, identity.run, self.store.identity)
        blend = split_blends(run.data).get("valid")
        documents = blend and documents_of_set(run.data, blend, run.held_out)
        return documents, [identity.corpora.get(name) for name in blend or ()]

    @property
    def losses(self) -> dict[int, float]:
        """The validation losses of its kept checkpoints."""
        found, kept = checkpoints.evaluations(self.store), self.kept
        return {step: event.losses[LM_LOSS] for step, event in found.items() if step in kept}


def versions(folder: RunFolder, store: RunStore) -> list[Version]:
    """The version in this store and those before, the newest first."""
    found = read_if_there(Identity, store.identity)
    parent = found and found.run.get("parent")
    return [Version(store), *(before(folder, parse(Parent, parent, store.identity)) if parent else ())]


def before(folder: RunFolder, parent: Parent | None) -> Iterator[Version]:
    """The versions of the run before one with this parent, the newest first. None are if it is another run, and those
    before one whose store is gone aren't known."""
    while parent and (parent.experiment, parent.run) == (folder.experiment, folder.name):
        store = _store_of(folder, parent)
        if store is None:
            return
        yield Version(store, parent.iteration)
        further = read(Identity, store.identity).run.get("parent")
        parent = parse(Parent, further, store.identity) if further else None


def folder_of(folder: RunFolder, store: RunStore) -> RunFolder:
    """The run as it was in the version with this store; as it is now if that isn't one of its earlier versions."""
    identity, one = read(Identity, store.identity).digest, folder
    while one.file("run").exists() and one.is_in_place and (before := one.parent_folder):
        if before.train_manifest.exists() and one.run.parent.identity == identity:
            return before
        one = before
    return folder


@dataclass(frozen=True)
class Chosen:
    """The checkpoint to export; `best` if it was chosen by its loss."""

    store: RunStore
    iteration: int
    best: Best | None = None


def chosen(folder: RunFolder, store: RunStore, wanted: str | int) -> Chosen:
    """The checkpoint that `export.checkpoint` selects: `final`, `best` (lowest validation loss) or an iteration. The
    last two also among those of the earlier versions."""
    every = versions(folder, store)
    if not every[0].kept:
        raise InputError(
            f"run {folder.name} has no checkpoint to export: set checkpoint.save_interval above 0, or train it again"
        )
    if wanted == "final":
        return Chosen(store, every[0].kept[-1])
    kept = {step: one.store for one in every for step in one.kept}
    there = ", ".join(map(str, sorted(kept)))
    if wanted == "best":
        losses = _losses(every)
        if not losses:
            raise InputError(
                f"run {folder.name}: export.checkpoint is best, and none of the kept checkpoints ({there}) was "
                "evaluated: let training.eval_interval be a multiple of checkpoint.save_interval, or name an iteration"
            )
        # All comparisons with a NaN are false, so one that comes first would stay the lowest.
        step = min(losses, key=lambda step: (math.inf if math.isnan(losses[step]) else losses[step], -step))
        return Chosen(kept[step], step, Best(loss=losses[step], evaluated=len(losses), kept=len(kept)))
    if wanted not in kept:
        raise InputError(
            f"run {folder.name}: export.checkpoint is {wanted}, and the kept checkpoints are {there}: name one of them"
        )
    return Chosen(kept[int(wanted)], int(wanted))


def _losses(every: list[Version]) -> dict[int, float]:
    """The validation losses of the kept checkpoints, of the versions evaluated on the same data as the newest."""
    newest, *earlier = every
    losses = newest.losses
    for one in earlier:
        if one.validation == newest.validation:
            losses |= one.losses
    return losses


def _store_of(folder: RunFolder, parent: Parent) -> RunStore | None:
    kept = read_if_there(TrainRecord, EarlierRun(folder.path, identity=str(parent.identity)).train_manifest)
    if kept:
        store = RunStore(Path(kept.store))
        return store if store.identity.exists() else None
    return next((store for store, identity in stored(folder) if identity.digest == parent.identity), None)
