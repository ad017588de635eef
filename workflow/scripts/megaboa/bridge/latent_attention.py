"""Latent attention with uncompressed queries (`q_lora_rank: null`, as in DeepSeek-V2-Lite and Moonlight).

Megatron's switch `qk_layernorm` asks for a norm of the compressed keys and values, which these models have, and also of
the queries, which they don't have. Megatron-Core 0.19 then adds a norm to the projection of the queries, for which
Hugging Face has no tensor; without Transformer Engine it refuses to build the model. Here the queries stay without one,
as in the published model. Bridge does the same in a later version (its pull request 5262), but with Transformer Engine
only.
"""

from __future__ import annotations

import dataclasses
from types import ModuleType
from typing import Any

from megaboa.bridge.hooks import on_import

_waits = False


def without_extra_norm() -> None:
    """Change Megatron's choice of norms. Call it before the first import of Megatron; further calls do nothing."""
    global _waits
    if not _waits:
        on_import("megatron.core.transformer.mla_qk_norm_config", after=_change)
        _waits = True


def _change(module: ModuleType) -> None:
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
