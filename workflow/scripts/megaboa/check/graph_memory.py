"""Memory of CUDA graphs of parts of layers (`model.cuda_graph_impl: transformer_engine`).

They are recorded after the third step, one layer after the other. Each micro-batch has graphs of its own, but they
share memory unless a stage has both in flight (megatron-core 0.19.2, cuda_graphs.py, TECudaGraphHelper).
docs/explanation/memory.md compares this with a snapshot of an H200's memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from megaboa.check import activations, work
from megaboa.check.facts import Facts
from megaboa.check.parameters import is_sparse, last_layer
from megaboa.check.stages import Stage, in_flight


@dataclass(frozen=True)
class GraphMemory:
    """Bytes on a rank."""

    kept: float  # what the recorded parts keep for the backward pass, with their inputs, and what they return
    kept_anyway: float  # of that, what layers keep without graphs too
    inputs: float  # of that, inputs, which stay tensors outside the pool
    masks: float  # attention's, a tensor for each layer
    working: float  # for the backward pass of the layer that is being recorded


def of_stage(f: Facts, stage: Stage) -> GraphMemory:
    layers = activations.alike(f, (*stage.layers, *[last_layer(f.model)] * stage.mtp))
    recorded = [(parts, layer, count) for layer, count in layers.items() if (parts := _parts(f, layer))]
    copies = in_flight(f, stage.number)
    anyway = sum(count * _kept_anyway(f, parts, layer) for parts, layer, count in recorded)
    returned = sum(count * _returned(f, parts) for parts, _, count in recorded)
    return GraphMemory(
        kept=copies * (anyway + returned),
        kept_anyway=copies * anyway,
        inputs=copies * sum(count for *_, count in recorded) * activations.input_bytes(f),
        masks=copies * sum(count for parts, _, count in recorded if "attn" in parts) * activations.mask_bytes(f),
        working=max((_working(f, parts, stage) for parts, *_ in recorded), default=0.0),
    )


def _parts(f: Facts, layer: int) -> set[str]:
    """The parts of a layer that are recorded; without names it is all of them."""
    whole = {"attn", "moe" if is_sparse(f.model, layer) else "mlp"}
    named = set(f.kernels.graph_modules)
    if not named:
        return whole
    return named & (whole | ({"moe_router", "moe_preprocess"} if "moe" in whole else set()))


def _is_whole(parts: set[str]) -> bool:
    return "attn" in parts and bool({"mlp", "moe"} & parts)


def _has_shared_expert(f: Facts, parts: set[str]) -> bool:
    """Whether the router's graph computes it: not where it overlaps the dispatcher (moe_layer.py)."""
    return "moe_router" in parts and bool(f.model.shared_ffn) and not f.kernels.shared_expert_overlap


def _kept_anyway(f: Facts, parts: set[str], layer: int) -> float:
    kept = 0.0
    if "attn" in parts:
        kept += activations.attention_bytes(f, layer)
    if "mlp" in parts:
        kept += activations.mlp_bytes(f, layer)
    if "moe" in parts:
        kept += activations.moe_bytes(f, layer)
    if "moe_router" in parts:
        kept += activations.router_bytes(f)
    elif not _is_whole(parts):
        kept += activations.input_bytes(f)  # of what follows
    if _has_shared_expert(f, parts):
        kept += activations.shared_expert_bytes(f, layer)
    return kept


def _sorted_tokens(f: Facts, parts: set[str]) -> float:
    return activations.permuted_bytes(f) if "moe_preprocess" in parts else 0.0


def _returned(f: Facts, parts: set[str]) -> float:
    """What a graph returns, unless it is kept anyway. The next layer copies it if the whole layer is graphed."""
    return _sorted_tokens(f, parts) + activations.input_bytes(f) * (_is_whole(parts) + _has_shared_expert(f, parts))


def _working(f: Facts, parts: set[str], stage: Stage) -> float:
    """Gradients of what a layer returns, of its weights, and of what lies between, with what is recomputed for it."""
    gradients = activations.input_bytes(f) * (1 + _has_shared_expert(f, parts))
    if "moe_router" in parts:
        gradients += _sorted_tokens(f, parts) or activations.input_bytes(f)
    inside, products = [0.0], []
    if "attn" in parts:
        inside.append(activations.attention_backward_bytes(f))
        products += work.attention(f).products
    if {"mlp", "moe"} & parts:
        inside.append(activations.backward_bytes(f, stage) + activations.recomputed_bytes(f, stage))
        products += (work.experts(f) if "moe" in parts else work.feed_forward(f)).products
    weights = 0.0
    if not f.kernels.gradient_fusion and not f.is_frozen:
        weights = sum(2 * one.columns * one.depth * one.groups for one in products)
    return gradients + max(inside) + weights
