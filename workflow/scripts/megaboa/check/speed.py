"""Predicted time of a step in a layout, for preflight, costs, `advise`, the report and the doctor.

Each kernel of a micro-batch (`work`) is timed by a law of the GPU's calibration. A layer takes as long as its kernels,
or as the host needs to launch them, whichever is longer. Waiting is added: collectives that nothing hides, the
pipeline, the reduction of gradients, the optimizer. docs/explanation/speed.md explains it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import NamedTuple

from megaboa.check import adapters, calibration, parameters, work
from megaboa.check.facts import Facts
from megaboa.check.parameters import is_sparse
from megaboa.check.stages import Stage, stages
from megaboa.check.work import Message, Part, Product
from megaboa.errors import InputError
from megaboa.records import Calibration, Law, Link

FP32 = "fp32"
BYTES_OF_PASS = 1.59  # time per byte of norms, activations and losses, relative to a sum of tensors
SCORE_PASSES = 1.2  # additional factor of the same kind, for scores that aren't fused
UPDATED = 50  # bytes per parameter that a rank updates: the gradients' norm, and reading and writing Adam's states
# Of Muon (megatron-core, emerging_optimizers.py, and the package emerging-optimizers), as its code has them:
MUON_BYTES = 76  # bytes more than Adam's for each value of a matrix: momentum, norm, casts, copies, scales
MUON_KERNELS = 36  # for each matrix, with Python between them, so that many small matrices wait for the host
CAST = 6  # bytes per bf16 weight that is cast once a step: read twice, and written by rows and by columns
CAST_BY_ROW = 14e9  # weights per second: megatron-core casts those kept in FP8 as single rows (docs/benchmarks/h200.md)
ROUTING = 60  # launches of an unmeasured layer of experts: routing, sorting and exchanging, forward and backward
REPLAYED = 0.3  # share of the host's time for a layer's part that remains with a graph
ROUTED = 0.15  # share of the host's time for the half with experts that is spent on the router and the sorting after it
HOST_SHARE = 0.05  # of a step: with a larger share of the host, the prediction is uncertain
WAITS = 2.7  # exponent of the soft maximum of host and GPU; at infinity it would be the maximum
FIRST_PIECE = 0.1  # share of gradients or weights that can't be hidden behind calculation
TAKEN = 0.12  # share of a GPU's processors that NCCL takes: 16 of an H200's 132
OVERLAPPED_LATENCIES = 0.2  # share of hidden communication that shows nevertheless
SHOWN_AS = {"tp": "tensor", "etp": "tensor", "cp": "context", "ep": "expert", "flex": "expert"}  # part, by axis


@dataclass(frozen=True)
class Step:
    """Seconds of a step by what they are spent on. `host`: the GPU waits for launches; `bubble`: it waits for other
    stages; tensor, context, expert, pipeline and data: it waits for data from other ranks."""

    products: float = 0.0
    attention: float = 0.0
    memory: float = 0.0
    tensor: float = 0.0
    context: float = 0.0
    expert: float = 0.0
    host: float = 0.0
    pipeline: float = 0.0
    bubble: float = 0.0
    data: float = 0.0
    optimizer: float = 0.0

    @property
    def seconds(self) -> float:
        return sum(vars(self).values())

    def shares(self, least: float = 0.01) -> str:
        """Text such as `products 57%, attention 10%`: the parts with at least this share, in the model's order."""
        whole = self.seconds or 1.0
        return ", ".join(f"{name} {part / whole:.0%}" for name, part in vars(self).items() if part / whole >= least)

    def __add__(self, other: Step) -> Step:
        return Step(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))

    def __mul__(self, times: float) -> Step:
        return Step(*(times * part for part in vars(self).values()))


NOTHING = Step()


def is_known(f: Facts, given: Calibration | None = None) -> bool:
    """Whether there is a calibration for the GPU, and of the run's precision.

    GPUs calculate fp32 by other kernels, of which no calibration has a law: Transformer Engine's products in TF32 (half
    of bf16's peak), unless NVIDIA_TF32_OVERRIDE is 0; torch's, as of the output layer and of its unfused attention,
    without tensor cores (a fifteenth); and all that is moved has twice the bytes.
    """
    known = given or calibration.of(f.cluster.gpu)
    return known is not None and (f.training.precision != FP32 or FP32 in known.products)


def of_step(f: Facts, given: Calibration | None = None) -> Step:
    """The predicted step, by the calibration of the run's GPU, unless another one is given."""
    known = given or calibration.of(f.cluster.gpu)
    if known is None:
        raise ValueError(f"resources.gpu: there is no calibration of a {f.cluster.gpu}")
    if not is_known(f, known):
        raise InputError(
            f"training.precision: {FP32}: its step times on GPUs aren't known, only those of 16 bits and fewer: "
            "take bf16_mixed for a prediction"
        )
    return _Model(f, known).step()


def is_uncertain(f: Facts, step: Step) -> bool:
    """Whether launches, or an uneven spread of tokens over experts, may matter: these are predicted far worse than the
    rest."""
    return f.model.is_sparse or step.host >= HOST_SHARE * step.seconds


class Layer(NamedTuple):
    """What decides how long a layer takes: whether it has experts, whether it is recomputed as a whole, and how context
    ranks exchange."""

    sparse: bool
    again: bool
    exchange: str


class _Model:
    """The model of one run on one kind of GPU."""

    def __init__(self, f: Facts, known: Calibration) -> None:
        self.f, self.known = f, known
        self.layers: dict[Layer, tuple[Step, Step]] = {}
        self.low = calibration.low_type(f.training.precision)
        layout = f.layout
        inner = layout.tp * layout.cp
        # Axis -> number of ranks, and distance of neighbours.
        self.groups = {
            "tp": (layout.tp, 1),
            "cp": (layout.cp, layout.tp),
            "etp": (layout.expert_tp, 1),
            "ep": (layout.ep, layout.expert_tp),
            "flex": (layout.expert_tp * layout.ep, 1),
            "dp": ((layout.dp or 1) * layout.cp, layout.tp),
            "edp": (layout.expert_dp or 1, layout.expert_tp * layout.ep),
            "pp": (layout.pp, (layout.world_size or 1) // layout.pp or inner),
        }

    def step(self) -> Step:
        f = self.f
        count, chunks, every = f.microbatches or 1, f.layout.chunks, stages(f)
        alike = {self.kind(one): one for one in every}
        known = {key: self.stage(one) for key, one in alike.items()}
        times = [known[self.kind(one)] for one in every]
        slowest = max(range(len(times)), key=lambda number: sum(one.seconds for one in times[number]))
        forward, backward = times[slowest]
        both = forward + backward
        others = times[:slowest] + times[slowest + 1 :]
        bubble = sum(one.seconds + other.seconds for one, other in others) / chunks
        pipeline = self.passed(count * chunks)
        held = parameters.of_stage(f, every[slowest])
        trained = self.trained(every[slowest])
        data = self.data(trained, forward.seconds, backward.seconds, count)
        optimizer = self.optimizer(every[slowest], held, trained)
        return both * count + Step(bubble=bubble, pipeline=pipeline, data=data, optimizer=optimizer)

    def trained(self, stage: Stage) -> parameters.Parameters:
        """The stage's parameters that have gradients. The adapters' own products are negligible, and not counted."""
        if self.f.is_frozen:
            return parameters.Parameters(adapters.of_stage(self.f, stage), 0.0)
        return parameters.of_stage(self.f, stage)

    def stage(self, stage: Stage) -> tuple[Step, Step]:
        """One micro-batch through all layers of a rank, forward and backward."""
        forward = backward = NOTHING
        for layer, number in self.layers_of(stage).items():
            there, back = self.layer(layer)
            forward, backward = forward + there * number, backward + back * number
        # The host's work outside of layers is attributed to the loss, whose kernels can hide it.
        outside = (
            (work.embedding, stage.embedding + stage.mtp, 0.0),
            (work.loss, stage.loss, self.outside()),
            (work.loss, stage.loss * stage.mtp, 0.0),
        )
        for part, times, host in outside:
            if times:
                there, back = self.part(part(self.f), host)
                forward, backward = forward + there * times, backward + back * times
        gradients = self.trained(stage).total * self.added() / self.known.memory.rate
        return forward, backward + Step(memory=gradients)

    def added(self) -> int:
        """Bytes per parameter and micro-batch for adding up gradients: a 16-bit one is read, and added to the sum.
        Fused products read and write the sum instead of writing a 16-bit one."""
        kernels = self.f.kernels
        total = 4 if kernels.fp32_gradients else 2
        return 2 * total - 2 if kernels.gradient_fusion else 2 * total + 2

    def kind(self, stage: Stage) -> Hashable:
        """Key for stages that take the same time."""
        return frozenset(self.layers_of(stage).items()), stage.embedding, stage.loss

    def layers_of(self, stage: Stage) -> Counter[Layer]:
        """Numbers of layers that take the same time."""
        f, exchange = self.f, self.f.layout.exchange
        full, block = f.kernels.recompute == "full", f.kernels.recompute_method == "block"
        again = (f.kernels.recompute_layers or 1) if block else len(stage.layers)  # the first of each virtual stage
        found = Counter(
            Layer(self.sparse(layer), full and place < again, exchange(layer))
            for chunk in stage.chunks
            for place, layer in enumerate(chunk)
        )
        for number in range(stage.mtp):  # they have numbers of their own (multi_token_prediction.py)
            found[Layer(self.sparse((stage.layers or (0,))[-1]), full and not block, exchange(number))] += 1
        return found

    def sparse(self, layer: int) -> bool:
        return self.f.model.is_sparse and is_sparse(self.f.model, layer)

    def layer(self, one: Layer) -> tuple[Step, Step]:
        if one not in self.layers:
            self.layers[one] = self._layer(one)
        return self.layers[one]

    def _layer(self, one: Layer) -> tuple[Step, Step]:
        f, kernels = self.f, self.f.kernels
        half = work.experts(f) if one.sparse else work.feed_forward(f)
        host = self.host(one.sparse)  # the host runs ahead, so its time isn't tied to the half that it works for
        first, second = self.part(work.attention(f, one.exchange), host / 2), self.part(half, host / 2)
        forward, backward = first[0] + second[0], first[1] + second[1]
        if one.again:
            backward = backward + forward
        elif kernels.recompute == "selective":
            parts = {"core_attn": Step(attention=forward.attention), "moe": second[0], "mlp": second[0]}
            if not one.sparse and not f.model.latent:
                parts["layernorm"] = Step()  # part of the product after it, and not recomputed
            for name in kernels.recompute_modules or ("core_attn",):
                backward = backward + parts.get(name, Step(memory=0.2 * forward.memory))
        return forward, backward

    def host(self, sparse: bool) -> float:
        """The host's time to launch a layer's kernels, forward and backward."""
        by_type, law = self.known.layer, self.known.experts_host
        seconds = by_type.get(self.low[0] if self.low else "", next(iter(by_type.values())))
        if self.f.layout.tp > 1:
            seconds += self.known.tensor_host
        ahead = behind = seconds / 2
        if sparse:
            groups = (self.f.model.experts or 1) / self.f.layout.ep
            behind += law.seconds(0, groups=groups) if law else seconds + ROUTING * self.known.launch
        attention, half = self.graphed(sparse)
        return ahead * (1 - attention) + behind * (1 - half)

    def graphed(self, sparse: bool) -> tuple[float, float]:
        """The shares of the host's time that graphs save, for a layer's attention and its other half."""
        kernels = self.f.kernels
        if kernels.is_graphed_whole:
            return 1.0, 1.0
        if kernels.graphs == "none":
            return 0.0, 0.0
        modules, saved = kernels.graph_modules, 1 - REPLAYED
        if not modules:  # whole layers are graphed
            return saved, saved
        whole = ("moe" if sparse else "mlp") in modules
        routed = ROUTED if sparse and "moe_router" in modules else 0.0
        return saved * ("attn" in modules), saved * (1.0 if whole else routed)

    def outside(self) -> float:
        """The host's time outside a micro-batch's layers, which only a graph of the whole iteration saves."""
        return 0.0 if self.f.kernels.is_graphed_whole else self.known.micro_batch

    def part(self, one: Part, host: float) -> tuple[Step, Step]:
        """A part forward and backward; backward has two products for each forward one, or one if weights are frozen."""
        products = sum(map(self.product, one.products))
        ahead, behind = self.attention(one)
        forward = Step(products=products, attention=ahead, memory=self.passes(one.forward_bytes, one.forward_kernels))
        again = products if self.f.is_frozen else 2 * products
        backward = Step(products=again, attention=behind, memory=self.passes(one.backward_bytes, one.backward_kernels))
        forward = self.with_messages(forward, one.forward_messages)
        backward = self.with_messages(backward, one.backward_messages)
        return _with_host(forward, host / 3), _with_host(backward, host * 2 / 3)

    def product(self, one: Product) -> float:
        """Seconds of a product. Experts' products together take at least as long as one product of their total size:
        their laws, measured with small experts, promise more for large ones."""
        single = self.product_by(self.known.products, one)
        grouped = one.groups > 1 and self.known.grouped
        return max(single, self.product_by(grouped, one)) if grouped else single

    def product_by(self, laws: dict[str, Law], one: Product) -> float:
        plain = next(iter(laws.values()))
        law, faster = plain, 1.0
        if self.low and one.low:
            law, faster = (laws[self.low[0]], 1.0) if self.low[0] in laws else (plain, self.low[1])
        return law.seconds(one.operations / faster, one.values, one.groups)

    def passes(self, count: float, kernels: int = 0) -> float:
        return count * BYTES_OF_PASS / self.known.memory.rate + kernels * self.known.memory.latency

    def attention(self, one: Part) -> tuple[float, float]:
        if one.scores is None:
            return 0.0, 0.0
        scores, f = one.scores, self.f
        if f.kernels.attention == "unfused":
            return self.plain_attention(one)
        operations = 2 * scores.count * scores.channels
        laws = (f.has_fp8_attention and self.known.attention_fp8) or self.known.attention
        forward, backward = (
            law.seconds(times * operations, scores.count, 1 + scores.rows / 1000) + (scores.pieces - 1) * law.latency
            for law, times in ((laws["forward"], 1.0), (laws["backward"], 2.5))
        )
        return forward, backward

    def plain_attention(self, one: Part) -> tuple[float, float]:
        """Attention without fusion: two products over all scores, and passes over memory for scale, mask, softmax and
        dropout."""
        scores = one.scores
        assert scores is not None
        law, dropped = next(iter(self.known.products.values())), 5 if self.f.kernels.attention_dropout else 0
        products = law.seconds(2 * 2 * scores.count * scores.channels, 2 * 2 * scores.count) + law.latency
        return (
            products + self.passes(SCORE_PASSES * 2 * scores.count * (4 + dropped)),
            2 * products + self.passes(SCORE_PASSES * 2 * scores.count * (6 + dropped)),
        )

    # --- waiting for others ---

    def with_messages(self, step: Step, messages: tuple[Message, ...]) -> Step:
        """A step with the times of its messages, as far as they aren't hidden."""
        shown = dict.fromkeys(("tensor", "context", "expert"), 0.0)
        behind = {"products": step.products, "attention": step.attention}
        for one in messages:
            seconds = self.message(one.axis, one.kind, one.bytes, one.leaving)
            if one.hidden:
                covered = min(seconds * (1 - OVERLAPPED_LATENCIES), behind[one.hidden] / 2)
                behind[one.hidden] -= covered
                seconds -= covered
            elif SHOWN_AS[one.axis] == "expert" and self.f.kernels.expert_overlap:
                seconds *= 0.3
            shown[SHOWN_AS[one.axis]] += seconds
        return step + Step(**shown)

    def message(self, axis: str, kind: str, size: float, leaving: float | None = None) -> float:
        """Seconds of a collective over the ranks of an axis."""
        ranks, stride = self.groups[axis]
        if ranks == 1:
            return 0.0
        law, among = self.link(kind, ranks, stride)
        if leaving is not None:
            inside, outside = self.known.node.all_to_all, self.outer(kind)
            return law.latency + max(size * (ranks - 1) / ranks / inside.rate, leaving / outside.rate)
        share = {"all_reduce": 2 * (ranks - 1) / ranks, "send": 1.0}.get(kind, (ranks - 1) / ranks)
        steps = 1.0 if kind == "send" else (1 + math.log2(ranks)) / (1 + math.log2(among))
        return law.latency * steps + share * size / law.rate

    def link(self, kind: str, ranks: int, stride: int) -> tuple[Law, int]:
        """The law between such ranks, and the number of ranks that it was measured with. Between nodes, ranks on the
        same node share their GPUs' network."""
        node: Link = self.known.node
        inside = work.on_a_node(self.f, ranks, stride)
        law: Law = getattr(node, kind)
        if ranks <= inside:
            return law, node.ranks
        outer = self.outer(kind)
        alone = inside if kind not in ("all_to_all", "send") else ranks / (ranks - inside) if kind != "send" else 1
        return Law(rate=min(law.rate, outer.rate * alone), latency=law.latency + outer.latency), max(2, node.ranks)

    def outer(self, kind: str) -> Law:
        """The law of a collective between nodes."""
        return getattr(self.known.network, kind) if self.known.network else calibration.NETWORK

    def passed(self, times: float) -> float:
        """Seconds for passing data between stages, forward and backward."""
        if self.f.layout.pp == 1:
            return 0.0
        tokens = (self.f.training.seq_length or 0) * (self.f.training.mbs or 1) / self.f.layout.cp
        shared = self.f.layout.sp or self.f.kernels.scattered_stages
        size = 2 * tokens * (self.f.model.hidden or 0) / (self.f.layout.tp if shared else 1)
        shown = 1.0 if self.f.layout.chunks == 1 else 0.5  # interleaved stages calculate in the meantime
        return 2 * times * self.message("pp", "send", size) * shown

    def data(self, held: parameters.Parameters, forward: float, backward: float, count: int) -> float:
        """Seconds for reducing gradients and gathering updated weights.

        With overlap, these are hidden behind the last micro-batch's backward pass and the first one's forward pass.
        FSDP reduces sharded gradients in every micro-batch, and gathers sharded weights in each of its passes.
        """
        f, kernels, layout = self.f, self.f.kernels, self.f.layout
        half = f.training.precision == "fp16_mixed" or not kernels.fp32_gradients or layout.fsdp == "megatron"
        sharding = layout.sharding
        scatter = gather = 0.0
        for axis, parameter_count in (("dp", held.dense), ("edp", held.expert)):
            gradients, weights = parameter_count * (2 if half else 4), parameter_count * 2
            scatter += self.message(axis, "all_reduce" if sharding == "no_shard" else "reduce_scatter", gradients)
            if f.divides_optimizer:
                gather += self.message(axis, "all_gather", weights)
        if sharding == "optim_grads_params":
            return count * (_behind(gather, forward) + _behind(gather + scatter, backward))
        if sharding == "optim_grads":  # which is always overlapped
            scatter = count * _behind(scatter, backward)
        elif kernels.grad_overlap is not False:
            scatter = _behind(scatter, backward)
        return scatter + (gather if kernels.gather_overlap is False else _behind(gather, forward))

    def optimizer(self, stage: Stage, held: parameters.Parameters, trained: parameters.Parameters) -> float:
        layout, divided = self.f.layout, self.f.divides_optimizer
        dense = (layout.dp or 1) * layout.cp if divided else 1
        expert = (layout.expert_dp or 1) if divided else 1
        own = trained.dense / dense + trained.expert / expert
        seconds = own * UPDATED / self.known.memory.rate
        if self.f.training.is_muon and not self.f.is_frozen:
            seconds += self.orthogonalization(stage, trained) * own / trained.total
        if self.low is None:
            return seconds
        if self.low[0] == "fp8_current" and self.f.training.fp8_weights:
            return seconds + own / CAST_BY_ROW
        return seconds + held.total * CAST / self.known.memory.rate

    def orthogonalization(self, stage: Stage, trained: parameters.Parameters) -> float:
        """Seconds that Muon takes longer than Adam: each tensor rank on its blocks of matrices (Bridge's default,
        muon_tp_mode: blockwise) or on whole ones (duplicated), of which gathering and casts of whole matrices are left
        out, as are the messages of `distributed`."""
        matrices: Counter[Product] = Counter()
        f = _unsplit(self.f) if self.f.training.muon_tp_mode == "duplicated" else self.f
        for layer, number in self.layers_of(stage).items():
            for one in work.orthogonalized(f, layer.sparse):
                matrices[one] += number * round(one.groups)
        products = sum(number * sum(map(self.product, one.iteration)) for one, number in matrices.items())
        passes = trained.matrices * MUON_BYTES / self.known.memory.rate
        gpu = Step(optimizer=work.ITERATIONS * products + passes)
        return _with_host(gpu, matrices.total() * MUON_KERNELS * self.known.launch).seconds


def _unsplit(f: Facts) -> Facts:
    return replace(f, layout=replace(f.layout, tp=1, etp=1))


def _with_host(step: Step, host: float) -> Step:
    """The step with waiting for the host: the longer of the two, and more if they are about equal, as each sometimes
    waits."""
    if not host:
        return step
    return step + Step(host=(step.seconds**WAITS + host**WAITS) ** (1 / WAITS) - step.seconds)


def _behind(message: float, calculation: float) -> float:
    """The visible time of a message sent in pieces behind calculation: at least the first or last piece, and what the
    calculation takes longer on the processors that are left."""
    return max(FIRST_PIECE * message, message - calculation) + TAKEN * min(message, calculation)
