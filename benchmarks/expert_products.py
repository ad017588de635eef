"""The products of a rank's experts, forward and backward: the host's time to start them, and the time until they are
done, by how tokens are spread over experts. A table for each of Transformer Engine's kernels: cuBLAS's for each expert,
CUTLASS's for all of them.

    python benchmarks/expert_products.py [--experts 128] [--tokens 262144] [--times 10] [--device cuda]

`even`: every expert has the same number of tokens. `uneven`: not, but the same ones in each call. `new`: other numbers
in each call, as in training; cuBLAS looks for a kernel for each size that it doesn't remember
(`CUBLASLT_HEURISTICS_CACHE_CAPACITY`, 8192 by default). Sizes are Qwen3-30B-A3B's. On the CPU, PyTorch's products.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import torch

HIDDEN, WIDTH = 2048, 768
CUTLASS = "NVTE_USE_CUTLASS_GROUPED_GEMM"
KERNELS = ("cuBLAS", "CUTLASS", "PyTorch")
WARMUP = 3
SIGMA = 0.5  # of the logarithm of experts' shares


class Loop(torch.nn.Module):
    """A product for each expert, by PyTorch."""

    def __init__(self, experts: int, inputs: int, outputs: int):
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.randn(outputs, inputs) / inputs**0.5 for _ in range(experts))

    def forward(self, tokens: torch.Tensor, spread: list[int]) -> torch.Tensor:
        parts = zip(tokens.split(spread), self.weights, strict=True)
        return torch.cat([part @ weight.T for part, weight in parts])


def layers(experts: int, device: str) -> tuple[torch.nn.Module, torch.nn.Module]:
    """The two of each expert: gate and up, then down."""
    sizes = ((HIDDEN, 2 * WIDTH), (WIDTH, HIDDEN))
    if device == "cpu":
        return tuple(Loop(experts, *size) for size in sizes)
    from transformer_engine.pytorch import GroupedLinear

    return tuple(GroupedLinear(experts, *size, bias=False, params_dtype=torch.bfloat16) for size in sizes)


def spread(kind: str, experts: int, tokens: int, random: torch.Generator) -> list[int]:
    if kind == "even":
        return [tokens // experts + (expert < tokens % experts) for expert in range(experts)]
    shares = torch.exp(SIGMA * torch.randn(experts, generator=random))
    ends = (tokens * shares.cumsum(0) / shares.sum()).round().long().tolist()
    ends[-1] = tokens
    return [end - begin for begin, end in zip([0, *ends], ends, strict=False)]


def spreads(kind: str, experts: int, tokens: int) -> Iterator[list[int]]:
    random = torch.Generator().manual_seed(1)
    one = spread(kind, experts, tokens, random)
    while True:
        yield spread(kind, experts, tokens, random) if kind == "new" else one


def measured(
    both: tuple[torch.nn.Module, torch.nn.Module], given: Iterator[list[int]], tokens: int, device: str, times: int
) -> tuple[float, float, float, float]:
    """Medians: the host's milliseconds and all until the products are done, forward and then backward."""
    wide = torch.randn(tokens, HIDDEN, device=device, dtype=next(both[0].parameters()).dtype, requires_grad=True)
    narrow = wide[:, :WIDTH].detach().clone().requires_grad_()
    wait: Callable[[], None] = torch.cuda.synchronize if device == "cuda" else lambda: None

    def timed[Found](work: Callable[..., Found], *given: object) -> tuple[Found, float, float]:
        wait()
        begin = time.perf_counter()
        made = work(*given)
        started = time.perf_counter()
        wait()
        return made, 1e3 * (started - begin), 1e3 * (time.perf_counter() - begin)

    def forward(split: list[int]) -> list[torch.Tensor]:
        return [one(tokens, split) for one, tokens in zip(both, (wide, narrow), strict=True)]

    found = []
    for split in itertools.islice(given, WARMUP + times):
        outputs, *first = timed(forward, split)
        gradients = [torch.ones_like(output) for output in outputs]
        _, *second = timed(torch.autograd.backward, outputs, gradients)
        found.append((*first, *second))
        for tensor in (wide, narrow, *both[0].parameters(), *both[1].parameters()):
            tensor.grad = None
    return tuple(map(statistics.median, zip(*found[WARMUP:], strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=262_144, help="of all experts: those of a batch, times the top k")
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--kernels", choices=KERNELS, help="default: each, in a process of its own")
    asked = parser.parse_args()
    if asked.kernels is None:
        for kernels in KERNELS[:2] if asked.device == "cuda" else KERNELS[2:]:
            subprocess.run([sys.executable, __file__, *sys.argv[1:], "--kernels", kernels], check=True)
        return
    os.environ[CUTLASS] = str(int(asked.kernels == "CUTLASS"))
    both = layers(asked.experts, asked.device)
    print(f"\n{asked.kernels}, {asked.experts} experts, {asked.tokens:,} tokens, ms, median of {asked.times}\n")
    print("| tokens | forward: host | µs a product | forward | backward: host | µs a product | backward |")
    print("|---|---:|---:|---:|---:|---:|---:|", flush=True)
    for kind in ("even", "uneven", "new"):
        given = spreads(kind, asked.experts, asked.tokens)
        ahead, forward, behind, backward = measured(both, given, asked.tokens, asked.device, asked.times)
        products = 2 * asked.experts  # forward; backward there are twice as many
        row = (ahead, 1e3 * ahead / products, forward, behind, 1e3 * behind / (2 * products), backward)
        print(f"| {kind} | {' | '.join(f'{one:.1f}' for one in row)} |", flush=True)


if __name__ == "__main__":
    main()
