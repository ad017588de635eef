"""The number of parameters on a rank of a stage, divided as by Megatron.

Biases and norms are counted, rounding is not.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megaboa.check.facts import Facts, Model
from megaboa.check.stages import Stage


@dataclass(frozen=True)
class Parameters:
    """Parameters shared by all data parallel ranks (`dense`), and those of experts (`expert`). `layer`: the largest
    layer with all its parts, of which `layer_experts` are its experts'; `outside`: parameters that belong to no layer,
    of which `tables` are the embedding's and the output layer's.
    """

    dense: float
    expert: float
    layer: float = 0.0
    layer_experts: float = 0.0
    outside: float = 0.0
    tables: float = 0.0

    @property
    def total(self) -> float:
        return self.dense + self.expert

    @property
    def matrices(self) -> float:
        """Those that Muon updates, and not Adam (megatron-core, emerging_optimizers.py): all but the tables. Norms and
        biases are counted too, a thousandth or less."""
        return self.total - self.tables

    def without_experts(self) -> Parameters:
        return replace(self, expert=0.0, layer=self.layer - self.layer_experts, layer_experts=0.0)


def of_stage(f: Facts, stage: Stage) -> Parameters:
    """On one rank of a stage."""
    model, layout = f.model, f.layout
    dense = expert = 0.0
    largest = (0.0, 0.0)
    own_layers = stage.layers + tuple([last_layer(model)] * stage.mtp)
    sparse = sum(is_sparse(model, layer) for layer in own_layers) if model.is_sparse else 0
    for has_experts, number in ((True, sparse), (False, len(own_layers) - sparse)):
        if number:
            shared, own = _layer(f, has_experts)
            dense, expert = dense + number * shared, expert + number * own
            largest = max(largest, (shared + own, own))
    layers = dense + expert
    hidden = model.hidden or 0
    rows = vocabulary_rows(f) * hidden / layout.tp
    ties = bool(model.tied) and not (stage.embedding and stage.loss)
    embeds = stage.embedding or stage.mtp > 0  # heads for multi-token prediction embed on their own stage
    tables = rows * (embeds + (stage.loss and (not model.tied or ties)))
    dense += tables
    if embeds and model.learned_positions:
        dense += (f.training.seq_length or 0) * hidden
    if stage.loss:
        dense += _norm(model)
    dense += stage.mtp * (2 * hidden * hidden / layout.tp + 3 * _norm(model))
    return Parameters(dense, expert, *largest, outside=dense + expert - layers, tables=tables)


def vocabulary_rows(f: Facts) -> int:
    if f.model.vocab_rows is not None:
        return f.model.vocab_rows
    return padded_vocabulary(f)


def padded_vocabulary(f: Facts) -> int:
    """Vocabulary size with Bridge's padding, which its count of operations uses even if the model isn't padded."""
    unit = f.model.vocab_multiple * f.layout.tp
    return -(-(f.model.vocab_size or f.model.tokenizer_vocab or 0) // unit) * unit


def whole(f: Facts) -> Parameters:
    """Parameters of the whole model, each counted once."""
    alone = Facts(model=f.model, training=f.training)
    layers = tuple(range(f.model.layers or 0))
    return of_stage(alone, Stage(0, (layers,), embedding=True, loss=True, mtp=f.model.mtp_layers))


def of_model(f: Facts) -> float:
    return whole(f).total


def is_sparse(model: Model, layer: int) -> bool:
    return model.is_sparse and (model.moe_layers is None or model.moe_layers[layer])


def last_layer(model: Model) -> int:
    """Layers for multi-token prediction are modelled on this one."""
    return (model.layers or 1) - 1


def _layer(f: Facts, has_experts: bool) -> tuple[float, float]:
    """Parameters of a layer on this rank: shared ones, and its experts'."""
    model, layout = f.model, f.layout
    hidden, matrices = model.hidden or 0, 3 if model.gated else 2
    shared = 2 * _norm(model) + _attention(f)
    if not has_experts:
        ffn = model.ffn or 0
        bias = (ffn * (matrices - 1) / layout.tp + hidden) if model.bias else 0
        return shared + matrices * hidden * ffn / layout.tp + bias, 0.0
    experts, width = model.experts or 0, model.moe_ffn or 0
    shared += hidden * experts + matrices * hidden * (model.shared_ffn or 0) / layout.tp
    return shared, experts / layout.ep * matrices * hidden * width / layout.expert_tp


def _attention(f: Facts) -> float:
    model, tp = f.model, f.layout.tp
    hidden, heads = model.hidden or 0, model.heads or 0
    if not model.latent:
        head, groups = model.head_dim or 0, max(model.kv_groups or heads, tp)
        cut = hidden * (heads + 2 * groups) * head + heads * head * hidden
        bias = (heads + 2 * groups) * head / tp * (model.bias or model.qkv_bias) + hidden * model.bias
        norms = 2 * head * _norm_weights(model) if model.qk_norm else 0  # one for all heads, so they aren't divided
        return cut / tp + bias + norms
    no_position, position, value = model.qk_head_dim or 0, model.qk_position_dim or 0, model.v_head_dim or 0
    rank, kv_rank = model.q_rank or 0, model.kv_rank or 0
    query = heads * (no_position + position)
    up = (rank or hidden) * query + kv_rank * heads * (no_position + value) + heads * value * hidden
    down = (hidden * rank + rank if rank else 0) + hidden * (kv_rank + position) + kv_rank
    return up / tp + down  # compressed projections aren't divided


def _norm(model: Model) -> float:
    return (model.hidden or 0) * _norm_weights(model)


def _norm_weights(model: Model) -> int:
    """Per value that is normed."""
    return 2 if model.norm_bias else 1
