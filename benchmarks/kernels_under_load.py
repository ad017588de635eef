"""Do kernels take longer between those of a training step than alone? A GPU near its limit of power lowers its clock.

    python benchmarks/kernels_under_load.py [--seconds 0.08] [--kinds bf16 fp8_current]

Kernels and sizes are those of `megaboa calibrate`, measured in two ways: as it does, some hundredths of a second each,
and between large matrix products that take twice as long as they do. Printed are a line for each kernel, and what that
does to the laws that a calibration is made of. On the CPU the two ways should agree.
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "workflow/scripts"))

from megaboa.bridge import kernel_times
from megaboa.bridge.kernel_times import Bench, Work
from megaboa.records import Law

LOAD = 2.0  # times as long as the kernels between which it runs
SETTLED = 0.3  # seconds of load before a measurement
AT_ONCE = 0.002  # seconds of kernels between two loads


@dataclass(frozen=True)
class Loaded(Bench):
    """Kernels run between large products, which also keep the GPU busy while the host launches the next ones."""

    @functools.cached_property
    def product(self) -> tuple[Work, float]:
        size = 8192 if self.is_gpu else 256
        a, b = self.random(size, size), self.random(size, size)
        out = torch.empty_like(a)

        def once() -> None:
            torch.mm(a, b, out=out)

        return once, self.host(once)

    def kernels(self, work: Work) -> float:
        each = self.host(work, times=3)
        given = self.launching(work)
        count = max(1, round(AT_ONCE / each))
        product, seconds = self.product
        loads = math.ceil(count * max(LOAD * each, 1.5 * given) / seconds)
        for _ in range(math.ceil(SETTLED / seconds)):
            product()
        return statistics.median(self._rounds(work, count, loads, max(3, round(self.seconds / each / count))))

    def _rounds(self, work: Work, count: int, loads: int, rounds: int) -> list[float]:
        if not self.is_gpu:
            return [self.host(work, times=count) for _ in range(rounds)]
        product, _ = self.product
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(rounds)]
        for start, end in events:
            for _ in range(loads):
                product()
            start.record()
            for _ in range(count):
                work()
            end.record()
        self.wait()
        return [start.elapsed_time(end) / 1000 / count for start, end in events]


def laws(bench: Bench, kinds: list[str]) -> Iterator[tuple[str, Law]]:
    kernel_times.heat(bench)
    yield "memory", kernel_times.memory(bench)
    for kind in kinds:
        kernel_times.forget_scales()
        yield f"products, {kind}", kernel_times.products(bench, kind)
    for direction, law in kernel_times.attention(bench).items():
        yield f"attention, {direction}", law


def table(alone: Mapping[str, Law], loaded: Mapping[str, Law]) -> Iterator[str]:
    yield "| kernel | alone, µs | under load, µs | ratio |"
    yield "|---|---:|---:|---:|"
    for name, law in alone.items():
        for before, after in zip(law.points, loaded[name].points, strict=True):
            ratio = after.seconds / before.seconds
            yield f"| {name}: {before.name} | {before.seconds * 1e6:,.1f} | {after.seconds * 1e6:,.1f} | {ratio:.2f} |"
    yield ""
    yield "| law | rate alone | under load | share | median ratio of its kernels |"
    yield "|---|---:|---:|---:|---:|"
    for name, law in alone.items():
        pairs = zip(law.points, loaded[name].points, strict=True)
        ratio = statistics.median(after.seconds / before.seconds for before, after in pairs)
        rates = law.rate / 1e12, loaded[name].rate / 1e12
        yield f"| {name} | {rates[0]:,.1f} T/s | {rates[1]:,.1f} | {rates[1] / rates[0]:.2f} | {ratio:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.08, help="of a measurement, about")
    parser.add_argument("--kinds", nargs="+", help="of products; default: all that this device has")
    asked = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(1)
    alone, loaded = Bench(device, asked.seconds), Loaded(device, asked.seconds)
    kinds = asked.kinds or alone.kinds
    print("\n".join(table(dict(laws(alone, kinds)), dict(laws(loaded, kinds)))))
    stack = kernel_times.stack(alone)
    print("\n" + ", ".join(f"{name} {version}" for name, version in stack.items()))


if __name__ == "__main__":
    main()
