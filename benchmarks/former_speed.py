"""The model of speed until November 2026, kept to be compared with: benchmarks/predictions.py.

Calculation at a share of the GPU's peak that falls with the size of the matrix products, plus communication at the
bandwidth of NVLink inside a node and of the network beyond, plus the pipeline's bubble. Of communication that Megatron
hides behind calculation a part is counted. One number was taken from a measurement: BEST, from GPT2-large on one H200.
"""

from __future__ import annotations

from dataclasses import dataclass

from megaboa import peaks
from megaboa.check import flops, parameters
from megaboa.check.facts import Facts
from megaboa.check.parameters import is_sparse
from megaboa.check.stages import stages

BEST = 0.385  # share of the peak in a layer of large matrix products, attention and norms included
HALF_TOKENS, HALF_WIDTH = 512, 256  # sizes that reach half of it
NVLINK, NETWORK = 300e9, 40e9  # bytes per second and GPU of collectives
HIDDEN = {"tensor": 0.0, "context": 0.5, "data": 0.7, "pipeline": 0.5, "expert": 0.0}  # shares hidden by computation
RECOMPUTED = {"full": 4 / 3, "selective": 1.1}


@dataclass(frozen=True)
class Step:
    """Seconds by purpose; `bubble` is the time waiting for other stages."""

    calculation: float
    tensor: float
    context: float
    expert: float
    pipeline: float
    data: float
    bubble: float

    @property
    def seconds(self) -> float:
        return sum(vars(self).values())


def of_step(f: Facts) -> Step:
    count = f.microbatches or 1
    calculation = _calculation(f)
    layers = _layers_per_rank(f)
    tensor = count * layers * _tensor_bytes(f) / _bandwidth(f, f.layout.tp)
    context = count * layers * _context_bytes(f) / _bandwidth(f, f.layout.tp * f.layout.cp)
    expert = count * layers * _expert_bytes(f) / _bandwidth(f, f.layout.expert_tp * f.layout.ep)
    inside = [calculation, tensor * _shown("tensor"), context * _shown("context"), expert * _shown("expert")]
    bubble = sum(inside) * (f.layout.pp - 1) / (count * f.layout.chunks)
    pipeline = count * f.layout.chunks * _passed_bytes(f) / _bandwidth(f, f.layout.model_ranks) * _shown("pipeline")
    return Step(*inside, pipeline, _data(f) * _shown("data"), bubble)


def _calculation(f: Facts) -> float:
    peak = peaks.operations(f.cluster.gpu)
    if peak is None:
        raise ValueError(f"resources.gpu: the peak of a {f.cluster.gpu} is unknown")
    tokens = (f.training.seq_length or 0) * (f.training.mbs or 1) / f.layout.cp
    width = (f.model.ffn or f.model.moe_ffn or 4 * (f.model.hidden or 0)) / f.layout.tp
    share = BEST * tokens / (tokens + HALF_TOKENS) * width / (width + HALF_WIDTH)
    again = RECOMPUTED.get(f.kernels.recompute or "", 1.0)
    return again * flops.of_step(f) / ((f.layout.world_size or 1) * peak * share)


def _layers_per_rank(f: Facts) -> float:
    return max(len(stage.layers) for stage in stages(f))


def _tokens_bytes(f: Facts) -> float:
    """A micro-batch's hidden states on one context rank."""
    return (f.training.seq_length or 0) * (f.training.mbs or 1) / f.layout.cp * (f.model.hidden or 0) * 2


def _tensor_bytes(f: Facts) -> float:
    """Bytes per layer, forward and backward: four all-reduces, or as many pairs of all-gather and reduce-scatter."""
    tp = f.layout.tp
    return 0.0 if tp == 1 else 8 * _tokens_bytes(f) * (tp - 1) / tp


def _context_bytes(f: Facts) -> float:
    """Bytes per layer: keys and values in the ring, and their gradients."""
    cp, model = f.layout.cp, f.model
    share = 2 * (model.kv_groups or model.heads or 1) * (model.head_dim or 0) / max(model.hidden or 1, 1) / f.layout.tp
    return 3 * _tokens_bytes(f) * share * (cp - 1)


def _expert_bytes(f: Facts) -> float:
    """Bytes per layer: tokens to experts and back, forward and backward."""
    ep = f.layout.ep
    if not f.model.is_sparse or ep == 1:
        return 0.0
    sparse = sum(is_sparse(f.model, layer) for layer in range(f.model.layers or 0)) / (f.model.layers or 1)
    sent = _tokens_bytes(f) * (f.model.topk or 1) / (f.layout.tp if f.layout.sp else 1)
    return 4 * sparse * sent * (ep - 1) / ep


def _passed_bytes(f: Facts) -> float:
    """Bytes between stages, forward and backward."""
    return 0.0 if f.layout.pp == 1 else 2 * _tokens_bytes(f) / (f.layout.tp if f.layout.sp else 1)


def _data(f: Facts) -> float:
    """Seconds to reduce gradients (in fp32) and gather weights (in 16 bits)."""
    copies = (f.layout.dp or 1) * f.layout.cp
    if copies == 1:
        return 0.0
    held = parameters.of_stage(f, stages(f)[0]).total
    return held * (4 + 2) * (copies - 1) / copies / _bandwidth(f, f.layout.world_size or 1)


def _bandwidth(f: Facts, ranks: int) -> float:
    return NVLINK if ranks <= f.cluster.gpus_per_node else NETWORK


def _shown(kind: str) -> float:
    return 1 - HIDDEN[kind]
