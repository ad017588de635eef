"""Which documents are the first of their kind, found by the hashes of their texts, in bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

HASHES_AT_ONCE = 4_000_000  # about 200 MB while they are sorted


def first_ones(hashes: Callable[[], Iterator[NDArray]], at_once: int = HASHES_AT_ONCE) -> NDArray:
    """True for the first document with its hash. `hashes` gives them in pieces, as often as it is asked.

    Hashes are looked at in groups that can't hold duplicates of each other; one byte per document stays in memory.
    """
    total = sum(len(piece) for piece in hashes())
    kept = np.ones(total, dtype=bool)
    groups = -(-total // at_once)
    for group in range(groups):
        numbers, values = _group(hashes(), group, groups)
        order = np.lexsort((numbers, values[:, 1], values[:, 0]))
        same = (values[order[1:]] == values[order[:-1]]).all(axis=1)
        kept[numbers[order[1:][same]]] = False
    return kept


def _group(pieces: Iterator[NDArray], group: int, groups: int) -> tuple[NDArray, NDArray]:
    """Numbers and hashes of the documents whose hash belongs to the group."""
    numbers, values, begin = [], [], 0
    for piece in pieces:
        pairs = np.ascontiguousarray(piece).view("<u8").reshape(-1, 2)
        mine = np.flatnonzero(pairs[:, 0] % np.uint64(groups) == group)
        numbers.append(mine + begin)
        values.append(pairs[mine])
        begin += len(piece)
    return np.concatenate(numbers), np.concatenate(values)
