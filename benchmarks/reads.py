"""How fast one rank reads a checkpoint that is in the host's memory to its device, by several ways: one table.

    python benchmarks/reads.py [--gib 8] [--device cuda] [--times 3]

`torch` is PyTorch's own reader, `threads` that of `megaboa.bridge.parallel_reads`. `staged` is a proposal that the
library doesn't have: what threads have read goes to the GPU by way of pinned memory, in pieces, where the others copy
ordinary memory. All ways must give the same tensors.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "workflow" / "scripts"))

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader

from megaboa.bridge import parallel_reads

GIB = 2**30
PIECE = 64 * 2**20  # bytes of a thread's pinned memory
COPIERS = 4
SHAPES = ((4096, 4096), (14336, 4096), (4096, 1024), (4096,))  # of a Llama's layers, in fp32


class Staged:
    """Threads copy a tensor's pieces to pinned memory, and from there to the GPU, each on a stream of its own."""

    def __init__(self, device: torch.device):
        self.device = device
        self.pool = ThreadPoolExecutor(COPIERS)
        pinned = device.type == "cuda"
        self.slots = [torch.empty(PIECE, dtype=torch.uint8, pin_memory=pinned) for _ in range(COPIERS)]
        self.streams = [torch.cuda.Stream(device) for _ in self.slots] if pinned else []

    def copy(self, target: torch.Tensor, found: torch.Tensor) -> None:
        alike = target.dtype == found.dtype and target.is_contiguous() and found.is_contiguous()
        if not self.streams or not alike or found.nbytes < PIECE // 8:
            target.copy_(found)
            return
        usual = torch.cuda.current_stream(self.device)
        for stream in self.streams:
            stream.wait_stream(usual)  # which may still write to the target, or free it
        source, goal = (tensor.view(-1).view(torch.uint8) for tensor in (found, target))
        list(self.pool.map(lambda slot: self._every(slot, source, goal), range(COPIERS)))
        for stream in self.streams:
            usual.wait_stream(stream)

    def _every(self, slot: int, source: torch.Tensor, goal: torch.Tensor) -> None:
        """Its share of the pieces."""
        pinned, stream = self.slots[slot], self.streams[slot]
        with torch.cuda.device(self.device), torch.cuda.stream(stream):
            for begin in range(slot * PIECE, len(source), COPIERS * PIECE):
                piece = source[begin : begin + PIECE]
                stream.synchronize()  # the last one has left this memory
                pinned[: len(piece)].copy_(piece)
                goal[begin : begin + PIECE].copy_(pinned[: len(piece)], non_blocking=True)


def exact_sum(tensor: torch.Tensor) -> int:
    """Of the numbers' bits by their places, modulo 2^64: the same in any order of summation."""
    bits = tensor.view(torch.int32).flatten()
    return (bits * torch.arange(1, len(bits) + 1, device=tensor.device)).sum().item()


def sizes(total: int) -> Iterator[tuple[int, ...]]:
    while total > 0:
        for shape in SHAPES:
            yield shape
            total -= 4 * torch.Size(shape).numel()


def ways(device: torch.device) -> dict[str, Callable]:
    staged = Staged(device)

    def by_pinned_memory(item, read, planner):
        found = read.result()
        if item.type == dcp.planner.LoadItemType.BYTE_IO:
            planner.load_bytes(item, found)
            return
        target = planner.resolve_tensor(item).detach()
        staged.copy(target, found)
        planner.commit_tensor(item, target)

    usual = parallel_reads._hand_over

    def by(hand_over):
        def read_data(self, plan, planner):
            parallel_reads._hand_over = hand_over
            return parallel_reads.read_data(self, plan, planner)

        return read_data

    return {"torch": FileSystemReader.read_data, "threads": by(usual), "staged": by(by_pinned_memory)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=8.0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="of the checkpoint, for the time of the call; default: /tmp")
    asked = parser.parse_args()
    device = torch.device(asked.device)
    with tempfile.TemporaryDirectory(prefix="megaboa-", dir=asked.folder) as folder:
        shapes = enumerate(sizes(int(asked.gib * GIB)))
        saved = {f"layer.{number}": torch.randn(shape, device=device).cpu() for number, shape in shapes}
        dcp.save(saved, storage_writer=dcp.FileSystemWriter(folder, thread_count=2), no_dist=True)
        bytes_saved = sum(tensor.nbytes for tensor in saved.values())
        expected = {name: exact_sum(tensor.to(device)) for name, tensor in saved.items()}
        into = {name: torch.empty(tensor.shape, device=device) for name, tensor in saved.items()}
        del saved
        seconds: dict[str, list[float]] = {}
        tried = ways(device)
        for _ in range(asked.times):
            for way, read_data in tried.items():
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
