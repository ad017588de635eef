"""Calibration of this machine: runs all measurements one after the other, and formats the result."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from megaboa import peaks
from megaboa.bridge import host_times, kernel_times
from megaboa.bridge.kernel_times import FP8_ATTENTION, Bench
from megaboa.check.calibration import BY_TYPE
from megaboa.records import Calibration, Law, Link
from megaboa.run import nvml


def measure(device: torch.device, rank: int, ranks_per_node: int) -> Calibration:
    """Run all measurements, by every rank of a job at the same time, so that GPUs share power and the host as in
    training.

    The first rank's results count. Ranks synchronize for the host's times and for collectives.
    """
    bench = Bench(device)
    begun = time.monotonic()

    def done(what: str) -> None:
        if rank == 0:
            print(f"{time.monotonic() - begun:6.1f} s  {what}", file=sys.stderr, flush=True)

    kernel_times.heat(bench)
    kinds = bench.kinds
    launch, memory = kernel_times.launch(bench), kernel_times.memory(bench)
    done("memory, launches")
    products = _each(kinds, lambda kind: kernel_times.products(bench, kind), done, "products")
    with_attention = [kind for kind in kinds if kind in (kinds[0], FP8_ATTENTION)]
    attention = _each(with_attention, lambda kind: kernel_times.attention(bench, kind), done, "attention")
    grouped = _each(kinds, lambda kind: kernel_times.experts(bench, kind), done, "experts")
    # Without a device, as in training; with one, each of Megatron's groups would connect immediately.
    dist.init_process_group("nccl" if bench.is_gpu else "gloo", timeout=timedelta(seconds=120))
    node, network = kernel_times.links(bench, ranks_per_node)
    done("collectives")
    # On the CPU, communication between ranks is the host's work too, and counts as such.
    sharing = ranks_per_node if bench.is_gpu else 1
    host = host_times.measure(bench, sharing, lambda work: _each(kinds, work, done, "host"))
    done("host of layers that ranks share, and of experts")
    stack, gpu = kernel_times.stack(bench), "cpu"
    if bench.is_gpu:
        stack["driver"] = _driver() or "unknown"
        gpu = peaks.kind_of(stack["device"])
    return Calibration(
        name=f"{gpu}, measured {time.strftime('%Y-%m-%d')}",
        gpu=gpu,
        source=f"megaboa calibrate on {dist.get_world_size()} x {stack.get('device', 'CPU')}",
        stack=stack,
        products=products,
        grouped=grouped,
        attention=attention[kinds[0]],
        attention_fp8=attention.get(FP8_ATTENTION, {}),
        memory=memory,
        launch=launch,
        **vars(host),
        node=node or _alone(memory),
        network=network,
    )


def _each[T](kinds: list[str], work: Callable[[str], T | None], done: Callable[[str], None], what: str) -> dict[str, T]:
    """Measurements by type; types that this GPU or stack lacks are reported and left out."""
    found: dict[str, T] = {}
    for kind in kinds:
        try:
            one = work(kind)
        except (RuntimeError, AssertionError, ValueError, TypeError, AttributeError, NotImplementedError) as error:
            if kind == kinds[0]:
                raise
            done(f"{what} in {kind}: not here ({str(error).splitlines()[0][:100] if str(error) else type(error)})")
            continue
        finally:
            kernel_times.forget_scales()
        if one is not None:
            found[kind] = one
            done(f"{what} in {kind}")
    return found


def _alone(memory: Law) -> Link:
    """Stand-in for the links of a single GPU: copies within its own memory."""
    law = Law(rate=memory.rate / 2, latency=memory.latency)
    return Link(ranks=1, all_reduce=law, all_gather=law, reduce_scatter=law, all_to_all=law, send=law)


def _driver() -> str | None:
    try:
        return nvml.Nvml().driver
    except (nvml.NvmlError, OSError):
        return None


def told(found: Calibration) -> str:
    """A summary for people: rates, latencies, and how well the laws fit."""
    lines = [f"{found.name} ({', '.join(f'{name} {value}' for name, value in found.stack.items())})"]
    for what in BY_TYPE:
        laws: dict[str, Law] = getattr(found, what)
        lines += [_line(f"{what} {name}", law, 1e12, "TFLOP/s") for name, law in laws.items()]
    lines.append(_line("memory", found.memory, 1e9, "GB/s"))
    for what, link in (("node", found.node), ("network", found.network)):
        if link is not None:
            names = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")
            lines += [_line(f"{what} {name}", getattr(link, name), 1e9, "GB/s") for name in names]
    hosts = ", ".join(f"{name} {seconds * 1e6:,.0f}" for name, seconds in found.layer.items())
    more = [f"{found.tensor_host * 1e6:,.0f} more where ranks share it"]
    if law := found.experts_host:
        more.append(f"{law.latency * 1e6:,.0f} more with an expert, {law.group * 1e6:,.0f} with each further one")
    more.append(f"a micro-batch outside its layers {found.micro_batch * 1e6:,.0f}")
    lines.append(f"host, in us: a launch {found.launch * 1e6:.1f}, a layer {hosts}, {', '.join(more)}")
    return "\n".join(lines)


def _line(name: str, law: Law, unit: float, word: str) -> str:
    error = f", law off by {law.error:.0%} (median)" if law.error is not None else ""
    best = max((one.work / one.seconds for one in law.points), default=law.rate) / unit
    moved = f", {law.moved / 1e9:,.0f} G values/s" if law.moved else ""
    return f"{name:24} {law.rate / unit:8,.4g} {word} (best {best:,.4g}), {law.latency * 1e6:.1f} us{moved}{error}"
