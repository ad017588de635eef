"""A run's copies on its nodes from the supervisor's view: the name that they are kept under, and whether they are
valid.

Ranks write and choose the copies (`bridge/local_copies.py`), because the supervisor can't see other nodes' folders. The
supervisor only has to invalidate copies after they failed, or after the run went back to an earlier step. It does so by
giving the run another name, which has no copies.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import replace

from megaboa.causes import CAUSES
from megaboa.records import AttemptEnd, LocalBeginning, LocalName, read_if_there, read_ledger, write
from megaboa.run import ledger
from megaboa.store_paths import AttemptFolder, RunStore


def name(payload: RunStore) -> str:
    """The name of the run's copies. A new store gets a new name, so that leftovers of another run on the nodes are
    never used."""
    try:
        known = read_if_there(LocalName, payload.local_copies)
    except ValueError:  # torn file
        known = None
    since = lineage(ledger.ends(read_ledger(payload.ledger)))
    if known and known.since != since:
        write(payload.local_copies, replace(known, since=since))
    return known.name if known else forget(payload)


def forget(payload: RunStore) -> str:
    """Invalidate all existing copies; return the new name."""
    new = uuid.uuid4().hex[:16]
    write(payload.local_copies, LocalName(name=new))
    return new


def lineage(ends: Sequence[AttemptEnd]) -> int:
    """The first attempt that the newest steps descend from through copies.

    Copies of earlier attempts are of abandoned steps: for example, they were on nodes that the run didn't have for a
    while.
    """
    stepped = [end for end in ends if end.last_step is not None]
    return next((end.attempt for end in reversed(stepped) if end.local is None), 1)


def beginning(target: AttemptFolder) -> int | None:
    """The step of the copies that an attempt's ranks started from; None if they didn't use copies."""
    found = read_if_there(LocalBeginning, target.local_beginning)
    return found.iteration if found else None


def reconsider(payload: RunStore, ends: Sequence[AttemptEnd]) -> None:
    """Invalidate the copies if the last of these ends requires it. A run without copies has no name to replace."""
    if payload.local_copies.exists() and failed(ends):
        forget(payload)


def failed(ends: Sequence[AttemptEnd]) -> bool:
    """Whether copies must not be used any more after the last of these ends, because they are, or may be, bad.

    If an attempt started from copies and did no step, the copies are not at fault if it was ended from outside. After
    two in a row they may be: loading them may be what kills the supervisor or the node.
    """
    end = ends[-1]
    if end.cause is None or CAUSES[end.cause].spoils_state:
        return end.cause is not None
    if end.local is None or end.last_step is not None:
        return False
    if len(ends) > 1 and (ends[-2].local, ends[-2].last_step) == (end.local, None):
        return True
    why = CAUSES[end.cause]
    return not (why.free or why.node or why.interrupts)
