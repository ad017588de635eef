"""Whether a run is finished, and the manifest of one that is.

A run is finished when its last step's checkpoint is complete or, where nothing is saved, when every rank has left its
record at the last step. Exit codes don't count: Bridge also ends with 0 on a signal or a time limit.
"""

from __future__ import annotations

from typing import Any

from megaboa import files
from megaboa.observe import progress
from megaboa.results import RunFolder, RunStore
from megaboa.run import checkpoints, ledger


def finished(folder: RunFolder, payload: RunStore) -> bool:
    last = progress.last_step(payload)
    if last is None:
        return False
    if checkpoints.latest(payload.checkpoints) >= last:
        return True
    return not _saves(folder, payload) and _ended_at(folder, payload, last)


def manifest_of(folder: RunFolder, payload: RunStore, identity: dict[str, Any]) -> dict[str, Any]:
    kept = checkpoints.sizes(payload.checkpoints)
    iteration = max(kept, default=0)
    return {
        "run": folder.name,
        "identity": files.digest(identity),
        "store": str(payload.path),
        "train_iters": progress.last_step(payload),
        "iteration": iteration or progress.last_step(payload),
        "checkpoint": str(checkpoints.folder(payload.checkpoints, iteration)) if iteration else None,
        "checkpoints": [{"iteration": step, "bytes": size} for step, size in kept.items()],
        "bytes": sum(kept.values()),
        "parent": _parent(folder),
        "world_size": folder.run["world_size"],
        "skipped": ledger.skipped_steps(files.read_jsonl(payload.ledger)),
    }


def _parent(folder: RunFolder) -> dict[str, Any] | None:
    """Whose checkpoint the run went on from, and what that run was."""
    if folder.parent_manifest is None:
        return None
    return {**folder.run["parent"], "identity": files.read_json(folder.parent_manifest)["identity"]}


def _saves(folder: RunFolder, payload: RunStore) -> bool:
    asked = folder.launch["checkpoint"]
    if "save_interval" in asked:
        return asked["save_interval"] != 0
    return not payload.found.exists() or files.read_json(payload.found)["saves"]


def _ended_at(folder: RunFolder, payload: RunStore, step: int) -> bool:
    """Whether every rank of the newest attempt has left its record at this step."""
    target = payload.attempt(ledger.next_attempt(payload) - 1)
    records = [target.end_record(rank) for rank in range(folder.run["world_size"])]
    return all(record.exists() and files.read_json(record)["step"] >= step for record in records)
