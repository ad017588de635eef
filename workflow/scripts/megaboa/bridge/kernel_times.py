"""Times of single kernels and collectives on this machine, measured by `megaboa calibrate`.

Needs torch, and Transformer Engine for FP8, for grouped products and for its attention. Each rank has a GPU, or the
machine's processors. Kernels are timed by events in a full queue under load, so that the host's time isn't included and
the clock is that of training; the host's is measured separately (`host_times`).
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import gelu, scaled_dot_product_attention

from megaboa.bridge import cudnn
from megaboa.check.device import FP8_HEAD
from megaboa.check.laws import fitted
from megaboa.records import Law, Link, Point

try:
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe as te_recipes
    from transformer_engine.pytorch.fp8 import FP8GlobalStateManager
except (ImportError, OSError):  # as on the CPU
    te = te_recipes = None

Work = Callable[[], Any]
RECIPES = {  # Transformer Engine's recipe and the compute capabilities that have it, by type
    "fp8_current": ("Float8CurrentScaling", (8, 9), (99, 0)),
    "fp8_delayed": ("DelayedScaling", (8, 9), (99, 0)),
    "fp8_blocks": ("Float8BlockScaling", (9, 0), (9, 9)),
    "mxfp8": ("MXFP8BlockScaling", (10, 0), (11, 9)),
}
FP8_ATTENTION = "fp8_delayed"  # the only type with which Hopper has attention in FP8; newer GPUs have it, too
MEBIBYTE = 2**20
LOAD = 2.0  # times as long as the kernels between which it runs
SETTLED = 0.1  # seconds of load before a measurement
AT_ONCE = 0.004  # seconds of kernels between loads


@dataclass(frozen=True)
class Sizes:
    """Sizes to measure: tokens, outputs and inputs of linear layers; experts, tokens of each, outputs and inputs;
    sequence, heads and channels of attention; numbers of bytes."""

    linear: tuple[tuple[int, int, int], ...]
    grouped: tuple[tuple[int, int, int, int], ...]
    attention: tuple[tuple[int, int, int], ...]
    memory: tuple[int, ...]
    messages: tuple[int, ...]


GPU = Sizes(
    linear=(
        (1024, 1024, 1024), (2048, 2048, 2048), (2048, 8192, 2048), (4096, 1536, 4096), (4096, 4096, 1024),
        (4096, 4096, 4096), (8192, 1024, 4096), (8192, 4096, 14336), (8192, 14336, 4096), (8192, 8192, 8192),
        (16384, 5120, 1280), (32768, 1280, 1280), (4096, 32768, 4096),
    ),
    grouped=((8, 256, 1536, 2048), (8, 1024, 4096, 2048), (8, 2048, 2048, 4096), (32, 256, 1536, 2048),
             (32, 512, 2048, 768), (64, 512, 1536, 2048), (16, 2048, 2816, 2048), (8, 2048, 28672, 4096),
             (8, 4096, 4096, 14336)),
    attention=((1024, 20, 64), (2048, 32, 64), (2048, 32, 128), (4096, 32, 128), (8192, 16, 128), (16384, 8, 128)),
    memory=tuple(size * MEBIBYTE for size in (4, 64, 256, 1024)),
    messages=tuple(size * MEBIBYTE // 16 for size in (1, 16, 64, 256, 1024, 4096, 8192)),
)  # fmt: skip
CPU = Sizes(
    linear=((128, 128, 128), (256, 512, 128), (512, 256, 256)),
    grouped=(),
    attention=((64, 4, 32), (128, 4, 32), (256, 4, 32)),
    memory=tuple(size * MEBIBYTE // 4 for size in (1, 8, 32)),
    messages=tuple(size * 1024 for size in (16, 256, 1024)),
)


@dataclass(frozen=True)
class Bench:
    """Timing on one rank. `seconds`: approximate duration of a measurement."""

    device: torch.device
    seconds: float = 0.08

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def sizes(self) -> Sizes:
        return GPU if self.is_gpu else CPU

    @property
    def kinds(self) -> list[str]:
        """The types of matrix products that this device supports, bf16 (fp32 on a CPU) first."""
        if not self.is_gpu or te is None:
            return ["bf16" if self.is_gpu else "fp32"]
        has = torch.cuda.get_device_capability(self.device)
        return ["bf16", *(kind for kind, (_, least, most) in RECIPES.items() if least <= has <= most)]

    @property
    def type(self) -> torch.dtype:
        return torch.bfloat16 if self.is_gpu else torch.float32

    def random(self, *shape: int, scale: float = 1.0, **options: Any) -> torch.Tensor:
        made = torch.randn(*shape, device=self.device, dtype=torch.float32) * scale
        return made.to(self.type).requires_grad_(options.get("grad", False))

    def wait(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize()

    def host(self, work: Work, times: int = 20) -> float:
        """The host's time to launch `work`, if the GPU keeps up with it."""
        for _ in range(3):
            work()
        found = []
        for _ in range(3):
            self.wait()
            start = time.perf_counter()
            for _ in range(times):
                work()
            self.wait()
            found.append((time.perf_counter() - start) / times)
        return statistics.median(found)

    def launching(self, work: Work) -> float:
        """The host's time to launch `work`, whatever the GPU does."""
        start = time.perf_counter()
        for _ in range(3):
            work()
        return (time.perf_counter() - start) / 3

    def kernels(self, work: Work) -> float:
        """The GPU's time for `work` between layers of a model, as in training: a GPU near its limit of power lowers its
        clock. The layers also keep it busy while the host launches `work`."""
        if not self.is_gpu:
            return self.host(work, times=5)
        each = self.host(work, times=3)  # the longer of the GPU's and the host's time
        given = self.launching(work)
        count = max(1, round(AT_ONCE / each))
        layer, seconds = self.layer
        layers = math.ceil(count * max(LOAD * each, 1.5 * given) / seconds)
        for _ in range(math.ceil(SETTLED / seconds)):
            layer()
        rounds = max(3, round(self.seconds / each / count))
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(rounds)]
        for start, end in events:
            for _ in range(layers):
                layer()
            start.record()
            for _ in range(count):
                work()
            end.record()
        self.wait()
        return statistics.median(start.elapsed_time(end) / 1000 / count for start, end in events)

    @functools.cached_property
    def layer(self) -> tuple[Work, float]:
        """A layer of a dense model of 8 billion parameters with 8,192 tokens, forward and backward, and its seconds."""
        width, heads, inner = (4096, 32, 14336) if self.is_gpu else (64, 4, 128)
        layer = torch.nn.TransformerEncoderLayer(
            width, heads, inner, dropout=0.0, activation=gelu, norm_first=True, batch_first=True, device=self.device,
            dtype=self.type,
        )  # fmt: skip
        x = self.random(2, width, width)
        gradient = torch.randn_like(x)

        @torch.enable_grad()
        def once() -> None:
            layer(x).backward(gradient)

        return once, self.host(once)


# --- one GPU ----------------------------------------------------------------------------------------------------------


def heat(bench: Bench, seconds: float = 2.0) -> None:
    """Warm up the GPU, because its clock drops under load."""
    size = 8192 if bench.is_gpu else 256
    a, b = bench.random(size, size), bench.random(size, size)
    end = time.monotonic() + (seconds if bench.is_gpu else 0.1)
    while time.monotonic() < end:
        for _ in range(10):
            a @ b
        bench.wait()


def products(bench: Bench, kind: str) -> Law:
    """The three products of a linear layer, forward and backward, including casts to FP8; each point is a third of
    them."""
    points = []
    for tokens, outputs, inputs in bench.sizes.linear:
        x, gradient = bench.random(tokens, inputs, grad=True), bench.random(tokens, outputs, scale=0.1)
        layer = _linear(bench, inputs, outputs, kind)
        once = _trained(layer, x, gradient, kind)
        values = tokens * inputs + tokens * outputs + inputs * outputs
        seconds = bench.kernels(once) / 3
        name = f"{tokens} x {outputs} x {inputs}"
        points.append(Point(name=name, work=2.0 * tokens * outputs * inputs, values=values, seconds=seconds))
        del x, gradient, layer, once
    return fitted(points)


def forget_scales() -> None:
    """Reset Transformer Engine's list of scales: with delayed scaling, later layers would update those of all earlier
    ones."""
    if te is not None:
        FP8GlobalStateManager.reset()


def _linear(bench: Bench, inputs: int, outputs: int, kind: str) -> Any:
    if te is None or not bench.is_gpu:
        return torch.nn.Linear(inputs, outputs, bias=False, device=bench.device, dtype=bench.type)
    return te.Linear(inputs, outputs, bias=False, params_dtype=bench.type, device="cuda")


def _trained(layer: Any, x: torch.Tensor, gradient: torch.Tensor, kind: str, *arguments: Any) -> Work:
    """Forward and backward, as in all micro-batches but a step's first, which also casts the weights."""
    parameters = [x, *layer.parameters()]
    first = True

    def once() -> None:
        nonlocal first
        options = {"is_first_microbatch": first} if te is not None and kind in RECIPES else {}
        first = False
        with precision(kind):
            out = layer(x, *arguments, **options)
        out.backward(gradient)
        for one in parameters:
            one.grad = None

    return once


def precision(kind: str) -> contextlib.AbstractContextManager[Any]:
    if kind not in RECIPES:
        return contextlib.nullcontext()
    made = _recipe(kind)
    if hasattr(te, "autocast"):
        return te.autocast(enabled=True, recipe=made)
    return te.fp8_autocast(enabled=True, fp8_recipe=made)


@functools.cache
def _recipe(kind: str) -> Any:
    """A recipe of Transformer Engine. Delayed scaling includes attention in FP8, and must not exchange maxima with
    other ranks, which measure at their own pace."""
    options = {"reduce_amax": False, "fp8_dpa": True} if kind == FP8_ATTENTION else {}
    return getattr(te_recipes, RECIPES[kind][0])(**options)


def experts(bench: Bench, kind: str) -> Law | None:
    """The products of a grouped linear layer, with the same number of tokens for every expert."""
    if te is None or not bench.sizes.grouped:
        return None
    points = []
    for groups, tokens, outputs, inputs in bench.sizes.grouped:
        x = bench.random(groups * tokens, inputs, grad=True)
        gradient = bench.random(groups * tokens, outputs, scale=0.1)
        layer = te.GroupedLinear(groups, inputs, outputs, bias=False, params_dtype=bench.type, device="cuda")
        once = _trained(layer, x, gradient, kind, [tokens] * groups)
        rows = groups * tokens
        values = rows * inputs + rows * outputs + groups * inputs * outputs
        name = f"{groups} of {tokens} x {outputs} x {inputs}"
        work = 2.0 * rows * outputs * inputs
        points.append(Point(name=name, work=work, values=values, groups=groups, seconds=bench.kernels(once) / 3))
        del x, gradient, layer, once
    return fitted(points)


def attention(bench: Bench, kind: str) -> dict[str, Law]:
    """Causal attention, which calculates half of the scores. Backward has five products where forward has two."""
    forward, backward = [], []
    sizes = [one for one in bench.sizes.attention if kind not in RECIPES or one[2] == FP8_HEAD]
    for length, heads, channels in sizes:
        batch = max(1, 16384 // length) if bench.is_gpu else 1
        shape = (
            (batch, length, heads, channels) if te is not None and bench.is_gpu else (batch, heads, length, channels)
        )
        q, k, v = (bench.random(*shape, grad=True) for _ in range(3))
        alone, both = attention_seconds(bench, core_of(bench, heads, channels, kind), q, k, v)
        rest = max(both - alone, alone)
        scores = batch * heads * length * length / 2
        name = f"{batch} x {length}, {heads} heads of {channels}"
        work, rows = 4.0 * scores * channels, 1 + round(batch * heads * length / 1000)
        forward.append(Point(name=name, work=work, values=scores, groups=rows, seconds=alone))
        backward.append(Point(name=name, work=2.5 * work, values=scores, groups=rows, seconds=rest))
    return {"forward": fitted(forward), "backward": fitted(backward)}


def attention_seconds(
    bench: Bench, core: Callable[..., torch.Tensor], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[float, float]:
    """Seconds of the forward pass alone, and of both."""
    gradient = torch.randn_like(core(q, k, v))

    def both() -> None:
        core(q, k, v).backward(gradient)
        q.grad = k.grad = v.grad = None

    with torch.no_grad():
        alone = bench.kernels(lambda: core(q, k, v))
    return alone, bench.kernels(both)


def core_of(
    bench: Bench, heads: int, channels: int, kind: str, groups: int | None = None
) -> Callable[..., torch.Tensor]:
    """Attention of queries, keys and values. `groups`: heads of keys and values; default: those of the queries."""
    if te is None or not bench.is_gpu:
        return lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=groups is not None)
    core = te.DotProductAttention(heads, channels, num_gqa_groups=groups, qkv_format="bshd", attn_mask_type="causal")

    def called(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with precision(kind):
            return core(q, k, v).view(*q.shape)

    return called


def memory(bench: Bench) -> Law:
    """Passes over memory: a sum of two tensors, and a norm and an activation, forward and backward. Work is the minimum
    number of bytes to read and write."""
    points = []
    for size in bench.sizes.memory:
        a, b = bench.random(size // bench.type.itemsize), bench.random(size // bench.type.itemsize)
        out = torch.empty_like(a)
        seconds = bench.kernels(lambda a=a, b=b, out=out: torch.add(a, b, out=out))
        points.append(Point(name=f"sum, {size / MEBIBYTE:g} MiB", work=3.0 * size, seconds=seconds))
        width = 2048 if bench.is_gpu else 128
        x = bench.random(size // bench.type.itemsize // width, width, grad=True)
        gradient = torch.randn_like(x)
        for name, forward in (("norm", _norm(bench, width)), ("activation", gelu)):

            def both(x: Any = x, forward: Any = forward, gradient: Any = gradient) -> None:
                forward(x).backward(gradient)
                x.grad = None

            points.append(Point(name=f"{name}, {size / MEBIBYTE:g} MiB", work=5.0 * size, seconds=bench.kernels(both)))
    return fitted(points)


def _norm(bench: Bench, width: int) -> Work:
    if te is None or not bench.is_gpu:
        return torch.nn.LayerNorm(width, device=bench.device, dtype=bench.type)
    return te.RMSNorm(width, dtype=bench.type, device="cuda")


def launch(bench: Bench) -> float:
    """The host's time for one small operation of PyTorch."""
    tensor = torch.zeros(16, device=bench.device)
    return bench.host(lambda: tensor.add_(1), times=500)


# --- several ----------------------------------------------------------------------------------------------------------


def link(bench: Bench, group: Any = None) -> Link | None:
    """Laws for collectives of a group of ranks; None for a single rank."""
    ranks = dist.get_world_size(group)
    if ranks == 1:
        return None
    laws = {}
    for name, work, share in _collectives(ranks, group):
        points = []
        for size in bench.sizes.messages:
            with contextlib.suppress(RuntimeError):  # gloo lacks some of them
                seconds = _together(bench, work(bench, size), group)
                points.append(Point(name=f"{size / MEBIBYTE:g} MiB", work=share * size, seconds=seconds))
        if points:
            laws[name] = fitted(points)
    known = laws["all_reduce"]
    return Link(ranks=ranks, **{name: laws.get(name, known) for name, *_ in _collectives(ranks, group)})


def _collectives(ranks: int, group: Any) -> Iterator[tuple[str, Callable[[Bench, int], Work], float]]:
    """For each collective: its name, a function that prepares it for a size in bytes, and the share of bytes on each
    link."""
    share = (ranks - 1) / ranks

    def numbers(bench: Bench, size: int) -> torch.Tensor:
        return torch.zeros(size // bench.type.itemsize // ranks * ranks, device=bench.device, dtype=bench.type)

    def reduce(bench: Bench, size: int) -> Work:
        tensor = numbers(bench, size)
        return lambda: dist.all_reduce(tensor, group=group)

    def gather(bench: Bench, size: int) -> Work:
        whole = numbers(bench, size)
        part = whole[: len(whole) // ranks].clone()
        return lambda: dist.all_gather_into_tensor(whole, part, group=group)

    def scatter(bench: Bench, size: int) -> Work:
        whole = numbers(bench, size)
        part = whole[: len(whole) // ranks].clone()
        return lambda: dist.reduce_scatter_tensor(part, whole, group=group)

    def exchange(bench: Bench, size: int) -> Work:
        sent = numbers(bench, size)
        received = torch.empty_like(sent)
        return lambda: dist.all_to_all_single(received, sent, group=group)

    def send(bench: Bench, size: int) -> Work:
        """Send to the next rank, while receiving from the previous one."""
        sent = numbers(bench, size)
        received, rank = torch.empty_like(sent), dist.get_rank(group)
        there, back = (rank + 1) % ranks, (rank - 1) % ranks
        if group is not None:
            there, back = dist.get_global_rank(group, there), dist.get_global_rank(group, back)

        def once() -> None:
            operations = [dist.P2POp(dist.isend, sent, there, group), dist.P2POp(dist.irecv, received, back, group)]
            for one in dist.batch_isend_irecv(operations):
                one.wait()

        return once

    yield "all_reduce", reduce, 2 * share
    yield "all_gather", gather, share
    yield "reduce_scatter", scatter, share
    yield "all_to_all", exchange, share
    yield "send", send, 1.0


def _together(bench: Bench, work: Work, group: Any) -> float:
    """Time of a collective, repeated equally often on all ranks; the slowest rank counts."""
    for _ in range(3):
        work()
    bench.wait()
    times, found = (20 if bench.is_gpu else 5), []
    for _ in range(2):
        dist.barrier(group=group)
        bench.wait()
        start = time.perf_counter()
        for _ in range(times):
            work()
        bench.wait()
        found.append((time.perf_counter() - start) / times)
    slowest = torch.tensor([min(found)], device=bench.device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
    return slowest.item()


def links(bench: Bench, ranks_per_node: int) -> tuple[Link | None, Link | None]:
    """Links within the node and between nodes.

    Between nodes, all groups of ranks with the same local rank run at once.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    inside = outside = None
    for first in range(0, world, ranks_per_node):
        group = dist.new_group(list(range(first, first + ranks_per_node)))
        inside = group if first <= rank < first + ranks_per_node else inside
    for local in range(ranks_per_node):
        group = dist.new_group(list(range(local, world, ranks_per_node)))
        outside = group if rank % ranks_per_node == local else outside
    return link(bench, inside), link(bench, outside)


def stack(bench: Bench) -> dict[str, str]:
    found = {"torch": torch.__version__, "python": os.sys.version.split()[0]}  # type: ignore[attr-defined]
    if te is not None:
        import transformer_engine

        found["transformer_engine"] = transformer_engine.__version__
    if bench.is_gpu:
        found |= {"cuda": str(torch.version.cuda), "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
        found |= {"device": torch.cuda.get_device_name(), "cudnn": _cudnn()}
    return found


def _cudnn() -> str:
    """The version of cuDNN that kernels use: Transformer Engine's, or torch's. torch refuses to name one that it wasn't
    compiled with, but kernels use it anyway."""
    if loaded := cudnn.version():
        return ".".join(map(str, loaded))
    try:
        return str(torch.backends.cudnn.version())
    except RuntimeError as error:
        return f"not torch's own ({str(error).splitlines()[0][:120]})"
