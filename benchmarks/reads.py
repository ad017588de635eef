"""How fast one rank reads a checkpoint that is in the host's memory to its device, by several ways: one table.

    python benchmarks/reads.py [--gib 8] [--device cuda] [--experts] [--times 3]

`torch` is PyTorch's own reader, `pieces` that of `megaboa.bridge.parallel_reads`; `whole` is the same without its
buffers: threads take memory for each tensor, and one copies. All must give the same tensors, of a Llama's layers or
(`--experts`) of small experts.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "workflow" / "scripts"))

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader

from megaboa.bridge import parallel_reads

GIB = 2**30
LLAMA = ((4096, 4096), (14336, 4096), (4096, 1024), (4096,))
EXPERTS = ((2048, 1024),) * 64 + ((2048, 2048), (2048,))


def exact_sum(tensor: torch.Tensor) -> int:
    """A checksum of the bits weighted by position, modulo 2^64, which doesn't depend on the order of summation."""
    bits = tensor.view(torch.int32).flatten()
    return (bits * torch.arange(1, len(bits) + 1, device=tensor.device)).sum().item()


def sizes(total: int, shapes: Sequence[tuple[int, ...]]) -> Iterator[tuple[int, ...]]:
    while total > 0:
        for shape in shapes:
            yield shape
            total -= 4 * torch.Size(shape).numel()


def pieces_from(bytes_of_a_tensor: float) -> Callable:
    def read_data(self, plan, planner):
        parallel_reads.MIN_BYTES_IN_PIECES = bytes_of_a_tensor
        return parallel_reads.read_data(self, plan, planner)

    return read_data


WAYS = {
    "torch": FileSystemReader.read_data,
    "whole": pieces_from(math.inf),
    "pieces": pieces_from(parallel_reads.MIN_BYTES_IN_PIECES),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=8.0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--experts", action="store_true")
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="of the checkpoint, for the time of the call; default: /tmp")
    asked = parser.parse_args()
    device = torch.device(asked.device)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # exit normally, so that written files are removed
    with tempfile.TemporaryDirectory(prefix="megaboa-", dir=asked.folder) as folder:
        shapes = sizes(int(asked.gib * GIB), EXPERTS if asked.experts else LLAMA)
        saved = {f"layer.{n}": torch.randn(shape, device=device).cpu() for n, shape in enumerate(shapes)}
        dcp.save(saved, storage_writer=dcp.FileSystemWriter(folder, thread_count=2), no_dist=True)
        bytes_saved = sum(tensor.nbytes for tensor in saved.values())
        expected = {name: exact_sum(tensor.to(device)) for name, tensor in saved.items()}
        into = {name: torch.empty(tensor.shape, device=device) for name, tensor in saved.items()}
        del saved
        seconds: dict[str, list[float]] = {}
        for _ in range(asked.times):
            for way, read_data in WAYS.items():
                for tensor in into.values():
                    tensor.zero_()
                FileSystemReader.read_data = read_data
                began = time.perf_counter()
                dcp.load(into, checkpoint_id=folder, no_dist=True)
                if device.type == "cuda":
                    torch.cuda.synchronize()
                seconds.setdefault(way, []).append(time.perf_counter() - began)
                for name, tensor in into.items():
                    if exact_sum(tensor) != expected[name]:
                        raise SystemExit(f"{way}: {name} differs")
    processors = len(os.sched_getaffinity(0))
    print(f"{bytes_saved / GIB:.1f} GiB to {device}, {processors} processors, torch {torch.__version__}\n")
    print("| way | seconds, median | lowest to highest | GiB/s |\n|---|---:|---:|---:|")
    for way, took in seconds.items():
        usual = statistics.median(took)
        print(f"| {way} | {usual:.2f} | {min(took):.2f} to {max(took):.2f} | {bytes_saved / GIB / usual:.2f} |")


if __name__ == "__main__":
    main()
