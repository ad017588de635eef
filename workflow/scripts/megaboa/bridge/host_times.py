"""The host's time to launch the kernels of a model that Megatron trains, by layer.

It is measured with a model so small that the GPU waits for the host. The difference between two numbers of layers gives
a layer's time; everything else in a micro-batch is the rest. The model is built as from `models.<name>.config`, in
Megatron's data parallel wrapper and schedule, because hooks on every parameter cost the host more than Transformer
Engine's layer alone would. Overlapped communication, and reading batches, are not included.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.bridge import AutoBridge
from megatron.bridge.training.mixed_precision import get_mixed_precision_config
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from transformers import AutoConfig

from megaboa.bridge import wheels
from megaboa.bridge.kernel_times import Bench, forget_scales
from megaboa.bridge.quiet import quietly
from megaboa.records import Law

type Each = Callable[[Callable[[str], tuple[float, float]]], dict[str, tuple[float, float]]]


@dataclass(frozen=True)
class Small:
    """Sizes of the measured models: two numbers of layers, two numbers of experts per rank, micro-batches, tokens,
    width."""

    layers: tuple[int, int]
    experts: tuple[int, int]
    micro_batches: int
    tokens: int
    width: int


GPU = Small(layers=(6, 2), experts=(4, 32), micro_batches=4, tokens=128, width=256)
CPU = Small(layers=(6, 1), experts=(2, 6), micro_batches=2, tokens=16, width=32)
PRECISIONS = {  # Bridge's names for the types of a calibration
    "fp32": None,
    "bf16": "bf16_mixed",
    "fp8_current": "bf16_with_fp8_current_scaling_mixed",
    "fp8_delayed": "bf16_with_fp8_delayed_scaling_mixed",
    "fp8_blocks": "bf16_with_fp8_subchannel_scaling_mixed",
    "mxfp8": "bf16_with_mxfp8_mixed",
}


@dataclass(frozen=True)
class Host:
    """Seconds, forward and backward; names as in a calibration."""

    layer: dict[str, float]
    tensor_host: float
    experts_host: Law
    micro_batch: float


def measure(bench: Bench, ranks: int, each: Each) -> Host:
    """Measure on all ranks at the same time. `ranks`: those of a node (1 on the CPU); `each`: measures by type."""
    small = GPU if bench.is_gpu else CPU
    plain, *_ = bench.kinds
    sharing = shared_by(ranks)
    with _groups(small):
        dense = each(lambda kind: _layer(bench, small, kind))
    layer, rest = dense[plain]
    shared = layer
    if sharing > 1:
        with _groups(small, tp=sharing):
            shared, _ = _layer(bench, small, plain, tp=sharing)
    with _groups(small, ep=sharing):
        few, many = (_layer(bench, small, plain, ep=sharing, experts=number)[0] - layer for number in small.experts)
    group = max(0.0, (many - few) / (small.experts[1] - small.experts[0]))
    return Host(
        layer={kind: seconds for kind, (seconds, _) in dense.items()},
        tensor_host=max(0.0, shared - layer),
        experts_host=Law(rate=1e30, latency=max(0.0, few - (small.experts[0] - 1) * group), group=group),
        micro_batch=rest,
    )


def shared_by(ranks: int) -> int:
    """Number of ranks that share a layer. It must divide the heads, and hardly affects the host's time."""
    return next(number for number in (4, 2, 1) if ranks % number == 0)


@contextlib.contextmanager
def _groups(small: Small, tp: int = 1, ep: int = 1) -> Iterator[None]:
    """Process groups for a layout, created once for all its models, because NCCL never frees a group's resources."""
    with quietly():
        provider(small, small.layers[0], tp, ep).initialize_model_parallel(seed=1, create_gloo_process_groups=False)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()


def _layer(bench: Bench, small: Small, kind: str, tp: int = 1, ep: int = 1, experts: int = 0) -> tuple[float, float]:
    """Seconds of a layer, and of the rest of a micro-batch."""
    with quietly():
        # The larger model first: Megatron's table of expert losses has as many rows as the first model has layers.
        more, fewer = (_seconds(bench, small, kind, provider(small, n, tp, ep, experts)) for n in small.layers)
    layer = (more - fewer) / (small.layers[0] - small.layers[1])
    return layer, max(0.0, fewer - small.layers[1] * layer)


def _seconds(bench: Bench, small: Small, kind: str, made: Any) -> float:
    """Seconds of a micro-batch."""
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    if precision := PRECISIONS[kind]:
        mixed = get_mixed_precision_config(precision)
        mixed.finalize()
        mixed.setup(made, ddp_config=ddp)
    made.finalize()
    wheels.without_missing_kernels(made)
    model = made.provide_distributed_model(ddp)
    made.no_sync_func = model[0].no_sync
    data = _same(bench, small.tokens)

    def step() -> None:
        get_forward_backward_func()(
            forward_step_func=_forward,
            data_iterator=data,
            model=model,
            num_microbatches=small.micro_batches,
            seq_length=small.tokens,
            micro_batch_size=1,
            forward_only=False,
        )

    try:
        return bench.host(step, times=3) / small.micro_batches
    finally:
        forget_scales()


def provider(small: Small, layers: int, tp: int = 1, ep: int = 1, experts: int = 0) -> Any:
    """A small model's provider. `experts`: per rank, with tokens spread evenly."""
    sizes = {
        "num_hidden_layers": layers,
        "hidden_size": small.width,
        "intermediate_size": 2 * small.width,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": small.width // 4,
        "vocab_size": 1024,
        "max_position_embeddings": small.tokens,
        "tie_word_embeddings": False,
    }
    family, name = "qwen3", "Qwen3ForCausalLM"
    if experts:
        family, name = "qwen3_moe", "Qwen3MoeForCausalLM"
        sizes |= {"num_experts": experts * ep, "num_experts_per_tok": 2, "moe_intermediate_size": small.width}
    config = AutoConfig.for_model(family, architectures=[name], **sizes)
    made = AutoBridge.from_hf_config(config).to_megatron_provider(load_weights=False)
    made.seq_length = small.tokens
    made.tensor_model_parallel_size, made.sequence_parallel = tp, tp > 1
    made.expert_model_parallel_size = ep
    made.moe_router_force_load_balancing = bool(experts)
    return made


def _same(bench: Bench, tokens: int) -> Iterator[dict[str, torch.Tensor]]:
    words = torch.ones((1, tokens), dtype=torch.long, device=bench.device)
    places = torch.arange(tokens, device=bench.device).unsqueeze(0)
    while True:
        yield {"input_ids": words, "position_ids": places, "labels": words}


def _forward(data: Iterator[dict[str, torch.Tensor]], model: Any) -> Any:
    losses = model(attention_mask=None, **next(data))

    def mean(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss = output.float().mean()
        return loss, {"loss": loss.detach()}

    return losses, mean
