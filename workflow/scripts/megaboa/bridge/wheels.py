"""Workarounds for Megatron installed from wheels: without its Makefile, and without Apex."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Collection
from typing import Any

HELPERS = "megatron.core.datasets.helpers_cpp"
APEX_KERNEL = "fused_weight_gradient_mlp_cuda"
FUSION = "model.gradient_accumulation_fusion"


def keep_compiled_helpers(initialize: Any) -> None:
    """Don't let `megatron.bridge.training.initialize` compile helpers that the wheel contains in compiled form.

    It would call make in a folder without a Makefile, and exit.
    """
    if is_installed(HELPERS):
        initialize.compile_helpers = lambda: None


def without_missing_kernels(model: Any, overrides: Collection[str] = ()) -> list[str]:
    """Turn off what this installation doesn't support, and report that.

    Bridge turns on gradient accumulation fusion whenever Transformer Engine is installed; but the output layer isn't
    Transformer Engine's, and can't be built without Apex's kernel. Where the run's overrides ask for it, our kernel
    takes that one's place.
    """
    from megatron.core.tensor_parallel import layers

    if not getattr(model, "gradient_accumulation_fusion", False) or layers._grad_accum_fusion_available:
        return []
    if FUSION in overrides and is_installed("transformer_engine_torch"):
        from megaboa.bridge import kernels

        kernels.use("gradients")
        return [f"{FUSION}: Transformer Engine's products take the place of {APEX_KERNEL}, which Apex brings"]
    model.gradient_accumulation_fusion = False
    return [f"{FUSION}=False (there is no {APEX_KERNEL}, which Apex brings)"]


def say(changes: list[str]) -> None:
    for change in changes:
        print(f"megaboa: {change}", file=sys.stderr, flush=True)


def is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False
