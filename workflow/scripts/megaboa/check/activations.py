"""Bytes of activations that a micro-batch leaves in every layer for the backward pass, with Transformer Engine and
flash attention.

The counts follow the code: inputs of norms and of matrix products, queries, keys and values, dropout masks. Full
recomputation only keeps a layer's input; selective recomputation drops the parts that it names.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Sequence

from megaboa.check import work
from megaboa.check.facts import Facts
from megaboa.check.parameters import is_sparse, last_layer, vocabulary_rows
from megaboa.check.stages import Stage

# Bytes per logit during the loss: logits, their exponentials and their gradient. "ours" (megaboa.bridge.kernels "loss")
# keeps only the first and the last, in 16 bits each; so does Transformer Engine since 2.18 (triton/cross_entropy.py,
# cross_entropy_forward).
LOSS_BYTES = {"native": 10, "te": 4, "unfused": 14, "ours": 4}
# Bytes per value of a layer's input on a rank, in block-wise FP8: gathered from other tensor ranks by the last backward
# pass, and not freed yet. Fitted: 5.4 in a snapshot of 8 layers, 2.5 explain a run of 32.
LEFT_BY_GATHERS = 3
LOW = {"fp8": 1.0, "mxfp8": 1.0 + 1 / 32, "nvfp4": 0.5 + 1 / 16}  # bytes per value, scales included


def stage_bytes(f: Facts, stage: Stage) -> float:
    """Bytes for all layers of one rank, and one micro-batch."""
    kept_whole = f.kernels.recompute != "full" or f.kernels.recompute_method == "block"  # megatron-core skips them
    prediction = layer_bytes(f, last_layer(f.model)) if kept_whole else input_bytes(f)
    return sum(_chunk_bytes(f, chunk) for chunk in stage.chunks) + stage.mtp * prediction


def left_bytes(f: Facts, stage: Stage) -> float:
    """Bytes that the last backward pass has not freed yet."""
    if not _gathers_blocks(f) or f.is_frozen:
        return 0.0
    return LEFT_BY_GATHERS * len(stage.layers) * _tokens(f) * (f.model.hidden or 0) / _shared(f)


def _chunk_bytes(f: Facts, layers: Sequence[int]) -> float:
    """Bytes for a virtual stage. Recomputation covers its first N layers (block), or groups of N layers (uniform)."""
    inputs, kept = 0, layers
    if f.kernels.recompute == "full":
        size = f.kernels.recompute_layers or 1
        block = f.kernels.recompute_method == "block"
        inputs = min(size, len(layers)) if block else -(-len(layers) // size)
        kept = layers[size:] if block else ()
    if f.kernels.cpu_offloading and len(kept) > f.kernels.offloaded_layers > 0:
        kept = kept[f.kernels.offloaded_layers - 1 :]  # offloaded to the host's memory, except one layer in transit
    return inputs * input_bytes(f) + sum(count * layer_bytes(f, layer) for layer, count in alike(f, kept).items())


def alike(f: Facts, layers: Iterable[int]) -> dict[int, int]:
    """A layer of each kind, and how many of them there are: those of a kind have the same activations."""
    kinds = defaultdict(list)
    for layer in layers:
        kinds[is_sparse(f.model, layer), in_low_precision(f, layer)].append(layer)
    return {some[0]: len(some) for some in kinds.values()}


def input_bytes(f: Facts) -> float:
    """Bytes of a layer's input."""
    return _tokens(f) / _shared(f) * (f.model.hidden or 0) * _width(f)


def layer_bytes(f: Facts, layer: int) -> float:
    """Bytes for one layer that isn't recomputed as a whole."""
    return attention_bytes(f, layer) + (moe_bytes(f, layer) if is_sparse(f.model, layer) else mlp_bytes(f, layer))


def casts_weights(f: Facts, layer: int) -> bool:
    """Whether a layer's 16-bit weights are cast to FP8 with current or delayed scaling."""
    low = any(scaling in (f.training.precision or "") for scaling in ("fp8_current", "fp8_delayed"))
    return low and not f.training.fp8_weights and f.layout.fsdp != "torch" and in_low_precision(f, layer)


def joined_weights(f: Facts) -> float:
    """Number of a dense layer's weights that Transformer Engine's joined operations have."""
    if not f.kernels.te_operations:
        return 0.0
    return sum(one.columns * one.depth for one in work.feed_forward(f).products)


def _joined_copies(f: Facts, layer: int) -> float:
    """Joined operations cast weights in every forward pass, and keep the columns until the backward pass
    (ops/basic/basic_linear.py): a copy for each micro-batch."""
    return joined_weights(f) if casts_weights(f, layer) else 0.0


def recomputed_bytes(f: Facts, stage: Stage) -> float:
    """Bytes that exist again while layers, or parts of one, are recomputed."""
    layers = alike(f, stage.layers)
    if f.kernels.recompute == "selective":
        whole = dataclasses.replace(f, kernels=dataclasses.replace(f.kernels, recompute=None))
        return max((layer_bytes(whole, layer) - layer_bytes(f, layer) for layer in layers), default=0.0)
    if f.kernels.recompute != "full":
        return 0.0
    longest = max(map(len, stage.chunks))
    at_once = min(f.kernels.recompute_layers or 1, longest) if f.kernels.recompute_method == "uniform" else 1
    return at_once * max((layer_bytes(f, layer) for layer in layers), default=0.0)


def attention_bytes(f: Facts, layer: int = 0) -> float:
    """The first half of a layer: norm, queries, keys, values, output of attention, dropout mask."""
    model, tokens = f.model, _tokens(f)
    hidden, width, tp = model.hidden or 0, _width(f), f.layout.tp
    low = _low(f, layer)
    norm = hidden * (width / _shared(f) + _normed(f, low, is_apart=model.latent))
    mask = hidden * (model.dropout > 0) / _shared(f)
    statistics = 4 * (model.heads or 0) / tp
    return tokens * (norm + mask + statistics + (_latent(f) if model.latent else _grouped(f)))


def _grouped(f: Facts) -> float:
    """Bytes per token for queries, keys, values, and the output; in FP8 with delayed scaling if attention is.

    Inputs of rotary positions aren't kept (Transformer Engine's rope.py, FusedRoPEFunc), unless queries and keys have
    norms: then both versions are kept.
    """
    model, width, tp = f.model, _width(f), f.layout.tp
    head, heads = model.head_dim or 0, model.heads or 0
    groups = max(model.kv_groups or heads, tp)
    normed = heads + groups if model.qk_norm else 0
    each = 1 if _is_delayed(f) and f.has_fp8_attention else width
    again = heads * _is_delayed(f)
    return head * (each * (heads + 2 * groups + heads) + width * normed + again) / tp


def _is_delayed(f: Facts) -> bool:
    """Whether scaling is delayed. Then products keep quantized inputs of which others keep the original: attention's
    output, and the shared expert's input. Other scalings quantize these again (megatron-core,
    set_save_original_input)."""
    return "fp8_delayed" in (f.training.precision or "")


def _latent(f: Facts) -> float:
    """Bytes per token for compressed queries and keys (with their norms), and the parts of all heads."""
    model, width, tp = f.model, _width(f), f.layout.tp
    no_position, position, value = model.qk_head_dim or 0, model.qk_position_dim or 0, model.v_head_dim or 0
    compressed = (2 * (model.q_rank or 0) + 2 * (model.kv_rank or 0) + position) / _shared(f)
    recomputed = f.kernels.recompute == "selective" and "mla_up_proj" in f.kernels.recompute_modules
    up = 0 if recomputed else 2 * (no_position + position) + no_position + value
    again = (model.heads or 0) * value / tp * _is_delayed(f)
    return width * (compressed + (model.heads or 0) * (up + value) / tp) + again


def mlp_bytes(f: Facts, layer: int = 0) -> float:
    """The second half of a dense layer."""
    if _drops("mlp", f):
        return entry_bytes(f)
    low = _low(f, layer)
    norm = (f.model.hidden or 0) * _normed(f, low)
    inner = _tokens(f) * (norm + _feed_forward(f, f.model.ffn or 0, low) / f.layout.tp)
    return entry_bytes(f) + inner + _joined_copies(f, layer)


def moe_bytes(f: Facts, layer: int = 0) -> float:
    """The second half of a sparse layer: routing, tokens sent to experts, experts, the shared expert."""
    if _drops("moe", f):
        return entry_bytes(f)
    low = _low(f, layer)
    middle = _feed_forward(f, f.model.moe_ffn or 0, low, routed=True) / f.layout.expert_tp
    routed = _received(f) * ((f.model.hidden or 0) * low + middle)
    return router_bytes(f) + shared_expert_bytes(f, layer) + routed


def entry_bytes(f: Facts) -> float:
    """The input of a layer's second half, and the dropout mask before it, a byte per value."""
    return input_bytes(f) * (1 + (f.model.dropout > 0) / _width(f))


def router_bytes(f: Facts) -> float:
    """What comes before tokens are sent to experts: residual, norm, scores in fp32, probabilities, a mask."""
    norm = 0 if _drops("layernorm", f) else (f.model.hidden or 0) * _width(f)
    return entry_bytes(f) + _tokens(f) / _shared(f) * (norm + 9 * (f.model.experts or 0))


def _received(f: Facts) -> float:
    """Number of tokens received by a rank's experts (a token counts topk times)."""
    return _tokens(f) / _shared(f) * (f.model.topk or 1) * f.layout.expert_tp * work.unevenness_at_peak(f)


def shared_expert_bytes(f: Facts, layer: int) -> float:
    if _drops("shared_experts", f):
        return 0.0
    again = (f.model.hidden or 0) / _shared(f) * (f.model.shared_ffn is not None and _is_delayed(f))
    return _tokens(f) * (_feed_forward(f, f.model.shared_ffn or 0, _low(f, layer)) / f.layout.tp + again)


def permuted_bytes(f: Facts) -> float:
    """A rank's own tokens, sorted for experts before they are sent; other dispatchers than alltoall sort them later."""
    return (f.model.topk or 1) * input_bytes(f) if f.kernels.dispatcher in (None, "alltoall") else 0.0


def mask_bytes(f: Facts) -> float:
    """Attention's mask as a tensor: a byte for each pair of tokens."""
    return _tokens(f) * (f.training.seq_length or 0)


def attention_backward_bytes(f: Facts) -> float:
    """Gradients of queries, keys and values, and cuDNN's workspace: fp32 gradients of queries and, where heads share
    keys and values, theirs for each head."""
    model, width, tp = f.model, _width(f), f.layout.tp
    heads = model.heads or 0
    if model.latent:
        query = (model.qk_head_dim or 0) + (model.qk_position_dim or 0)
        return _tokens(f) * heads / tp * (width * (2 * query + (model.v_head_dim or 0)) + 4 * query)
    groups = max(model.kv_groups or heads, tp)
    repeated = 2 * heads if groups < heads else 0
    each = width * (heads + 2 * groups + repeated) + 4 * heads
    return _tokens(f) * (model.head_dim or 0) * each / tp


def _feed_forward(f: Facts, ffn: int, low: float, routed: bool = False) -> float:
    """Bytes per token for the outputs of the first product and of the activation.

    If the activation isn't a single kernel, its gates are kept too, as well as the values that they multiply (a copy,
    because an offset is added), and for experts the input of the multiplication with the router's probability
    (megatron-core, mlp.py and experts.py, glu).
    """
    width, gated = _width(f), f.model.gated
    before = ffn * width * (2 if gated else 1)
    if routed and _drops("moe_act", f):
        return before
    between = 0 if f.kernels.activates_at_once else ffn * width * (2 * gated + routed)
    return before + between + ffn * low


def logits_bytes(f: Facts) -> float:
    """Bytes while a micro-batch's loss is calculated, on the last stage."""
    kernel = f.kernels.loss_kernel if f.kernels.fused_loss else "unfused"
    return _tokens(f) * vocabulary_rows(f) / f.layout.tp * LOSS_BYTES.get(kernel, LOSS_BYTES["unfused"])


def logits_gradient_bytes(f: Facts) -> float:
    """Bytes at the beginning of the backward pass, on the last stage."""
    return _tokens(f) * vocabulary_rows(f) / f.layout.tp * _width(f)


def backward_bytes(f: Facts, stage: Stage) -> float:
    """Bytes of gradients inside the layer that the backward pass works on.

    In a dense layer the peak is at the activation's gradient: that gradient, those of the activation's input and of the
    layer's output, less the second product's input, which is freed by then. For experts nothing is subtracted.
    """
    widest = 0.0
    for layer in alike(f, stage.layers):
        model, hidden, width = f.model, f.model.hidden or 0, _width(f)
        values = 3 if f.model.gated else 2
        if is_sparse(model, layer):  # tokens as experts gave them, and as they were sent to them
            copies = (model.topk or 1) * work.unevenness_at_peak(f) / _shared(f)
            inner = width * (copies * (values * (model.moe_ffn or 0) + 2 * hidden) + 2 * hidden)
        else:
            inner = (values * width - _low(f, layer)) * (model.ffn or 0) / f.layout.tp + width * hidden
        widest = max(widest, inner)
    return _tokens(f) * widest


def _tokens(f: Facts) -> float:
    """Tokens of a micro-batch on one context rank."""
    return (f.training.seq_length or 0) * (f.training.mbs or 1) / f.layout.cp


def _shared(f: Facts) -> int:
    """Number of tensor ranks that share the tokens under sequence parallelism."""
    return f.layout.tp if f.layout.sp else 1


def _normed(f: Facts, low: float, is_apart: bool = False) -> float:
    """Bytes per value of a norm's output.

    Only a norm that is a module of its own, apart from the product after it, can be recomputed: those before latent
    attention and before experts (megatron-core, gpt_layer_specs.py).

    Adapters keep the output in 16 bits and gathered. In addition, Transformer Engine keeps what it would keep without
    adapters (layernorm_linear.py, ln_out_to_save), unless it is the same.
    """
    by_columns = low if _gathers_blocks(f) else 0.0  # rows are gathered, and columns are kept for the backward pass
    own = 0.0 if is_apart and _drops("layernorm", f) else (low + by_columns) / _shared(f)
    if not f.is_frozen:
        return own
    return _width(f) + (own if _shared(f) > 1 or low < _width(f) else 0.0)


def _gathers_blocks(f: Facts) -> bool:
    """Whether tensor ranks gather norms' outputs in block-wise FP8: then rows and columns are both kept (seen in a
    memory snapshot of an H200)."""
    return "subchannel" in (f.training.precision or "") and _shared(f) > 1


def _width(f: Facts) -> int:
    return 4 if f.training.precision == "fp32" else 2


def _low(f: Facts, layer: int) -> float:
    """Bytes per value of the inputs that matrix products keep, which are quantized in some layers."""
    if not in_low_precision(f, layer):
        return _width(f)
    precision = f.training.precision or ""
    return next((size for name, size in reversed(LOW.items()) if name in precision), _width(f))


def in_low_precision(f: Facts, layer: int) -> bool:
    """Whether a layer is in low precision: with current scaling, Bridge by default leaves the first and the last one in
    bf16."""
    ends = f.training.bf16_ends and "fp8_current" in (f.training.precision or "")
    return not ends or layer not in (0, last_layer(f.model))


def _drops(part: str, f: Facts) -> bool:
    return f.kernels.recompute == "selective" and part in f.kernels.recompute_modules
