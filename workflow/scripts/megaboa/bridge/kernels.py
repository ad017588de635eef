"""Faster implementations of the same calculations, for recipes that ask for them: `kernels.use("loss", "split")`.

docs/benchmarks/h200.md has their measured effects.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from types import SimpleNamespace
from typing import Any

import torch

in_use: set[str] = set()  # requested by this process's recipe; preflight counts memory accordingly


def use(*names: str) -> None:
    """Replace parts of Megatron in this process. Must be called before the model is built."""
    for name in names:
        KERNELS[name]()
        in_use.add(name)


def _loss() -> None:
    """Cross entropy in two passes over the logits in their precision, instead of many passes over float32 copies."""
    from megatron.core.models.common.language_module import language_module

    language_module.fused_vocab_parallel_cross_entropy = cross_entropy


def _split() -> None:
    """Concatenate the gradients of query, key and value with a compiled kernel, instead of PyTorch's slow one."""
    from megatron.core.transformer import attention

    attention.SplitAlongDim = lambda mixed, dim, sizes: _Split.apply(mixed, dim, sizes)


def _norms() -> None:
    """Use cuDNN's LayerNorm, as Transformer Engine's has no tuned kernel for many hidden sizes."""
    os.environ |= {"NVTE_NORM_FWD_USE_CUDNN": "1", "NVTE_NORM_BWD_USE_CUDNN": "1"}


def _gradients() -> None:
    """Accumulate weight gradients inside matrix products in the output layer too, without Apex."""
    from megatron.core.tensor_parallel import layers

    if layers._grad_accum_fusion_available or importlib.util.find_spec("transformer_engine_torch") is None:
        return
    from transformer_engine.pytorch.cpp_extensions import general_gemm

    def accumulate(inputs: torch.Tensor, gradients: torch.Tensor, total: torch.Tensor) -> None:
        general_gemm(inputs, gradients, out_dtype=total.dtype, layout="NT", out=total, grad=True, accumulate=True)

    layers.fused_weight_gradient_mlp_cuda = SimpleNamespace(
        wgrad_gemm_accum_fp32=accumulate, wgrad_gemm_accum_fp16=accumulate
    )
    layers._grad_accum_fusion_available = True


KERNELS = {"loss": _loss, "split": _split, "norms": _norms, "gradients": _gradients}


def _compiled(function: Any) -> Any:
    """Compile a function at its first call, so that importing this module needs no compiler."""

    @functools.cache
    def compiled() -> Any:
        return torch.compile(function, dynamic=False)

    return functools.wraps(function)(lambda *arguments: compiled()(*arguments))


@_compiled
def _logsumexp_and_target(logits: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    full = logits.float()
    return torch.logsumexp(full, -1), full.gather(-1, target.unsqueeze(-1)).squeeze(-1)


@_compiled
def _logits_gradient(
    logits: torch.Tensor, target: torch.Tensor, present: torch.Tensor, logsumexp: torch.Tensor, gradient: torch.Tensor
) -> torch.Tensor:
    share = torch.exp(logits.float() - logsumexp.unsqueeze(-1))
    columns = torch.arange(logits.size(-1), device=logits.device)
    hit = (columns == target.unsqueeze(-1)) & present.unsqueeze(-1)
    return ((share - hit.float()) * gradient.unsqueeze(-1)).to(logits.dtype)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, target: torch.Tensor, group: Any) -> torch.Tensor:
        """Loss of each token. Shapes: logits [sequence, batch, this rank's part of the vocabulary], target [sequence,
        batch]."""
        ranks, width = group.size(), logits.size(-1)
        target = target - group.rank() * width
        present = (target >= 0) & (target < width)
        target = target.clamp(0, width - 1)
        logsumexp, found = _logsumexp_and_target(logits, target)
        if ranks > 1:
            highest = logsumexp.clone()
            torch.distributed.all_reduce(highest, torch.distributed.ReduceOp.MAX, group)
            both = torch.stack([torch.exp(logsumexp - highest), torch.where(present, found, 0.0)])
            torch.distributed.all_reduce(both, group=group)
            logsumexp, found = torch.log(both[0]) + highest, both[1]
        ctx.save_for_backward(logits, target, present, logsumexp)
        return logsumexp - found

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _logits_gradient(*ctx.saved_tensors, gradient), None, None


def cross_entropy(logits: torch.Tensor, target: torch.Tensor, group: Any) -> torch.Tensor:
    return _CrossEntropy.apply(logits, target, group)


@_compiled
def _join(first: torch.Tensor, second: torch.Tensor, third: torch.Tensor) -> torch.Tensor:
    return torch.cat([first, second, third], dim=-1)


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mixed: torch.Tensor, dim: int, sizes: list[int]) -> tuple[torch.Tensor, ...]:
        ctx.dim = dim
        return torch.split(mixed, sizes, dim=dim)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        last = ctx.dim in (-1, gradients[0].dim() - 1)
        joined = _join(*gradients) if last and len(gradients) == 3 else torch.cat(gradients, dim=ctx.dim)
        return joined, None, None
