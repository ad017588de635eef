"""Latent attention, where megatron-core 0.19.2 builds or trains another model than is asked for.

Uncompressed queries (`q_lora_rank: null`, as in DeepSeek-V2-Lite and Moonlight): Megatron's switch `qk_layernorm` asks
for a norm of the compressed keys and values, which these models have, and also of the queries, which they don't have.
Megatron-Core then adds a norm to the projection of the queries, for which Hugging Face has no tensor; without
Transformer Engine it refuses to build the model. Here the queries stay without one, as in the published model. Bridge
does the same in a later version (its pull request 5262), but with Transformer Engine only.

Tensor parallelism: the part of the keys that has positions belongs to all heads, and each rank uses it for its own. Its
gradient is the sum over the ranks. Megatron-Core sums it only if the projection is duplicated and the sequence is split
(Transformer Engine's layers with sequence parallelism). Otherwise each rank continues with the gradient of its own
heads (NVIDIA/Megatron-LM, issue 1699 and pull request 6839).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from megaboa.bridge.hooks import on_import

_waits = False


def complete() -> None:
    """Change both. Call it before the first import of Megatron; further calls do nothing."""
    global _waits
    if not _waits:
        on_import("megatron.core.transformer.mla_qk_norm_config", after=_without_extra_norm)
        on_import("megatron.core.transformer.multi_latent_attention", after=_with_whole_gradients)
        _waits = True


def _without_extra_norm(module: ModuleType) -> None:
    class QKNormConfigResolver(module.QKNormConfigResolver):
        def __init__(self, config: Any, submodules: Any) -> None:
            super().__init__(config, submodules)
            if self._has_plain_queries():
                self.submodules = dataclasses.replace(submodules, q_layernorm=module.IdentityOp)

        def _mla_fused_linear_or_default(self, module_spec: Any, module_name: str) -> Any:
            if module_name == "linear_q_proj" and self._has_plain_queries():
                return module_spec or self.linear_impl
            return super()._mla_fused_linear_or_default(module_spec, module_name)

        def _has_plain_queries(self) -> bool:
            """Whether the queries get no norm.

            A specification that explicitly names a projection with a norm keeps it.
            """
            return not (self.has_q_lora or self.is_dsa or self._is_fused_norm_linear(self.submodules.linear_q_proj))

    QKNormConfigResolver.__module__, QKNormConfigResolver.__qualname__ = module.__name__, "QKNormConfigResolver"
    module.QKNormConfigResolver = QKNormConfigResolver


def _with_whole_gradients(module: ModuleType) -> None:
    for kind in (module.MLASelfAttention, module.FusedMLASelfAttention):
        kind._qkv_down_projection = _summed(kind._qkv_down_projection)


def _summed(project: Callable[..., tuple[Any, Any]]) -> Callable[..., tuple[Any, Any]]:
    """A projection whose keys' positions have a gradient that is summed over tensor ranks."""
    import torch
    from megatron.core.tensor_parallel import mappings

    @functools.wraps(project)
    def projected(self: Any, hidden_states: Any) -> tuple[Any, Any]:
        queries, keys = project(self, hidden_states)
        config, group = self.config, self.tp_group
        if group.size() == 1:
            return queries, keys
        parts = (config.kv_lora_rank, config.qk_pos_emb_head_dim)
        if keys.size(-1) != sum(parts):  # of a projection that is divided among the ranks
            keys = mappings.gather_from_tensor_model_parallel_region(keys, group=group)
            if config.sequence_parallel:
                keys = mappings.scatter_to_sequence_parallel_region(keys, group=group)
        if not config.sequence_parallel:  # otherwise Megatron gathers the positions, and sums their gradient
            compressed, positions = torch.split(keys, parts, dim=-1)
            positions = mappings.copy_to_tensor_model_parallel_region(positions, group=group)
            keys = torch.cat([compressed, positions], dim=-1)
        return queries, keys

    return projected
