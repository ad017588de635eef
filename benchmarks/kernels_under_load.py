"""Do kernels take longer between those of a training step than alone? A GPU near its limit of power lowers its clock.

    python benchmarks/kernels_under_load.py [--seconds 0.08] [--kinds bf16 fp8_current]

Kernels and sizes are those of `megaboa calibrate`, measured in three ways: alone, some hundredths of a second each;
between layers of a model, which take at least twice as long as they do, as `megaboa calibrate` does; and between large
matrix products. Printed are a line for each kernel, and the laws. On the CPU the three should agree.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "workflow/scripts"))

from megaboa.bridge import kernel_times
from megaboa.bridge.kernel_times import Bench, Work
from megaboa.records import Law

FASTEST_CLOCK = 2.4e9  # cycles per second that no GPU exceeds: a sleep of so many is long enough


class Alone(Bench):
    """Kernels one after the other. The host first lets the GPU sleep, and so stays ahead of it."""

    def kernels(self, work: Work) -> float:
        if not self.is_gpu:
            return self.host(work, times=5)
        each = self.host(work, times=3)
        given = self.launching(work)
        times = max(3, min(40, round(self.seconds / each)))
        cycles = int(min(0.5, times * given) * FASTEST_CLOCK) if given > 0.3 * each else 0
        found = []
        for _ in range(2):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self.wait()
            if cycles:
                torch.cuda._sleep(cycles)
            start.record()
            for _ in range(times):
                work()
            end.record()
            self.wait()
            found.append(start.elapsed_time(end) / 1000 / times)
        return min(found)


class Products(Bench):
    """Kernels between large products, which load the GPU more than training does."""

    @functools.cached_property
    def layer(self) -> tuple[Work, float]:
        size = 8192 if self.is_gpu else 256
        a, b = self.random(size, size), self.random(size, size)
        out = torch.empty_like(a)

        def once() -> None:
            torch.mm(a, b, out=out)

        return once, self.host(once)


def laws(bench: Bench, kinds: list[str]) -> Iterator[tuple[str, Law]]:
    kernel_times.heat(bench)
    yield "memory", kernel_times.memory(bench)
    for kind in kinds:
        kernel_times.forget_scales()
        yield f"products, {kind}", kernel_times.products(bench, kind)
    for kind in kinds:
        if kind in (kinds[0], kernel_times.FP8_ATTENTION):
            for direction, law in kernel_times.attention(bench, kind).items():
                yield f"attention in {kind}, {direction}", law


def table(found: Mapping[str, Mapping[str, Law]]) -> Iterator[str]:
    """Kernels, and then laws, in each of the ways, the first of which the others are compared with."""
    first, *others = found.values()
    names = [f"{name}, µs" for name in found]
    yield f"| kernel | {names[0]} | {' | '.join(f'{name} | ratio' for name in names[1:])} |"
    yield f"|---|---:{'|---:' * 2 * len(others)}|"
    for law in first:
        for number, point in enumerate(first[law].points):
            cells = [f"{point.seconds * 1e6:,.1f}"]
            for other in others:
                seconds = other[law].points[number].seconds
                cells += [f"{seconds * 1e6:,.1f}", f"{seconds / point.seconds:.2f}"]
            yield f"| {law}: {point.name} | {' | '.join(cells)} |"
    yield ""
    yield f"| law: T/s, median error | {' | '.join(found)} |"
    yield f"|---|{'---:|' * len(found)}"
    for law in first:
        cells = [f"{one[law].rate / 1e12:,.1f}, {one[law].error:.1%}" for one in found.values()]
        yield f"| {law} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.08, help="of a measurement, about")
    parser.add_argument("--kinds", nargs="+", help="of products; default: all that this device has")
    asked = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(1)
    ways = {
        "alone": Alone(device, asked.seconds),
        "between layers": Bench(device, asked.seconds),
        "between products": Products(device, asked.seconds),
    }
    kinds = asked.kinds or ways["alone"].kinds
    print("\n".join(table({name: dict(laws(bench, kinds)) for name, bench in ways.items()})))
    stack = kernel_times.stack(ways["alone"])
    print("\n" + ", ".join(f"{name} {version}" for name, version in stack.items()))


if __name__ == "__main__":
    main()
