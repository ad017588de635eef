"""Random weights of large models, drawn by all processors: torch uses one, which takes minutes for a few billion
values."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

# Size of the pieces that larger tensors are drawn in. The weights depend on it, but not on the number of threads.
PIECE = 1 << 22


@contextmanager
def drawn_in_pieces(seed: int) -> Iterator[None]:
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    drawing = (torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default)
    seeds = itertools.count(seed + 1)

    class Pieces(TorchDispatchMode):
        def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if operation not in drawing or args[0].numel() <= PIECE or not args[0].is_contiguous():
                return operation(*args, **(kwargs or {}))
            weight, *distribution = args
            pieces = [(piece, torch.Generator().manual_seed(next(seeds))) for piece in weight.view(-1).split(PIECE)]
            list(threads.map(lambda drawn: operation(drawn[0], *distribution, generator=drawn[1]), pieces))
            return weight

    torch.manual_seed(seed)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads, Pieces():
        yield
