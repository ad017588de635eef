"""Noise of the size of rounding on the weights that a run begins with: what makes it a twin (report/agreement.py)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import torch
from megatron.bridge.training.callbacks import Callback, CallbackContext


class Nudge(Callback):
    """Before the first step. `number`: which noise."""

    def __init__(self, number: int, resumed: Callable[[], bool] = lambda: False):
        """`resumed`: whether the weights, by then, are those of a run that was moved before."""
        self._number, self._resumed = number, resumed

    def on_train_start(self, context: CallbackContext) -> None:
        if self._resumed():
            return
        nudge(context.model, self._number)
        if context.optimizer is not None:  # it may have copies of the weights, of a higher precision
            context.optimizer.reload_model_params()


def nudge(model: Sequence[torch.nn.Module], number: int) -> None:
    """Move each weight by one unit in the last place, up, down, or not at all.

    Every rank that holds a copy of a parameter moves it alike, as the noise depends on its name alone.
    """
    for chunk in model:
        for name, weight in chunk.named_parameters():
            if not weight.requires_grad:  # what adapters change is read again in every attempt
                continue
            # The output layer on the last pipeline stage may be the embedding of the first.
            name = "embedding" if getattr(weight, "shared_embedding", False) else name
            digest = hashlib.sha256(f"{number} {name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
            ulps = torch.randint(-1, 2, weight.shape, generator=generator).to(weight)
            with torch.no_grad():
                weight.copy_(torch.where(ulps == 0, weight, torch.nextafter(weight, ulps * torch.inf)))
