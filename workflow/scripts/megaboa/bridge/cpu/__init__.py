"""Runs the unmodified Megatron-Bridge on a machine without a GPU: over gloo, without Transformer Engine.

`activate()` must be called before the first import of `megatron.core` or `megatron.bridge`, and only where the run's
device is `cpu` (or where a configuration is built without a GPU: preflight, import, export). From then on, for the
life of the process, "cuda" means the CPU. `refuse(cfg)` then lists unsupported settings.
"""

from __future__ import annotations

import os
import sys

from megaboa.bridge.cpu.refusal import RefusedOnCpu, refuse

__all__ = ["RefusedOnCpu", "activate", "refuse"]

_active = False


def activate() -> None:
    """Make this process a CPU backend for Megatron. Calling it again does nothing."""
    global _active
    if _active:
        return
    early = sorted(name for name in sys.modules if name in ("megatron.core", "megatron.bridge"))
    if early:
        raise RuntimeError(
            f"megaboa.bridge.cpu.activate() came too late: {' and '.join(early)} had been imported already; "
            "call it before the first import of Megatron"
        )
    # GPUs of the host must stay unused, also by child processes. CUDA reads this when it is initialised.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

    import torch

    if torch.cuda.is_initialized():
        raise RuntimeError(
            "megaboa.bridge.cpu.activate() came too late: CUDA is in use in this process already; "
            "call it before any tensor is put on a GPU"
        )
    from megaboa.bridge.cpu import cuda, imports, megatron

    imports.install()
    cuda.redirect()
    megatron.install()
    _active = True
