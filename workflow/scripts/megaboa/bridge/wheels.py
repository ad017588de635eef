"""Workarounds for Megatron installed from wheels: without its Makefile, and without Apex."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

HELPERS = "megatron.core.datasets.helpers_cpp"
APEX_KERNEL = "fused_weight_gradient_mlp_cuda"


def keep_compiled_helpers(initialize: Any) -> None:
    """Don't let `megatron.bridge.training.initialize` compile helpers that the wheel contains in compiled form.

    It would call make in a folder without a Makefile, and exit.
    """
    if is_installed(HELPERS):
        initialize.compile_helpers = lambda: None


def without_missing_kernels(model: Any) -> list[str]:
    """Turn off what this installation doesn't support, and report that.

    Bridge turns on gradient accumulation fusion whenever Transformer Engine is installed; but the output layer isn't
    Transformer Engine's, and can't be built without Apex's kernel.
    """
    from megatron.core.tensor_parallel import layers

    if not getattr(model, "gradient_accumulation_fusion", False) or layers._grad_accum_fusion_available:
        return []
    model.gradient_accumulation_fusion = False
    return [f"model.gradient_accumulation_fusion=False (there is no {APEX_KERNEL}, which Apex brings)"]


def say(changes: list[str]) -> None:
    for change in changes:
        print(f"megaboa: {change}", file=sys.stderr, flush=True)


def is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False
