"""The work of one rank for one micro-batch, by parts of the model: matrix products, attention, passes over memory, and
messages.

It doesn't depend on a GPU's speed; `speed` takes times from a calibration. Numbers of bytes follow what megatron-core's
and Transformer Engine's kernels read and write, in 16 bits unless a comment says otherwise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from megaboa.check.facts import Facts
from megaboa.check.parameters import vocabulary_rows

WIDTH = 2  # bytes of a value between kernels
ITERATIONS = 5  # of Muon (muon_num_ns_steps)
UNEVEN = 0.088  # more tokens than the average, on the rank with the most, for each doubling of expert parallel ranks
UNEVEN_AT_PEAK = 0.051  # still more at the peak of memory: for two ranks the mean of this and another model is 13.9%
# Bytes per logit, forward and backward. Bridge's fused loss works in fp32, Transformer Engine's and ours in place.
LOSS_PASSES = {"native": 36, "te": 12, "ours": 8, "unfused": 60}


@dataclass(frozen=True)
class Product:
    """A matrix product of rows by columns, over `depth`; `groups`: number of experts in it.

    With FP8, the output layer and the router remain in 16 bits.
    """

    rows: float
    columns: float
    depth: float
    groups: float = 1
    low: bool = True  # whether it is in FP8, if the training is

    @property
    def operations(self) -> float:
        return 2.0 * self.rows * self.columns * self.depth

    @property
    def values(self) -> float:
        return self.rows * (self.columns + self.depth) + self.groups * self.columns * self.depth

    @property
    def iteration(self) -> tuple[Product, Product, Product]:
        """The products of a Newton-Schulz iteration of Muon's on this product's weight (emerging-optimizers,
        muon_utils.py): on its shorter side its square, that one's square, and the product with the weight."""
        short, long = sorted((self.columns, self.depth))
        sizes = ((short, short, long), (short, short, short), (short, long, short))
        one, two, three = (Product(*each, low=False) for each in sizes)
        return one, two, three


@dataclass(frozen=True)
class Scores:
    """Attention: number of calculated scores (half of all, as the rest is in the future), and channels of keys plus
    values.

    If attention isn't fused, all scores are calculated, and go through memory.
    """

    count: float
    channels: float
    rows: float  # queries of all heads
    pieces: int = 1  # rounds in which keys and values come from other context parallel ranks


@dataclass(frozen=True)
class Message:
    """A collective. `axis`: tp, cp, ep, etp, or flex for ep and etp together. `bytes`: size of the whole tensor on a
    rank. `hidden`: the work that can hide it: none, attention or products."""

    axis: str
    kind: str  # the collective's name in a calibration's Link
    bytes: float
    hidden: str = ""
    leaving: float | None = None  # bytes that leave the node, if fewer do than by the number of ranks outside


@dataclass(frozen=True)
class Part:
    """The work of a part of a layer, or of the model's ends. Backward has two products for each; attention has its own
    law."""

    products: tuple[Product, ...] = ()
    scores: Scores | None = None
    forward_bytes: float = 0.0
    backward_bytes: float = 0.0
    forward_kernels: int = 0  # that pass over memory, each of which has a latency
    backward_kernels: int = 0
    forward_messages: tuple[Message, ...] = ()
    backward_messages: tuple[Message, ...] = ()


def attention(f: Facts, exchange: str | None = None) -> Part:
    """Norm, queries, keys and values, attention, its projection, residual. `exchange`: how context ranks do in this
    layer; default: in the first."""
    exchange = exchange or f.layout.exchange(0)
    model, tp, tokens = f.model, f.layout.tp, _tokens(f)
    hidden, heads = model.hidden or 0, model.heads or 0
    products = _latent(f) if model.latent else _grouped_queries(f)
    channels = _channels(f)
    length = f.training.seq_length or 0
    rows = tokens * heads / tp
    scores = Scores(rows * length / 2, sum(channels), rows, f.layout.cp)
    inner = tokens * heads / tp * sum(channels)  # approximate size of queries, keys and values together
    turns = 0 if model.learned_positions else 2  # of queries and of keys
    turned = turns * 2 * WIDTH * inner
    forward, backward = _row_passes(f, hidden)
    summed = WIDTH * tokens * hidden if model.bias else 0.0
    messages, back = _tensor_messages(f), _tensor_messages(f, backward=True)
    context, context_back = _context_messages(f, channels, exchange)
    merged, merged_back = _merged_rounds(f, channels, exchange)
    return Part(
        products,
        scores,
        forward + turned + merged,
        backward + turned + 2 * WIDTH * inner + summed + merged_back,
        forward_kernels=2 + turns,  # norm, residual
        backward_kernels=4 + turns + model.bias,  # two for the norm, residual, joined gradients; sums
        forward_messages=messages + context,
        backward_messages=back + context_back,
    )


def _channels(f: Facts) -> tuple[float, float]:
    """Channels of a head: those of queries and keys, and those of values."""
    model = f.model
    if not model.latent:
        return model.head_dim or 0, model.head_dim or 0
    return (model.qk_head_dim or 0) + (model.qk_position_dim or 0), model.v_head_dim or 0


def _grouped_queries(f: Facts) -> tuple[Product, ...]:
    model, tp, tokens = f.model, f.layout.tp, _tokens(f)
    hidden, heads, head = model.hidden or 0, model.heads or 0, model.head_dim or 0
    groups = max(model.kv_groups or heads, tp)
    return (
        Product(tokens, (heads + 2 * groups) * head / tp, hidden),
        Product(tokens, hidden, heads * head / tp),
    )


def _latent(f: Facts) -> tuple[Product, ...]:
    """Products of latent attention.

    Every tensor rank does the compression: of all tokens or, under sequence parallelism, of its share of them.
    """
    model, tp, tokens = f.model, f.layout.tp, _tokens(f)
    hidden, heads = model.hidden or 0, model.heads or 0
    (query, value), rank, kv_rank = _channels(f), model.q_rank, model.kv_rank or 0
    own = tokens / _shared(f)
    down = (Product(own, rank, hidden),) if rank else ()
    return (
        *down,
        Product(own, kv_rank + (model.qk_position_dim or 0), hidden),
        Product(tokens, heads * query / tp, rank or hidden),
        Product(tokens, heads * ((model.qk_head_dim or 0) + value) / tp, kv_rank),
        Product(tokens, hidden, heads * value / tp),
    )


def orthogonalized(f: Facts, sparse: bool) -> tuple[Product, ...]:
    """Products with the matrices that Muon makes orthogonal in a layer. Queries, keys and values are one each
    (muon_split_qkv), except in latent attention."""
    first, *rest = attention(f).products
    parts: tuple[Product, ...] = (first,)
    if not f.model.latent:
        model, head, tp = f.model, f.model.head_dim or 0, f.layout.tp
        heads, groups = (model.heads or 0) / tp, max(model.kv_groups or model.heads or 0, tp) / tp
        parts = tuple(replace(first, columns=count * head) for count in (heads, groups, groups))
    half = experts(f) if sparse else feed_forward(f)
    return (*parts, *rest, *half.products)


def feed_forward(f: Facts) -> Part:
    """Norm, the dense layers, residual."""
    forward, backward = _row_passes(f, f.model.hidden or 0)
    products, there, back = _dense(f, f.model.ffn or 0, casts_at_once(f))
    return Part(
        products,
        None,
        forward + there,
        backward + back,
        forward_kernels=3,  # norm, activation, residual
        backward_kernels=4 + 2 * f.model.bias,  # two for the norm
        forward_messages=_tensor_messages(f),
        backward_messages=_tensor_messages(f, backward=True),
    )


def unevenness(f: Facts, more: float = 0.0) -> float:
    """Tokens of the rank whose experts get the most, relative to the average of ranks.

    A snapshot of two ranks had 8.8% more than with even routing; for each further doubling we assume as much again
    (docs/explanation/memory.md).
    """
    if f.kernels.forced_balance or f.layout.ep == 1:
        return 1.0
    share = 1 + UNEVEN * math.log2(f.layout.ep) + more
    return min(share, f.kernels.expert_capacity or share)


def unevenness_at_peak(f: Facts) -> float:
    """The same in the step and layer that need the most memory."""
    return unevenness(f, UNEVEN_AT_PEAK)


def experts(f: Facts) -> Part:
    """Norm, router, tokens to experts and back, the shared expert, residual; of the rank whose experts get the most
    tokens, as all others wait for it."""
    model, layout = f.model, f.layout
    hidden, count, ffn = model.hidden or 0, model.experts or 1, model.moe_ffn or 0
    own = _tokens(f) / _shared(f)
    sent = own * (model.topk or 1) * unevenness(f)
    rows, groups = sent * layout.expert_tp, count / layout.ep
    gates = 2 if model.gated else 1
    routed = (
        Product(own, count, hidden, low=False),
        Product(rows, gates * ffn / layout.expert_tp, hidden, groups),
        Product(rows, hidden, ffn / layout.expert_tp, groups),
    )
    shared, there, back = _dense(f, model.shared_ffn or 0) if model.shared_ffn else ((), 0.0, 0.0)
    forward, backward = _row_passes(f, hidden)
    activation_forward, activation_backward = activation(f, rows * ffn / layout.expert_tp, weighted=True)
    scores = 10 * 4 * own * count  # in fp32: scores, probabilities, the balancing loss
    # Sorted by expert, put back, weighted; if experts are spread, by all_to_all, also sorted on the receiving rank.
    flex = f.kernels.dispatcher == "flex"
    sorts = 2 * 2 * WIDTH * sent * hidden * (2 if layout.ep > 1 and not flex else 1)
    messages = []
    if flex and layout.ep * layout.expert_tp > 1:
        messages = [_dispatched(f, WIDTH * own * unevenness(f) * hidden)] * 2
    elif layout.ep > 1:
        messages = [Message("ep", "all_to_all", WIDTH * sent * hidden)] * 2
    if layout.expert_tp > 1 and not flex:
        whole = WIDTH * rows * hidden
        messages += [Message("etp", "all_gather", whole), Message("etp", "reduce_scatter", whole)]
    tensor = () if layout.sp or layout.tp == 1 else _tensor_messages(f)
    return Part(
        (*routed, *shared),
        None,
        forward + there + activation_forward + sorts + scores,
        backward + back + activation_backward + sorts + scores,
        forward_kernels=3,  # those of routing and sorting aren't counted
        backward_kernels=4,
        forward_messages=(*messages, *tensor),
        backward_messages=(*messages, *tensor),
    )


def _dispatched(f: Facts, tokens: float) -> Message:
    """What DeepEP and HybridEP send: a token once to each rank with some of its experts, and between nodes once to each
    node, where NVLink takes it further. `tokens`: their bytes."""
    layout = f.layout
    ranks = layout.ep * layout.expert_tp
    nodes = ranks / on_a_node(f, ranks)
    copies = layout.expert_tp * _reached(f, layout.ep)
    return Message("flex", "all_to_all", tokens * copies, leaving=tokens * _reached(f, nodes) * (1 - 1 / nodes))


def on_a_node(f: Facts, ranks: int, stride: int = 1) -> int:
    """How many of an axis's ranks, with this distance of neighbours, are on one node."""
    return max(1, min(ranks, f.cluster.gpus_per_node // stride))


def _reached(f: Facts, groups: float) -> float:
    """The average number of groups of experts that a token's choices are in, if all experts are chosen alike."""
    experts = f.model.experts or 1
    elsewhere = experts - experts / groups
    missed = math.prod((elsewhere - taken) / (experts - taken) for taken in range(min(f.model.topk or 1, experts)))
    return groups * (1 - max(missed, 0.0))


def loss(f: Facts) -> Part:
    """Norm, the output layer, the loss."""
    tokens, hidden, columns = _tokens(f), f.model.hidden or 0, vocabulary_rows(f) / f.layout.tp
    kernel = f.kernels.loss_kernel if f.kernels.fused_loss else "unfused"
    passes = LOSS_PASSES.get(kernel, LOSS_PASSES["unfused"]) * tokens * columns
    whole = WIDTH * tokens * hidden
    messages: tuple[Message, ...] = ()
    if f.layout.tp > 1:
        messages = (Message("tp", "all_gather" if f.layout.sp else "all_reduce", whole),)
    return Part(
        (Product(tokens, columns, hidden, low=False),),
        None,
        passes / 2 + 4 * WIDTH * tokens * hidden,
        passes / 2 + 4 * WIDTH * tokens * hidden,
        forward_messages=messages if f.layout.sp else (),
        backward_messages=messages,
    )


def embedding(f: Facts) -> Part:
    tokens, hidden = _tokens(f), f.model.hidden or 0
    whole = WIDTH * tokens * hidden
    messages: tuple[Message, ...] = ()
    if f.layout.tp > 1:
        messages = (Message("tp", "reduce_scatter" if f.layout.sp else "all_reduce", whole),)
    return Part((), None, 4 * whole, 4 * whole, forward_messages=messages)


def _dense(f: Facts, ffn: float, joined: bool = False) -> tuple[tuple[Product, ...], float, float]:
    """Products of dense layers, and bytes of the activation forward and backward."""
    model, tp, tokens, hidden = f.model, f.layout.tp, _tokens(f), f.model.hidden or 0
    gates = 2 if model.gated else 1
    products = (Product(tokens, gates * ffn / tp, hidden), Product(tokens, hidden, ffn / tp))
    forward, backward = activation(f, tokens * ffn / tp, joined=joined)
    if model.bias:  # the activation and the residual add them; their gradients are sums, the first in a joined cast
        backward += WIDTH * tokens * (hidden + (0 if joined else ffn / tp))
    return products, forward, backward


def activation(f: Facts, values: float, weighted: bool = False, joined: bool = False) -> tuple[float, float]:
    """Bytes of an activation with this many outputs, forward and backward. `weighted`: experts, whose outputs are
    multiplied by the router's weights. `joined`: with the casts of its output and of its gradient.

    A fused one reads what a product wrote, two values for each output of gated ones, and writes once. Without fusion
    each operation of a gated one counts, with 1 for reading or writing all outputs.
    """
    inputs = 2 if f.model.gated else 1
    forward, backward = inputs + 1, 2 * inputs + 1
    if joined:
        forward, backward = inputs - 1, 1
    elif not f.kernels.activates_at_once and not f.model.gated:
        forward, backward = 3 * forward, 3 * backward  # assumed: three operations
    elif not f.kernels.activates_at_once:
        forward = 2 + 2 + 3  # the activation, an offset of 0 that is added, the product of both halves
        backward = 3 + 3 + 3 + 4  # gradients of both factors and of the activation, and joining the halves
        if weighted and f.kernels.router_dtype == "fp32":  # the product is in fp32, and cast
            forward, backward = forward + 3 + 3, backward + 3 + 6 + 5 + 3
        elif weighted:
            forward, backward = forward + 2, backward + 2 + 3 + 1  # the product; its gradients, and the weights' sums
    return WIDTH * values * forward, WIDTH * values * backward


def casts_at_once(f: Facts) -> bool:
    """Whether Transformer Engine's joined operations cast what an activation writes in its kernel (activation.cpp).

    With current scaling they only find the largest value in it, which isn't counted.
    """
    return f.kernels.te_operations and any(one in (f.training.precision or "") for one in ("fp8_delayed", "mxfp8"))


def _row_passes(f: Facts, hidden: float) -> tuple[float, float]:
    """Bytes of a norm and a residual addition, forward and backward, including dropout."""
    values = _tokens(f) / _shared(f) * hidden
    dropped = 3 if f.model.dropout else 0
    return values * (5 * WIDTH + dropped), values * (7 * WIDTH + dropped + (WIDTH if f.model.dropout else 0))


def _tensor_messages(f: Facts, backward: bool = False) -> tuple[Message, ...]:
    """Messages for half a layer.

    In the backward pass, those of the first product are hidden behind the gradients of weights. The input, which
    sequence parallelism keeps in pieces, is gathered once more. User buffers hide all of them.
    """
    if f.layout.tp == 1:
        return ()
    whole = WIDTH * _tokens(f) * (f.model.hidden or 0)
    if not f.layout.sp:
        return (Message("tp", "all_reduce", whole, "products" if backward else ""),)
    first = "products" if f.kernels.tp_comm_overlap else ""
    gather, scatter = Message("tp", "all_gather", whole, first), Message("tp", "reduce_scatter", whole, first)
    if not backward:
        return gather, scatter
    return gather, Message("tp", "all_gather", whole, "products"), Message("tp", "reduce_scatter", whole, "products")


def _context_messages(
    f: Facts, channels: tuple[float, float], exchange: str
) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
    """Messages of context parallelism: keys and values circulate during attention, or heads and tokens are exchanged
    around it."""
    cp = f.layout.cp
    if cp == 1:
        return (), ()
    queries, keys, outputs = _of_attention(f, channels)
    if exchange == "a2a":
        there = Message("cp", "all_to_all", keys + queries + outputs)
        return (there,), (there,)
    if exchange == "all_gather":
        return (Message("cp", "all_gather", keys * cp),), (Message("cp", "reduce_scatter", 2 * keys * cp),)
    rounds = [Message("cp", "send", keys, "attention")] * (cp - 1)
    return tuple(rounds), (*rounds, *rounds)


def _merged_rounds(f: Facts, channels: tuple[float, float], exchange: str) -> tuple[float, float]:
    """Bytes for joining keys with values and for adding up what rounds of attention give, forward and backward: all of
    the first one, and of each other all or half (Transformer Engine, context_parallel.py)."""
    others = f.layout.cp - 1
    if not others or exchange in ("a2a", "all_gather"):
        return 0.0, 0.0
    queries, keys, outputs = _of_attention(f, channels)
    added = 3 * 0.75 * others
    return 2 * keys + (2 + added) * outputs, 2 * keys + (2 + added) * (queries + keys)


def _of_attention(f: Facts, channels: tuple[float, float]) -> tuple[float, float, float]:
    """Bytes of queries, of keys and values together, and of outputs, on one rank."""
    model, tp = f.model, f.layout.tp
    heads = model.heads or 0
    groups = heads if model.latent else max(model.kv_groups or heads, tp)
    each = WIDTH * _tokens(f) / tp
    return each * heads * channels[0], each * groups * sum(channels), each * heads * channels[1]


def _tokens(f: Facts) -> float:
    """Tokens of a micro-batch on one context rank."""
    return (f.training.seq_length or 0) * (f.training.mbs or 1) / f.layout.cp


def _shared(f: Facts) -> int:
    """Number of tensor ranks that share the tokens under sequence parallelism."""
    return f.layout.tp if f.layout.sp else 1
