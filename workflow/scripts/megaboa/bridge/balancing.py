"""Balancing of experts in fine-tuned runs: weighted as in pretraining, and without padding.

Pretraining adds the mean of the balancing loss over micro-batches to the mean loss of a token. Fine-tuning sums the
loss of the tokens that count, and divides the gradient by their number. Megatron-Core 0.19.2 then multiplies the
balancing loss (and the z-loss) by the positions of a micro-batch, padding included, so that padding raises its weight.
Here it is multiplied by the mean number of tokens that count in the step's micro-batches.

Positions behind the last token that counts change no loss. They are left out of the routers' statistics by Megatron's
padding mask, which Bridge doesn't set.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.bridge.data import batch_utils
from megatron.bridge.training import gpt_step, train
from megatron.bridge.training.callbacks import Callback, CallbackContext
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.utils.pg_utils import get_pg_collection
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import Router, TopKRouter
from megatron.core.utils import get_batch_on_this_cp_rank, unwrap_model

PADDING = "padding"  # key that is added to a micro-batch
Batch = dict[str, Any]


class Balancing(Callback):
    """Weights the balancing loss of a fine-tuned mixture of experts."""

    def __init__(self, config: ConfigContainer) -> None:
        self._masks = config.model.cuda_graph_impl == "none"  # a graph has its arguments from its capture
        self._counted = torch.zeros(1)  # per micro-batch, mean of the step

    def on_train_start(self, context: CallbackContext) -> None:
        for chunk in context.model:
            for router in (part for part in chunk.modules() if isinstance(part, Router)):
                router.calculate_per_token_loss = False  # `_scaled` multiplies

    def install(self, forward_step: Callable[..., Any]) -> Callable[..., Any]:
        """Change Megatron in this process; give the forward step with the padding mask."""
        batch_utils.prepare_finetuning_batch = self._counting(batch_utils.prepare_finetuning_batch)
        MoEAuxLossAutoScaler.set_loss_scale = staticmethod(self._scaled(MoEAuxLossAutoScaler.set_loss_scale))
        TopKRouter._apply_expert_bias = _with_a_mask_per_token(TopKRouter._apply_expert_bias)
        train.is_pp_first_stage = lambda _: True  # a skipped step is skipped on all stages, which all read batches here
        return _masked(forward_step) if self._masks else forward_step

    def _counting(self, prepare: Callable[..., Any]) -> Callable[..., Any]:
        """Bridge reads a step's micro-batches at once, before the first forward step."""

        @functools.wraps(prepare)
        def prepared(*arguments: Any, **named: Any) -> tuple[Iterator[Batch], int]:
            batches, length = prepare(*arguments, **named)
            step = [{**batch, PADDING: padding(batch["loss_mask"])} for batch in batches]
            self._counted = sum(batch["loss_mask"].sum() for batch in step).cuda().float() / len(step)
            group = parallel_state.get_data_parallel_group()
            torch.distributed.all_reduce(self._counted, group=group)
            self._counted /= group.size()
            return iter(step), length

        return prepared

    def _scaled(self, set_scale: Callable[[torch.Tensor], None]) -> Callable[[torch.Tensor], None]:
        return lambda scale: set_scale(scale * self._counted)


def padding(loss_mask: torch.Tensor) -> torch.Tensor:
    """The positions behind the last one of a row that counts; never the first, so that no row is empty."""
    behind = loss_mask.bool().int().flip(1).cumsum(1).flip(1) == 0
    behind[:, 0] = False
    return behind


def _masked(forward_step: Callable[..., Any]) -> Callable[..., Any]:
    """The forward step, whose model gets the padding mask on every stage."""

    @functools.wraps(forward_step)
    def step(state: Any, batches: Any, model: Any, *arguments: Any, **named: Any) -> Any:
        if not model.training:
            return forward_step(state, batches, model, *arguments, **named)
        batch = next(batches)
        chunk = unwrap_model(model)
        mask = _of_this_rank(batch, chunk)
        hook = chunk.register_forward_pre_hook(
            lambda _, given, by_name: (given, {**by_name, "padding_mask": mask}), with_kwargs=True
        )
        try:
            return forward_step(state, iter([batch]), model, *arguments, **named)
        finally:
            hook.remove()

    return step


def _of_this_rank(batch: Batch, chunk: torch.nn.Module) -> torch.Tensor:
    """The mask of the positions that this rank has."""
    group = get_pg_collection(chunk).cp
    lengths = {name: value for name, value in batch.items() if name.startswith("cu_seqlens")}
    part = {name: value.cuda(non_blocking=True) for name, value in {**lengths, PADDING: batch[PADDING]}.items()}
    if lengths and group.size() > 1:
        part = gpt_step._partition_packed_batch_for_cp(part, group)
    elif not lengths:
        part = get_batch_on_this_cp_rank(part, is_hybrid_cp=False, cp_group=group)
    mask = part[PADDING]
    cuts = isinstance(chunk, GPTModel) and chunk.pre_process  # the model itself does it, on its first stage
    if chunk.config.sequence_parallel and not cuts:
        rows = tensor_parallel.scatter_to_sequence_parallel_region(mask.transpose(0, 1).contiguous())
        mask = rows.transpose(0, 1).contiguous()
    return mask


def _with_a_mask_per_token(apply: Callable[..., None]) -> Callable[..., None]:
    """Core 0.19.2 combines a mask of tokens with a map of tokens and experts as if their shapes were the same."""

    def applied(self: TopKRouter, routing_map: torch.Tensor, padding_mask: torch.Tensor | None = None) -> None:
        apply(self, routing_map, padding_mask=None if padding_mask is None else padding_mask.unsqueeze(-1))

    return applied
