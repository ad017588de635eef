"""Balancing of experts in fine-tuned runs: weighted as in pretraining, and without padding.

Pretraining adds the mean of the balancing loss over micro-batches to the mean loss of a token. Fine-tuning sums the
loss of the tokens that count, and divides the gradient by their number. Megatron-Core 0.19.2 then multiplies the
balancing loss (and the z-loss) by the positions of a micro-batch, padding included, so that padding raises its weight.
Here it is multiplied by the mean number of tokens that count in the step's micro-batches, by Megatron's
`moe_grad_scale_func`, which Bridge doesn't set.

Positions behind the last token that counts change no loss. They are left out of the routers' statistics by Megatron's
padding mask, which Bridge doesn't set.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.bridge.data import batch_utils
from megatron.bridge.training.callbacks import Callback, CallbackContext
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.utils.pg_utils import get_pg_collection
from megatron.core import tensor_parallel
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe import router as routers
from megatron.core.transformer.moe.router import Router, TopKRouter
from megatron.core.utils import get_model_config

from megaboa.bridge.masks import Batch, giving, of_this_rank

PADDING = "padding"  # key that is added to a micro-batch


class Balancing(Callback):
    """Weights the balancing loss of a fine-tuned mixture of experts."""

    def __init__(self, config: ConfigContainer) -> None:
        model = config.model
        # A graph has its arguments from its capture; quantiles are taken of all positions.
        self._masks = model.cuda_graph_impl == "none" and model.moe_router_load_balancing_type != "quantile_balancing"

    def on_train_start(self, context: CallbackContext) -> None:
        groups = get_pg_collection(context.model)
        self._readers = groups.dp  # each reads other rows
        self._counted = torch.zeros(1).cuda()  # per micro-batch, mean of the step
        routers.z_loss_func = _of_the_micro_batch(routers.z_loss_func, groups.tp_cp)
        for chunk in context.model:
            config = get_model_config(chunk)
            config.moe_grad_scale_func = Weight(self._counted, config)
            for router in (part for part in chunk.modules() if isinstance(part, Router)):
                router.calculate_per_token_loss = False  # `Weight` multiplies

    def install(self, forward_step: Callable[..., Any]) -> Callable[..., Any]:
        """Change Megatron in this process; give the forward step with the padding mask."""
        batch_utils.prepare_finetuning_batch = self._counting(batch_utils.prepare_finetuning_batch)
        TopKRouter._apply_expert_bias = _with_a_mask_per_token(TopKRouter._apply_expert_bias)
        return giving(forward_step, _masks) if self._masks else forward_step

    def _counting(self, prepare: Callable[..., Any]) -> Callable[..., Any]:
        """Bridge reads a step's micro-batches at once, before the first forward step."""

        @functools.wraps(prepare)
        def prepared(*arguments: Any, **named: Any) -> tuple[Iterator[Batch], int]:
            batches, length = prepare(*arguments, **named)
            step = [{**batch, PADDING: padding(batch["loss_mask"])} for batch in batches]
            self._counted.copy_(sum(batch["loss_mask"].sum() for batch in step))
            torch.distributed.all_reduce(self._counted, group=self._readers)
            self._counted /= len(step) * self._readers.size()
            return iter(step), length

        return prepared


class Weight:
    """What Megatron multiplies the balancing loss by: tokens, changed in place because graphs keep their address."""

    def __init__(self, counted: torch.Tensor, config: ModelParallelConfig) -> None:
        self.counted = counted
        self._config = config

    def __call__(self) -> torch.Tensor:
        scale = self._config.grad_scale_func
        return scale(self.counted) if scale else self.counted

    def to_cfg_dict(self) -> None:
        """Bridge saves the model's configuration with checkpoints, where it is null: others could not import it."""


def padding(loss_mask: torch.Tensor) -> torch.Tensor:
    """The positions behind the last one of a row that counts; never the first, so that no row is empty."""
    behind = loss_mask.bool().int().flip(1).cumsum(1).flip(1) == 0
    behind[:, 0] = False
    return behind


def _masks(batch: Batch, chunk: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The mask of the positions that this rank has."""
    mask = of_this_rank(batch, PADDING, chunk)
    cuts = isinstance(chunk, GPTModel) and chunk.pre_process  # the model itself does it, on its first stage
    if chunk.config.sequence_parallel and not cuts:
        rows = tensor_parallel.scatter_to_sequence_parallel_region(mask.transpose(0, 1).contiguous())
        mask = rows.transpose(0, 1).contiguous()
    return {"padding_mask": mask}


def _with_a_mask_per_token(apply: Callable[..., None]) -> Callable[..., None]:
    """Core 0.19.2 combines a mask of tokens with a map of tokens and experts as if their shapes were the same."""

    def applied(self: TopKRouter, routing_map: torch.Tensor, padding_mask: torch.Tensor | None = None) -> None:
        apply(self, routing_map, padding_mask=None if padding_mask is None else padding_mask.unsqueeze(-1))

    return applied


def _of_the_micro_batch(z_loss: Callable[..., torch.Tensor], group: Any) -> Callable[..., torch.Tensor]:
    """The z-loss of a rank, whose mean over ranks is that over the tokens of all: they have different numbers."""

    def weighted(logits: torch.Tensor, coefficient: float, padding_mask: torch.Tensor | None = None) -> torch.Tensor:
        mean = z_loss(logits, coefficient, padding_mask=padding_mask)
        if padding_mask is None:
            return mean
        own = (~padding_mask).sum().float()
        total = own.clone()
        torch.distributed.all_reduce(total, group=group)
        return mean * own * group.size() / total

    return weighted
