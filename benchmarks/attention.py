"""Attention's kernels, forward and backward, in 16 bits and in FP8, with the cuDNN that is loaded.

    python benchmarks/attention.py [--seconds 0.3]

Kernels run between layers of a model, as `megaboa calibrate` measures them. To compare versions of cuDNN, call it once
for each, with the folder that pip has unpacked it to:

    pip install --no-deps --target cudnn nvidia-cudnn-cu13==9.28.1.4
    lib=$PWD/cudnn/nvidia/cudnn/lib CUDNN_HOME=$lib LD_LIBRARY_PATH=$lib:$LD_LIBRARY_PATH python benchmarks/attention.py

On the CPU the kernels are PyTorch's.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "workflow/scripts"))

from megaboa.bridge import kernel_times
from megaboa.bridge.kernel_times import FP8_ATTENTION, Bench
from megaboa.check.device import FP8_HEAD


@dataclass(frozen=True)
class Shape:
    """Sequences of a micro-batch, their length, heads of queries, of keys and values, and channels of a head."""

    name: str
    sequences: int
    length: int
    heads: int
    groups: int
    channels: int

    @property
    def operations(self) -> float:
        """Of the forward pass, which calculates half of the scores."""
        return 2.0 * self.sequences * self.heads * self.length**2 * self.channels


GPU = (
    Shape("Llama 3 8B", 1, 8192, 32, 8, 128),
    Shape("the same with 32 heads of keys", 1, 8192, 32, 32, 128),
    Shape("Llama 3 8B, 32,768 tokens", 1, 32768, 32, 8, 128),
    Shape("Qwen3-30B-A3B", 2, 4096, 32, 4, 128),
    Shape("GPT2-large", 16, 1024, 20, 20, 64),
    *(Shape(f"heads of {channels}", 2, 4096, 16, 4, channels) for channels in (32, 80, 96, 160, 192, 256, 512)),
)
CPU = (Shape("tiny", 1, 64, 4, 2, 32), Shape("the same with 4 heads of keys", 1, 64, 4, 4, 32))


def measured(bench: Bench, shape: Shape, kind: str) -> tuple[float, float]:
    """Seconds of the forward and of the backward pass."""

    def random(heads: int) -> torch.Tensor:
        sizes = (shape.length, heads, shape.channels) if bench.is_gpu else (heads, shape.length, shape.channels)
        return bench.random(shape.sequences, *sizes, grad=True)

    q, k, v = random(shape.heads), random(shape.groups), random(shape.groups)
    core = kernel_times.core_of(bench, shape.heads, shape.channels, kind, shape.groups)
    alone, both = kernel_times.attention_seconds(bench, core, q, k, v)
    return alone, both - alone


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.3, help="of a measurement, about")
    asked = parser.parse_args()
    torch.manual_seed(1)
    bench = Bench(torch.device("cuda" if torch.cuda.is_available() else "cpu"), asked.seconds)
    kernel_times.heat(bench)
    kinds = [kind for kind in bench.kinds if kind in (bench.kinds[0], FP8_ATTENTION)]
    print("| attention | type | forward, ms | TFLOP/s | backward, ms | TFLOP/s |\n|---|---|---:|---:|---:|---:|")
    for shape in GPU if bench.is_gpu else CPU:
        for kind in kinds:
            if kind == FP8_ATTENTION and shape.channels != FP8_HEAD:
                continue
            times = measured(bench, shape, kind)
            kernel_times.forget_scales()
            rates = (times * shape.operations / seconds / 1e12 for times, seconds in zip((1, 2.5), times, strict=True))
            cells = (f"{1000 * seconds:.3f} | {rate:,.0f}" for seconds, rate in zip(times, rates, strict=True))
            print(f"| {shape.name} | {kind} | {' | '.join(cells)} |", flush=True)
    print("\n" + ", ".join(f"{name} {version}" for name, version in kernel_times.stack(bench).items()))


if __name__ == "__main__":
    main()
