"""Whether all steps of a run are done. Standard library only."""

from __future__ import annotations

from megaboa.paths import RunFolder
from megaboa.records import Found, RankEnd, read
from megaboa.run import checkpoints, ledger, progress
from megaboa.store_paths import RunStore


def finished(folder: RunFolder, payload: RunStore) -> bool:
    """Whether the last step's checkpoint is complete or, if nothing is saved, every rank has left its record at that
    step.

    Exit codes don't count, because Bridge also exits with 0 after a signal or a time limit.
    """
    if all_saved(payload):
        return True
    last = progress.last_step(payload)
    return last is not None and not _saves(folder, payload) and _ended_at(folder, payload, last)


def _saves(folder: RunFolder, payload: RunStore) -> bool:
    asked = folder.launch.checkpoint
    if "save_interval" in asked:
        return asked["save_interval"] != 0
    return not payload.found.exists() or read(Found, payload.found).saves


def _ended_at(folder: RunFolder, payload: RunStore, step: int) -> bool:
    """Whether every rank of the newest attempt has left its record at this step."""
    target = payload.attempt(ledger.next_attempt(payload) - 1)
    records = [target.end_record(rank) for rank in range(folder.run.world_size)]
    return all(end.exists() and read(RankEnd, end).step >= step for end in records)


def all_saved(payload: RunStore) -> bool:
    """Whether the last step's checkpoint is complete."""
    last = progress.last_step(payload)
    return last is not None and checkpoints.latest(payload.checkpoints) >= last
