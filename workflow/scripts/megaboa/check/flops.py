"""Floating point operations of a step, by the counting of Bridge's `flop_utils`: forward once, backward twice."""

from __future__ import annotations

from megaboa.check.facts import Facts, Model
from megaboa.check.parameters import is_sparse, padded_vocabulary

PASSES = 3 * 2  # forward, and backward for inputs and for weights; each with a multiplication and an addition
FROZEN = 2 / 3  # share of these for products whose weights are frozen


def of_step(f: Facts) -> float:
    """Operations of a global batch, without recomputation, which doesn't advance the training."""
    return (f.training.gbs or 0) * (of_frozen(f, of_sequence(f)) if f.is_frozen else of_sequence(f))


def of_frozen(f: Facts, sequence: float) -> float:
    """Operations of a sequence if only adapters are trained: no gradients of weights. Attention's scores have no
    weights, and the adapters' own operations are negligible."""
    length, model = f.training.seq_length or 0, f.model
    heads = model.heads or 0
    width = ((model.qk_head_dim or 0) + (model.qk_position_dim or 0) + (model.v_head_dim or 0)) / 2
    scores = PASSES * length * (model.layers or 0) * length * heads * (width if model.latent else model.head_dim or 0)
    return FROZEN * (sequence - scores) + scores


def of_sequence(f: Facts) -> float:
    model, length = f.model, f.training.seq_length or 0
    hidden, layers = model.hidden or 0, range(model.layers or 0)
    extra = [len(layers) - 1] * model.mtp_layers  # like the last layer
    inner = sum(of_layer(f, layer) for layer in (*layers, *extra))
    joined = model.mtp_layers * (3 * hidden + 2 * hidden * hidden)
    return PASSES * length * (inner + joined + hidden * padded_vocabulary(f) * (1 + model.mtp_layers))


def of_layer(f: Facts, layer: int) -> float:
    """Forward operations of one token, with a multiplication and an addition counted as one."""
    return _feed_forward(f.model, layer) + _attention(f.model, f.training.seq_length or 0)


def _feed_forward(model: Model, layer: int) -> float:
    matrices, hidden = 3 if model.gated else 2, model.hidden or 0
    if not is_sparse(model, layer):
        return hidden * matrices * (model.ffn or 0)
    return hidden * matrices * ((model.moe_ffn or 0) * (model.topk or 1) + (model.shared_ffn or 0))


def _attention(model: Model, length: int) -> float:
    """Operations per token. Half of the scores are in the future, and not counted."""
    hidden, heads = model.hidden or 0, model.heads or 0
    if not model.latent:
        query = (model.head_dim or 0) * heads
        keys = (model.head_dim or 0) * (model.kv_groups or heads)
        return hidden * (2 * query + 2 * keys) + query * length
    width = (model.qk_head_dim or 0) + (model.qk_position_dim or 0)
    rank, kv_rank, value = model.q_rank, model.kv_rank or 0, model.v_head_dim or 0
    query = rank * (hidden + heads * width + 1) if rank else hidden * heads * width
    keys = kv_rank * (hidden + heads * ((model.qk_head_dim or 0) + value) + 1) + hidden * (model.qk_position_dim or 0)
    return query + keys + heads * value * hidden + length * heads * (width + value) / 2
