"""Rounding-sized noise on a run's initial weights, which makes the run a twin (report/agreement.py)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import torch
from megatron.bridge.training.callbacks import Callback, CallbackContext


class Nudge(Callback):
    """Adds the noise before the first step. `number`: selects the noise."""

    def __init__(self, number: int, resumed: Callable[[], bool] = lambda: False):
        """`resumed`: whether the loaded weights are those of a run that was nudged before."""
        self._number, self._resumed = number, resumed

    def on_train_start(self, context: CallbackContext) -> None:
        if self._resumed():
            return
        nudge(context.model, self._number)
        if context.optimizer is not None:  # its copies of the weights, perhaps in higher precision
            context.optimizer.reload_model_params()


def nudge(model: Sequence[torch.nn.Module], number: int) -> None:
    """Move each weight up or down by one unit in the last place, or not at all.

    The noise only depends on a parameter's name, so that all ranks with a copy of it move it alike.
    """
    for chunk in model:
        for name, weight in chunk.named_parameters():
            if not weight.requires_grad:  # the base of adapters is loaded again in every attempt
                continue
            # The output layer on the last pipeline stage may be a copy of the embedding.
            name = "embedding" if getattr(weight, "shared_embedding", False) else name
            digest = hashlib.sha256(f"{number} {name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
            ulps = torch.randint(-1, 2, weight.shape, generator=generator).to(weight)
            with torch.no_grad():
                weight.copy_(torch.where(ulps == 0, weight, torch.nextafter(weight, ulps * torch.inf)))
