"""Unfinished work that would be abandoned if a run restarted with another identity. Standard library only."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaboa.errors import InputError
from megaboa.harmless import without_harmless
from megaboa.paths import RunFolder
from megaboa.records import Identity, Parent, Tree, parse, read_ledger
from megaboa.run import checkpoints, completion, ledger, progress
from megaboa.run.identity import as_counted, as_written, asked_as, identity_of, store_of, stored
from megaboa.store_paths import RunStore

SHOWN = 12
DIGEST = re.compile(r"[0-9a-f]{64}")
# Fields of an identity: what the run reads.
BY_CONTENT = ("model", "tokenizer", "chat_template", "corpora", "image", "parent")

PARENT = "parent.identity"
IN_PLACE = "continue_from: itself"


@dataclass(frozen=True)
class Unfinished:
    """Resumable training under the same name: it has a complete checkpoint and isn't finished."""

    store: RunStore
    step: int
    differences: tuple[str, ...]
    by_content: bool = False  # nothing is set otherwise: only what it reads differs


@dataclass(frozen=True)
class Present:
    """A run as configured now. `identity`: None if a corpus or a model has not been made yet."""

    run: Tree
    identity: Identity | None

    def is_of(self, other: Identity) -> bool:
        return other == self.identity if self.identity else without_harmless(other.run) == as_written(self.run, other)


def present(folder: RunFolder) -> Present:
    try:
        own = identity_of(folder)
    except FileNotFoundError:
        own = None
    return Present(without_harmless(folder.document("run")), own)


def others(folder: RunFolder) -> list[tuple[RunStore, Identity]]:
    """The stores of training under the run's name, if none of it has begun as the run is configured now."""
    found = list(stored(folder))
    if not found:
        return []
    now = present(folder)
    return [] if any(now.is_of(identity) for _, identity in found) else found


def other_work(folder: RunFolder) -> list[Unfinished]:
    """Unfinished training under the run's name with other identities, if the run as configured now has not begun.

    A run that continues in place loses nothing of the checkpoint that it starts from, nor of those before; only of what
    has been trained from the same checkpoint.
    """
    found = others(folder)
    begun = [one for one in found if not folder.is_in_place or _has_parent_of(folder, one[1])]
    work = {store: identity for one in begun if _unfinished_step(one[0]) for store, identity in [_newest(one, found)]}
    if not work:
        return []
    now = present(folder)
    return [
        Unfinished(
            store,
            checkpoints.latest(store.checkpoints),
            tuple(differences(identity, now.run, now.identity)),
            _is_asked(folder, identity),
        )
        for store, identity in work.items()
    ]


def _newest(one: tuple[RunStore, Identity], found: list[tuple[RunStore, Identity]]) -> tuple[RunStore, Identity]:
    """The newest version that has continued this one in place and saved a checkpoint, or this one."""
    later = [
        other
        for other in found
        if (other[1].run.get("parent") or {}).get("identity") == one[1].digest
        and checkpoints.latest(other[0].checkpoints)
    ]
    newest = max(later, key=lambda other: checkpoints.latest(other[0].checkpoints), default=None)
    return _newest(newest, found) if newest else one


def left_by_other_content(folder: RunFolder) -> RunStore | None:
    """The store of the checkpoint that a run with `continue_from: itself` was to stay with, but whose data or model the
    call has made again with other content; None otherwise."""
    if not folder.launch.continues:
        return None
    saved = [
        store
        for store, identity in others(folder)
        if checkpoints.latest(store.checkpoints) and (not folder.run.parent or _is_asked(folder, identity))
    ]
    return max(saved, key=lambda store: checkpoints.latest(store.checkpoints), default=None)


def kept_step(folder: RunFolder) -> int:
    """The newest step of the run that its job keeps, and stops for, if it finds other content than planned; 0 if it
    trains again."""
    now = present(folder)
    mine = [store for store, identity in stored(folder) if now.is_of(identity)]
    kept = [checkpoints.latest(one.checkpoints) if folder.launch.continues else _unfinished_step(one) for one in mine]
    return max(kept, default=0)


def _has_parent_of(folder: RunFolder, identity: Identity) -> bool:
    """Whether this identity is of a run that continues from the same checkpoint as the run in this folder."""
    theirs = identity.run.get("parent")
    return bool(theirs) and parse(Parent, theirs, "identity.json").is_same_checkpoint(folder.run.parent)


def _is_asked(folder: RunFolder, identity: Identity) -> bool:
    """Whether this identity is of the run as its file has it now, whatever the content of what it reads."""
    return without_harmless(identity.run) == without_harmless(asked_as(folder, identity))


def lost(folder: RunFolder) -> Path | None:
    """The store in which the run has been trained as it is configured now, if it is gone; None otherwise."""
    if not folder.has_lost_its_store:
        return None
    link = folder.attempts_link
    was = (link.parent / link.readlink()).parent
    with contextlib.suppress(OSError, InputError):  # what it reads isn't made yet
        now = store_of(folder, identity_of(folder)).path
        if now.resolve() == was.resolve():
            return now
    return None


def _unfinished_step(store: RunStore) -> int:
    """The step that training could resume from; 0 if it is finished, or would start from step 0 anyway."""
    completed = any(end.outcome == "completed" for end in ledger.ends(read_ledger(store.ledger)))
    return 0 if completed or completion.all_saved(store) else checkpoints.latest(store.checkpoints)


def differences(before: Identity, run: Tree, now: Identity | None) -> list[str]:
    """Differences between two identities, such as `optimizer.lr: 0.001 → 0.002`: keys of the run and, if known, its
    inputs."""
    old, new = _leaves(without_harmless(before.run)), _leaves(as_written(run, before, now and now.parent))
    listed = [
        f"{key}: {_shown(old, key)} → {_shown(new, key)}"
        for key in dict.fromkeys([*old, *new])
        if old.get(key, old) != new.get(key, new) and not (now and key == PARENT)  # that is a content, too
    ]
    if now is None:
        return listed
    before = as_counted(before, now)
    old, new = (_leaves({part: getattr(one, part) for part in BY_CONTENT}) for one in (before, now))
    made = [key for key in dict.fromkeys([*old, *new]) if old.get(key) != new.get(key)]
    return [*listed, *(f"{key}: {str(old.get(key))[:12]} → {str(new.get(key))[:12]} (its content)" for key in made)]


def explain(folder: RunFolder, work: Sequence[Unfinished]) -> str:
    """An explanation why the run isn't simply trained from its start."""
    lines = []
    for one in work:
        last = progress.last_step(one.store)
        of = f" of {last}" if last else ""
        lines.append(
            f"run {folder.name} would start at {folder.start}, and {one.store.path} has its step {one.step}{of}, "
            "trained with:"
        )
        lines += [f"  {difference}" for difference in one.differences[:SHOWN]]
        if len(one.differences) > SHOWN:
            lines.append(f"  and {len(one.differences) - SHOWN} more")
    return "\n".join(lines)


def with_other_content(folder: RunFolder, left: RunStore) -> str:
    """Why a run with `continue_from: itself` doesn't leave what it has trained (`left_by_other_content`)."""
    step = checkpoints.latest(left.checkpoints)
    why = f"would start at {folder.start}, as its data or model has other content than when this call was planned"
    if not completion.all_saved(left):
        return f"run {folder.name} {why}: call again, and it continues from step {step}"
    return (
        f"run {folder.name} {why}, and {left.path} has all its {step} steps: undo the change, continue from there with "
        f"the change (training.train_iters above {step}), or restart it: --config restart={folder.name}"
    )


def why_refused(folder: RunFolder) -> str | None:
    """Why the same call doesn't resume a run, and what does; None if it resumes it."""
    left = left_by_other_content(folder)
    if left and not completion.all_saved(left):
        return "what it reads has other content since, with which the next call continues from there"
    if work := other_work(folder):
        since = "what it reads has other content since" if work[0].by_content else "it has other settings since"
        return f"{since}. {ways(f'--config restart={folder.name}')}"
    return None


def ways(restart: str, there: str | None = IN_PLACE) -> str:
    """The user's options; `restart` is the command for the last one. `there`: the keys for the second one; None if the
    plan doesn't allow it."""
    second = f", continue from there with the change ({there})," if there else ""
    return f"Undo the change to resume it{second} or restart it: {restart}"


def _leaves(tree: Any, path: str = "") -> Tree:
    if isinstance(tree, dict):
        return {
            key: leaf
            for name, value in tree.items()
            for key, leaf in _leaves(value, f"{path}.{name}" if path else name).items()
        }
    return {path: tree}


def _shown(leaves: Tree, key: str) -> str:
    text = "not set" if key not in leaves or leaves[key] is None else str(leaves[key])
    return text[:12] if DIGEST.fullmatch(text) else text
