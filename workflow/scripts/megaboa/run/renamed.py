"""Training of the same run under another name: a run's name is its place in the sweep, and changes with the sweep's
form; its identity doesn't.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from pathlib import Path

from megaboa.paths import RunFolder
from megaboa.records import Identity, read_if_there
from megaboa.run import checkpoints, completion
from megaboa.run.identity import store_of
from megaboa.store_paths import RunStore

HIDDEN = (FileNotFoundError, NotADirectoryError, PermissionError)  # somebody else's folder, or none


def stores_of_others(root: Path, experiment: str, planned: Collection[str]) -> list[RunStore]:
    """The stores of an experiment under names that the plan doesn't have, as far as this user may look."""
    found = []
    for name in sorted((root / "runs" / experiment).glob("*")):
        with contextlib.suppress(*HIDDEN):
            found += [RunStore(path) for path in sorted(name.iterdir())] if name.name not in planned else []
    return found


def same_training(folder: RunFolder, identity: Identity, others: Collection[RunStore]) -> RunStore | None:
    """The one of these stores that is of the same training as this run, and furthest; None if the run has begun under
    its own name."""
    own = store_of(folder, identity).path
    if own.exists() or folder.may_restart:
        return None
    same = [one for one in others if one.path.name == own.name and _identity_in(one) == identity]
    return max(
        same, key=lambda one: (completion.finished(folder, one), checkpoints.latest(one.checkpoints)), default=None
    )


def _identity_in(store: RunStore) -> Identity | None:
    with contextlib.suppress(*HIDDEN):
        return read_if_there(Identity, store.identity)
    return None
