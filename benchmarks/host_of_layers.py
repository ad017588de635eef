"""The host's time for a layer: does it repeat, and how does it depend on the kind of layer?

    python benchmarks/host_of_layers.py [--rounds 5]

Measured as `megaboa calibrate` does, with small models, in turn: every round measures each kind once. `plain` has
neither a gate nor norms of queries and keys, `llama` has a gate, `qwen3` both, which is what `megaboa calibrate` uses.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "workflow/scripts"))

from megaboa.bridge.process import prepare
from megaboa.bridge.quiet import quietly

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
with quietly():
    prepare(DEVICE.type)

from megaboa.bridge import host_times, kernel_times
from megaboa.bridge.kernel_times import Bench

LAYERS: Mapping[str, Mapping[str, Any]] = {
    "plain": {"qk_layernorm": False, "gated_linear_unit": False, "bias_activation_fusion": False},
    "llama": {"qk_layernorm": False},
    "qwen3": {},
}


def micro_batch(bench: Bench, small: host_times.Small, kind: str, layers: int, changes: Mapping[str, Any]) -> float:
    made = host_times.provider(small, layers)
    for name, value in changes.items():
        setattr(made, name, value)
    return host_times._seconds(bench, small, kind, made)


def layer(bench: Bench, small: host_times.Small, kind: str, changes: Mapping[str, Any]) -> float:
    most, least = small.layers
    with quietly():
        more, fewer = (micro_batch(bench, small, kind, number, changes) for number in (most, least))
    return (more - fewer) / (most - least)


def table(found: Mapping[tuple[str, str], list[float]]) -> Iterator[str]:
    yield "| layer | type | µs, median | lowest to highest | each round |\n|---|---|---:|---:|---|"
    for (name, kind), times in found.items():
        each = [f"{1e6 * seconds:,.0f}" for seconds in times]
        middle, low, high = (1e6 * of(times) for of in (statistics.median, min, max))
        yield f"| {name} | {kind} | {middle:,.0f} | {low:,.0f} to {high:,.0f} | {'; '.join(each)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kinds", nargs="+", help="types; default: all that this device has")
    asked = parser.parse_args()
    bench = Bench(DEVICE)
    small = host_times.GPU if bench.is_gpu else host_times.CPU
    found: dict[tuple[str, str], list[float]] = {}
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(KeyboardInterrupt):  # prints what it has
        backend, rendezvous = "nccl" if bench.is_gpu else "gloo", f"file://{folder}/rendezvous"
        dist.init_process_group(backend, init_method=rendezvous, rank=0, world_size=1)
        kernel_times.heat(bench)
        with host_times._groups(small):
            for number, kind, name in itertools.product(range(asked.rounds), asked.kinds or bench.kinds, LAYERS):
                seconds = layer(bench, small, kind, LAYERS[name])
                found.setdefault((name, kind), []).append(seconds)
                print(f"round {number + 1}, {name} in {kind}: {1e6 * seconds:,.0f} µs", file=sys.stderr, flush=True)
    print("\n".join(table(found)))
    print("\n" + ", ".join(f"{name} {version}" for name, version in kernel_times.stack(bench).items()))


if __name__ == "__main__":
    main()
