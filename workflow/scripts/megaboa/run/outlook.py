"""Where training will start if it is called now, and why: in words, before anything has started. Standard library
only."""

from __future__ import annotations

from collections.abc import Callable, Collection

from megaboa.formats import some_of
from megaboa.paths import RunFolder
from megaboa.records import Identity, read
from megaboa.run import checkpoints, claims, completion, progress
from megaboa.run.identity import stored
from megaboa.run.unfinished import Present, differences, lost, present
from megaboa.store_paths import RunStore

SHOWN, SHOWN_IN_PLACE = 2, 5  # differences that are named
LENGTH = "training.train_iters"
SETS = "data.validation_sets."

Obstacles = Callable[[RunStore, int], Collection[str]]


def outlook(folder: RunFolder, restarts: bool = False, obstacles: Obstacles = lambda store, step: ()) -> str | None:
    """What the next call does with a run that has begun, such as `resumes at step 53 of 200`; None if it has no
    attempt.

    `restarts`: the call asks to restart it. `obstacles`: the keys for which the plan would refuse to continue from this
    step of an earlier state of the run. Reads files only, and waits for nobody.
    """
    if not restarts and (said := without_store(folder)):
        return said
    if not folder.attempts_link.exists():
        return None
    now = present(folder)
    mine = [store for store, identity in stored(folder) if now.is_of(identity)]
    for store in mine:
        if who := claims.trainer(store.claims):
            stop = f"`megaboa stop {folder.experiment}/{folder.name}` lets it save and end"
            return f"is being trained by {who}: a call waits for its end, and {stop}"
    if mine:
        return _of_present(max(mine, key=lambda store: checkpoints.latest(store.checkpoints)), folder, restarts)
    before = RunStore.of(folder.attempts_link)
    if not before.identity.exists() or not before.attempts:
        return None
    if folder.is_in_place:
        return (
            f"continues from its own step {folder.run.parent.iteration} (continue_from: itself){_changed(folder, now)}"
        )
    changed = differences(read(Identity, before.identity), now.run, now.identity)
    if not changed:
        return f"trains again from {folder.start}: its checkpoints are in {before.path}, not in {folder.launch.store}"
    rest = _rest(before, changed, restarts, obstacles)
    still = f"; {who} still trains it as it was" if (who := claims.trainer(before.claims)) else ""
    return f"trains again from {folder.start}: {some_of(changed, SHOWN)}{rest}{still}"


def _rest(before: RunStore, changed: Collection[str], restarts: bool, obstacles: Obstacles) -> str:
    """What becomes of the checkpoints of a run that trains again, and what would use them."""
    saved = checkpoints.latest(before.checkpoints)
    if not saved:
        return ""
    stay = f" (its {saved} steps stay in {before.path})"
    if restarts:
        return stay
    against = set(obstacles(before, saved))
    if not against:
        return f" (continue_from: itself would continue from step {saved})"
    if all(map(_is_of_a_set, changed)):  # then the same last steps show the new sets
        earlier = [step for step in checkpoints.complete_iterations(before.checkpoints) if step < saved]
        if earlier and not obstacles(before, max(earlier)):
            return f" (continue_from: itself@{max(earlier)} would train only the steps after it again)"
    if against - {LENGTH}:
        return stay
    return f" (continue_from: itself with {LENGTH} above {saved} would continue from step {saved})"


def _is_of_a_set(difference: str) -> bool:
    """Whether it is of a validation set, or of a corpus that the run reads only since it has that set."""
    return difference.startswith(SETS) or (difference.startswith("corpora.") and ": None → " in difference)


def _changed(folder: RunFolder, now: Present) -> str:
    """What is set otherwise since the checkpoint from which the run continues in place."""
    parent = str(folder.run.parent.identity)
    earlier = next((identity for _, identity in stored(folder) if identity.digest == parent), None)
    found = differences(earlier, now.run, now.identity) if earlier else []
    changed = [one for one in found if not one.startswith("parent")]
    return f": {some_of(changed, SHOWN_IN_PLACE)}" if changed else ""


def without_store(folder: RunFolder) -> str | None:
    """Of a run that has begun as it is configured now, and whose store is gone; None otherwise."""
    if (gone := lost(folder)) is None:
        return None
    begun = "been trained" if folder.train_manifest.exists() else "begun"
    return f"has {begun}, and {gone} is gone: put it back, or train it again (--config restart={folder.name})"


def _of_present(store: RunStore, folder: RunFolder, restarts: bool) -> str | None:
    """Of a run that has begun with its present settings."""
    step, last = checkpoints.latest(store.checkpoints), progress.last_step(store)
    if completion.finished(folder, store):
        return f"has all its steps{f' ({last})' if last else ''}: nothing is trained again"
    if step:
        of = f" of {last}" if last else ""
        kept = " (restart drops nothing, since no setting has changed)" if restarts else ""
        return f"resumes at step {step}{of}{kept}"
    return f"starts again from {folder.start}: nothing was saved" if store.attempts else None
