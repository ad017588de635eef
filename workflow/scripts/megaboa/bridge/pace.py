"""How fast each rank calculates: its seconds for a fixed product of matrices, after every save.

Why that and nothing of the training itself: docs/decisions/0069-stragglers.md.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from typing import NamedTuple

import torch
from megatron.bridge.training.callbacks import Callback, CallbackContext
from torch import distributed

from megaboa.files import append_line
from megaboa.paths import AttemptFolder
from megaboa.records import Pace, line


class Work(NamedTuple):
    size: int
    dtype: torch.dtype
    products: int  # of one repeat


# In all some 20 ms of an H100, and 150 ms of a processor's core. A repeat must be as long as the slices in which that
# core is taken away, else some see nothing of it.
GPU, CPU = Work(4096, torch.bfloat16, 20), Work(256, torch.float32, 100)
REPEATS = 5


class PaceWriter(Callback):
    """All ranks measure at the same time, after a save is over on all of them; the first one writes."""

    def __init__(self, attempt: AttemptFolder):
        self._path, self._rank = attempt.paces, int(os.environ["RANK"])

    def on_checkpoint_save(self, context: CallbackContext) -> None:
        device = "cuda" if torch.version.cuda and torch.cuda.is_initialized() else "cpu"
        distributed.barrier()  # what ranks share, all then have the same of it
        own = torch.tensor([seconds(device)], dtype=torch.float64, device=device)
        every = [torch.empty_like(own) for _ in range(distributed.get_world_size())]
        distributed.all_gather(every, own)
        if self._rank == 0:
            found = tuple(round(one, 7) for one in torch.cat(every).tolist())
            pace = Pace(step=int(context.state.train_state.step), seconds=found)
            with contextlib.suppress(OSError):  # a training doesn't end for this
                append_line(self._path, line(pace), durable=False)


def seconds(device: str) -> float:
    """Of the fastest repeat, as what takes a processor away now and then isn't slowness; NaN: it couldn't be done, as
    where no memory is left.

    No random numbers: these are the training's.
    """
    work, timed = (GPU, _on_gpu) if device == "cuda" else (CPU, _on_cpu)
    try:
        factor = torch.full((work.size, work.size), 1 / work.size, dtype=work.dtype, device=device)
        product = torch.empty_like(factor)
        timed(factor, product, 1)  # the first one may load a kernel
        return min(timed(factor, product, work.products) for _ in range(REPEATS))
    except RuntimeError:  # of memory, too
        return math.nan


def _on_gpu(factor: torch.Tensor, product: torch.Tensor, products: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(products):
        torch.mm(factor, factor, out=product)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1000


def _on_cpu(factor: torch.Tensor, product: torch.Tensor, products: int) -> float:
    began = time.perf_counter()
    for _ in range(products):
        torch.mm(factor, factor, out=product)
    return time.perf_counter() - began
