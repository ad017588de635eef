"""Masks that Bridge's forward step doesn't give to the model, as further arguments of its forward pass."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from megatron.bridge.training import gpt_step
from megatron.bridge.training.utils.pg_utils import get_pg_collection
from megatron.core.utils import get_batch_on_this_cp_rank, unwrap_model

Batch = dict[str, Any]


def giving(
    forward_step: Callable[..., Any], masks: Callable[[Batch, torch.nn.Module], dict[str, torch.Tensor]]
) -> Callable[..., Any]:
    """The forward step, whose model gets these masks of each micro-batch while it is trained, on every stage."""

    @functools.wraps(forward_step)
    def step(state: Any, batches: Any, model: Any, *arguments: Any, **named: Any) -> Any:
        if not model.training:
            return forward_step(state, batches, model, *arguments, **named)
        batch, chunk = next(batches), unwrap_model(model)
        found = masks(batch, chunk)
        hook = chunk.register_forward_pre_hook(lambda _, given, by_name: (given, by_name | found), with_kwargs=True)
        try:
            return forward_step(state, iter([batch]), model, *arguments, **named)
        finally:
            hook.remove()

    return step


def of_this_rank(batch: Batch, name: str, chunk: torch.nn.Module) -> torch.Tensor:
    """A mask of a micro-batch, at the positions that this rank has of context parallel ones."""
    group = get_pg_collection(chunk).cp
    lengths = {key: value for key, value in batch.items() if key.startswith("cu_seqlens")}
    part = {key: value.cuda(non_blocking=True) for key, value in {**lengths, name: batch[name]}.items()}
    if lengths and group.size() > 1:
        part = gpt_step._partition_packed_batch_for_cp(part, group)
    elif not lengths:
        part = get_batch_on_this_cp_rank(part, is_hybrid_cp=False, cp_group=group)
    return part[name]
