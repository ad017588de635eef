"""The process groups of a conversion: of one process, or of ranks that hold a part of the model each.

The CPU backend, where it is needed, must be active before this module is imported.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from megaboa import store
from megaboa.conversion import WHOLE
from megaboa.layout import AXES, Layout

# A rank that dies is seen by the launcher; one that reads a large model, or waits for another job's, only takes long.
PATIENCE = timedelta(days=1)


@contextlib.contextmanager
def process_groups(device: str, layout: Layout = WHOLE) -> Iterator[None]:
    """Megatron's groups; those of one process over a store in memory: no port that another job may want."""
    os.environ["NVIDIA_TF32_OVERRIDE"] = "0"  # Transformer Engine would multiply fp32 in TF32, and logits are compared
    if layout.world_size == 1:
        dist.init_process_group("gloo" if device == "cpu" else "nccl", store=dist.HashStore(), rank=0, world_size=1)
    else:
        if device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        # Weights lie on the host until a model is whole, also of one that is for GPUs.
        dist.init_process_group("gloo" if device == "cpu" else "cpu:gloo,cuda:nccl", timeout=PATIENCE)
    try:
        minutes = PATIENCE // timedelta(minutes=1)
        parallel_state.initialize_model_parallel(**sizes(layout), distributed_timeout_minutes=minutes)
        model_parallel_cuda_manual_seed(0)
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def sizes(layout: Layout) -> dict[str, Any]:
    """By the names of Megatron-Core."""
    return {axis.argument: layout.size(axis.name) for axis in AXES if axis.weights}


def is_last() -> bool:
    """The rank that says what was seen: it has the last stage of a pipeline, and so the logits."""
    return dist.get_rank() == dist.get_world_size() - 1


@contextlib.contextmanager
def building(final: Path) -> Iterator[Path | None]:
    """As `store.building`, for all ranks together: the first one has the lock, and waits for the others at the end."""
    first = dist.get_rank() == 0
    with store.building(final) if first else contextlib.nullcontext() as partial:
        yield _from_first(partial)
        from_all(None)


def from_all(value: Any) -> list[Any]:
    """Of every rank its value, in their order."""
    if dist.get_world_size() == 1:
        return [value]
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def _from_first(value: Any) -> Any:
    return from_all(value)[0]
