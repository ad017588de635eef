"""The versions of a run: with `continue_from: itself` each continues from a checkpoint of an earlier one. Standard
library only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megaboa.paths import EarlierRun, RunFolder
from megaboa.records import Identity, Parent, TrainRecord, parse, read, read_if_there
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


def _store_of(folder: RunFolder, parent: Parent) -> RunStore | None:
    kept = read_if_there(TrainRecord, EarlierRun(folder.path, identity=str(parent.identity)).train_manifest)
    if kept:
        store = RunStore(Path(kept.store))
        return store if store.identity.exists() else None
    return next((store for store, identity in stored(folder) if identity.digest == parent.identity), None)
