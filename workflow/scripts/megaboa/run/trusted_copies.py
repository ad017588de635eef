"""A run's copies on its nodes, as its supervisor sees them: under which name they lie, and whether they still count.

Ranks write and choose them (`bridge/local_copies.py`), as the supervisor can't look into other nodes' folders. It only
has to make sure that copies are never taken again after they failed, or after the run went back behind them: it gives
the run another name, under which there are none.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import replace

from megaboa.causes import CAUSES
from megaboa.paths import AttemptFolder, RunStore
from megaboa.records import AttemptEnd, LocalBeginning, LocalName, read_if_there, read_ledger, write
from megaboa.run import ledger

# What they say of the state is that it is wrong, and the copies may be so too.
OF_THE_STATE = ("nan", "loss_spike")


def name(payload: RunStore) -> str:
    """A new store has a new one, so what another run left on the nodes is never taken."""
    try:
        known = read_if_there(LocalName, payload.local_copies)
    except ValueError:  # torn
        known = None
    since = lineage(ledger.ends(read_ledger(payload.ledger)))
    if known and known.since != since:
        write(payload.local_copies, replace(known, since=since))
    return known.name if known else forget(payload)


def forget(payload: RunStore) -> str:
    """From now on no copy that there is counts."""
    new = uuid.uuid4().hex[:16]
    write(payload.local_copies, LocalName(name=new))
    return new


def lineage(ends: Sequence[AttemptEnd]) -> int:
    """The first attempt that the newest steps descend from, by copies from attempt to attempt: copies of one before
    that are of steps that were given up, as when they lay on nodes that the run didn't have for a while."""
    stepped = [end for end in ends if end.last_step is not None]
    return next((end.attempt for end in reversed(stepped) if end.local is None), 1)


def beginning(target: AttemptFolder) -> int | None:
    """The step whose copies the attempt's ranks began with."""
    found = read_if_there(LocalBeginning, target.local_beginning)
    return found.iteration if found else None


def reconsider(payload: RunStore, ends: Sequence[AttemptEnd]) -> None:
    """After the last of these ends. A run that never had copies has no name to forget."""
    if payload.local_copies.exists() and failed(ends):
        forget(payload)


def failed(ends: Sequence[AttemptEnd]) -> bool:
    """Whether copies must not be taken again after the last of these ends: it says that they are bad, or may have been.

    An attempt that began with them and came to no step is not the copies' fault where it was ended from outside. Two
    in a row may be: to load them may be what ends the supervisor or the node.
    """
    end = ends[-1]
    if end.cause is None or end.cause in OF_THE_STATE:
        return end.cause is not None
    if end.local is None or end.last_step is not None:
        return False
    if len(ends) > 1 and (ends[-2].local, ends[-2].last_step) == (end.local, None):
        return True
    return not (CAUSES[end.cause].free or CAUSES[end.cause].node or end.cause in ("cancelled", "stopped"))
