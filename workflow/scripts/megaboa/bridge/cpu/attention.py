"""Attention for the cases that Megatron's DotProductAttention refuses: context parallelism, and MLA's unequal head
sizes.

On a GPU, Transformer Engine provides it. Here every rank gathers all keys and values. This is slow, but computes the
same function, so it tests Megatron's slicing of sequences, positions and reductions.
"""

from __future__ import annotations

import torch
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule


def positions(rank: int, ranks: int, length: int) -> torch.Tensor:
    """Positions of a rank's `length` tokens.

    Megatron deals chunks in a zigzag: each rank gets an early and a late one.
    """
    if ranks == 1:
        return torch.arange(length)
    chunk = length // 2
    return torch.cat([torch.arange(c * chunk, (c + 1) * chunk) for c in (rank, 2 * ranks - 1 - rank)])


class GatheredAttention(MegatronModule):
    """Scaled dot-product attention of this rank's queries to the keys and values of all context parallel ranks."""

    def __init__(
        self,
        config,
        layer_number,
        attn_mask_type,
        attention_type,
        attention_dropout=None,
        softmax_scale=None,
        k_channels=None,
        v_channels=None,
        cp_comm_type=None,
        pg_collection=None,
    ) -> None:
        super().__init__(config=config)
        if attn_mask_type not in (AttnMaskType.causal, AttnMaskType.no_mask):
            raise NotImplementedError(f"attention mask {attn_mask_type} is not supported on the CPU")
        if config.window_size is not None or config.softmax_type != "vanilla":
            raise NotImplementedError(
                f"model.window_size: {config.window_size} with model.softmax_type: {config.softmax_type} is not "
                "supported on the CPU with context parallelism or MLA"
            )
        self.causal = attn_mask_type == AttnMaskType.causal
        self.scale = softmax_scale
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.group = pg_collection.cp

    def forward(
        self,
        query,
        key,
        value,
        attention_mask=None,
        attn_mask_type=None,
        attention_bias=None,
        packed_seq_params=None,
    ) -> torch.Tensor:
        """Tensors are [sequence, batch, heads, channels]; the result is [sequence, batch, heads * channels]."""
        if any(given is not None for given in (attention_mask, attention_bias, packed_seq_params)):
            raise NotImplementedError("masks, biases and packed sequences are not supported on the CPU here")
        rank, ranks, length = self.group.rank(), self.group.size(), query.size(0)
        mask = None
        if self.causal:
            of_keys = torch.cat([positions(r, ranks, length) for r in range(ranks)])
            mask = of_keys[None, :] <= positions(rank, ranks, length)[:, None]
        if ranks > 1:  # in the backward pass this becomes a reduce-scatter
            key, value = (gather_from_sequence_parallel_region(t, True, self.group) for t in (key, value))
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        with tensor_parallel.get_cuda_rng_tracker().fork():
            result = torch.nn.functional.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=mask,
                dropout_p=self.dropout if self.training else 0.0,
                scale=self.scale,
                enable_gqa=q.size(1) != k.size(1),
            )
        return result.permute(2, 0, 1, 3).flatten(2)


class CoreAttention:
    """Builds Megatron's DotProductAttention wherever it can be used, else `GatheredAttention`."""

    def __new__(cls, config, *args, **kwargs):
        plain = config.context_parallel_size == 1 and not {"k_channels", "v_channels"} & kwargs.keys()
        return (DotProductAttention if plain else GatheredAttention)(config, *args, **kwargs)
