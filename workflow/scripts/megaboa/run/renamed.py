"""Training that is finished under another name of its experiment is taken over by a run, instead of being done again.

A run's name is its place in the sweep, and changes with the sweep's form; its identity doesn't. Standard library only.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from megaboa import files
from megaboa.paths import RunFolder
from megaboa.records import Holder, Identity, RunsSpec, read, read_if_there
from megaboa.run import claims, completion
from megaboa.run.announce import Say
from megaboa.run.identity import store_of
from megaboa.store_paths import RunStore


def stores_of_others(root: Path, experiment: str, planned: Collection[str]) -> dict[str, RunStore]:
    """The stores of an experiment under names that the plan doesn't have, by the beginning of their identity."""
    names = sorted((root / "runs" / experiment).glob("*"))
    found = (path for name in names if name.name not in planned and name.is_dir() for path in sorted(name.iterdir()))
    return {path.name: RunStore(path) for path in found if not path.is_symlink()}


def same_training(folder: RunFolder, identity: Identity, others: Mapping[str, RunStore]) -> RunStore | None:
    """The one of these stores that is of the same training as this run; None if it has begun under its own name."""
    own = store_of(folder, identity)
    store = others.get(own.path.name)
    if store is None or own.path.exists() or folder.may_restart:
        return None
    return store if read_if_there(Identity, store.identity) == identity else None


def take_over(folder: RunFolder, identity: Identity, me: Holder, say: Say) -> None:
    """Move the store of the same training, if that is finished, to the run's name. A link stays in its place, so that
    what refers to it by its former name finds it."""
    specs = folder.experiment_folder.specs.runs
    planned = {folder.name, *(read(RunsSpec, specs).runs if specs.exists() else ())}

    def former() -> RunStore | None:
        others = stores_of_others(Path(folder.launch.store), folder.experiment, planned)
        store = same_training(folder, identity, others)
        return store if store and completion.finished(folder, store) else None

    if (store := former()) is None:
        return
    name, own = store.path.parent.name, store_of(folder, identity).path
    with claims.held(store.claims, me, lambda holder: say(f"waits for {holder}, which holds {name}")):
        if former() is None:  # another job of this run was faster
            return
        files.make_folder(own.parent)
        store.path.rename(own)
        try:
            files.link(own, store.path)
        except OSError:
            own.rename(store.path)
            raise
    say(f"is the same training as {name}, which is finished: its store is {own} now")
