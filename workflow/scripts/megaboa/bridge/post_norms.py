"""Norms after attention and MLP (Gemma 2 and 3, EXAONE 4), which Megatron-Bridge 0.6.2 gives an epsilon of 1e-5.

Gemma's is 1e-6: logits of tiny models with random weights differ by a third of the largest from transformers'. In
trained models, whose values are larger, less.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from megaboa.bridge.hooks import on_import

_waits = False


def complete() -> None:
    """Give them the model's own. Call it before the first import of Bridge; further calls do nothing."""
    global _waits
    if not _waits:
        on_import("megatron.bridge.models.common.te_layers", after=_with_own_epsilon)
        _waits = True


def _with_own_epsilon(module: ModuleType) -> None:
    build = module.TENorm  # its third argument is 1e-5 by default

    def norm(config: Any, hidden_size: int) -> Any:
        return build(config, hidden_size, config.layernorm_epsilon)

    module.TENorm = norm
