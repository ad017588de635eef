"""Whether a run is finished, and the manifest of one that is.

A run is finished when its last step's checkpoint is complete or, where nothing is saved, when every rank has left its
record at the last step. Exit codes don't count: Bridge also ends with 0 on a signal or a time limit.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megaboa import files
from megaboa.paths import RunFolder, RunStore
from megaboa.records import Found, Kept, Parent, RankEnd, TrainRecord, parse, read, read_ledger
from megaboa.run import checkpoints, ledger, progress


def finished(folder: RunFolder, payload: RunStore) -> bool:
    last = progress.last_step(payload)
    if last is None:
        return False
    if checkpoints.latest(payload.checkpoints) >= last:
        return True
    return not _saves(folder, payload) and _ended_at(folder, payload, last)


def manifest_of(folder: RunFolder, payload: RunStore, identity: dict[str, Any]) -> TrainRecord:
    kept = checkpoints.sizes(payload.checkpoints)
    iteration, last = max(kept, default=0), progress.last_step(payload)
    return TrainRecord(
        run=folder.name,
        identity=files.digest(identity),
        store=str(payload.path),
        train_iters=last,
        iteration=iteration or last,
        checkpoint=str(checkpoints.folder(payload.checkpoints, iteration)) if iteration else None,
        checkpoints=tuple(Kept(iteration=step, bytes=size) for step, size in kept.items()),
        bytes=sum(kept.values()),
        parent=_parent(folder),
        world_size=folder.run["world_size"],
        skipped=tuple(ledger.skipped_steps(read_ledger(payload.ledger))),
    )


def _parent(folder: RunFolder) -> Parent | None:
    """Whose checkpoint the run continued from, and what that run was."""
    if folder.parent_manifest is None:
        return None
    parent = parse(Parent, folder.run["parent"], folder.path)
    return replace(parent, identity=read(TrainRecord, folder.parent_manifest).identity)


def _saves(folder: RunFolder, payload: RunStore) -> bool:
    asked = folder.launch.checkpoint
    if "save_interval" in asked:
        return asked["save_interval"] != 0
    return not payload.found.exists() or read(Found, payload.found).saves


def _ended_at(folder: RunFolder, payload: RunStore, step: int) -> bool:
    """Whether every rank of the newest attempt has left its record at this step."""
    target = payload.attempt(ledger.next_attempt(payload) - 1)
    records = [target.end_record(rank) for rank in range(folder.run["world_size"])]
    return all(end.exists() and read(RankEnd, end).step >= step for end in records)
