"""Each rank's speed: its seconds for a fixed matrix product, measured after every save.

docs/decisions/0069-stragglers.md says why this is measured, and nothing in the training itself.
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
from megaboa.records import Pace, line
from megaboa.store_paths import AttemptFolder


class Work(NamedTuple):
    size: int
    dtype: torch.dtype
    products: int  # of one repeat


# In all about 20 ms on an H100, and 150 ms on a CPU core. A repeat must be as long as the time slices in which other
# processes take the core; otherwise some repeats would not be affected.
GPU, CPU = Work(4096, torch.bfloat16, 20), Work(256, torch.float32, 100)
REPEATS = 5


class PaceWriter(Callback):
    """All ranks measure at the same time, after a save has finished on all of them; the first one writes the result."""

    def __init__(self, attempt: AttemptFolder):
        self._path, self._rank = attempt.paces, int(os.environ["RANK"])

    def on_checkpoint_save(self, context: CallbackContext) -> None:
        device = "cuda" if torch.version.cuda and torch.cuda.is_initialized() else "cpu"
        distributed.barrier()  # so that all ranks get the same share of common resources
        own = torch.tensor([seconds(device)], dtype=torch.float64, device=device)
        every = [torch.empty_like(own) for _ in range(distributed.get_world_size())]
        distributed.all_gather(every, own)
        if self._rank == 0:
            found = tuple(round(one, 7) for one in torch.cat(every).tolist())
            pace = Pace(step=int(context.state.train_state.step), seconds=found)
            with contextlib.suppress(OSError):  # no reason to end a training
                append_line(self._path, line(pace), durable=False)


def seconds(device: str) -> float:
    """The time of the fastest repeat, because brief interruptions of a processor aren't slowness.

    NaN if it can't be measured, for example for lack of memory. No random numbers are used: they belong to the
    training.
    """
    work, timed = (GPU, _on_gpu) if device == "cuda" else (CPU, _on_cpu)
    try:
        factor = torch.full((work.size, work.size), 1 / work.size, dtype=work.dtype, device=device)
        product = torch.empty_like(factor)
        timed(factor, product, 1)  # the first call may load a kernel
        return min(timed(factor, product, work.products) for _ in range(REPEATS))
    except RuntimeError:  # includes out of memory
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
