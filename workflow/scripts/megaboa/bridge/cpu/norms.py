"""Norms whose weights are added to 1. Transformer Engine has them; torch's own multiply by the weight as it is."""

from __future__ import annotations

import torch
from torch.nn import functional


class ZeroCenteredRMSNorm(torch.nn.RMSNorm):
    """In fp32, as Transformer Engine and `transformers` compute it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = functional.rms_norm(x.float(), self.normalized_shape, None, self.eps)
        return (normed * (1.0 + self.weight.float())).type_as(x)


class ZeroCenteredLayerNorm(torch.nn.LayerNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(x, self.normalized_shape, 1.0 + self.weight, self.bias, self.eps)


def zero_centered(norm: torch.nn.Module) -> torch.nn.Module:
    """The same norm with weights around 0."""
    norm.__class__ = ZeroCenteredRMSNorm if isinstance(norm, torch.nn.RMSNorm) else ZeroCenteredLayerNorm
    torch.nn.init.zeros_(norm.weight)
    return norm
