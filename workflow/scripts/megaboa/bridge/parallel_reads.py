"""Checkpoints are read by several threads of a rank in training.

PyTorch reads one tensor into memory that it takes for it, copies it to where it belongs, and reads the next: 1 GiB/s a
rank on the host of two H200s, though the files were in memory (docs/benchmarks/saves.md). Taking memory is what takes
long. Here threads read small tensors ahead, and the pieces of a large one straight to where they belong: to its own
memory, or to pinned memory that is used again and again on its way to a GPU. Only the rank's own thread talks to the
planner, in the order of the files, because planners are not thread-safe.
"""

from __future__ import annotations

import io
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint import FileSystemReader, filesystem
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

THREADS = 8
AHEAD_BYTES = 2**30  # of the files, from the tensor that is copied to the last one that threads look at
LARGE = 2**20  # bytes of a tensor that is read in pieces
LARGEST_PIECE = 32 * 2**20  # of pinned memory, for each thread


def install() -> None:
    """In this process."""
    FileSystemReader.read_data = read_data


def read_data(self: FileSystemReader, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
    places = {item: self.storage_data[item.storage_index] for item in plan.items}
    in_order = sorted(plan.items, key=lambda item: (places[item].relative_path, places[item].offset))
    reading: deque[tuple[ReadItem, Future]] = deque()
    ahead = 0
    threads = min(THREADS, len(os.sched_getaffinity(0)))
    pool = ThreadPoolExecutor(threads)
    pieces = Pieces(pool, threads)
    try:
        for item in in_order:
            size = places[item].length
            while reading and ahead + size > AHEAD_BYTES:
                ahead -= places[reading[0][0]].length
                _hand_over(*reading.popleft(), planner, pieces)
            reading.append((item, pool.submit(_read, self, item)))
            ahead += size
        while reading:
            _hand_over(*reading.popleft(), planner, pieces)
    finally:
        pool.shutdown(cancel_futures=True)
    done: torch.futures.Future[None] = torch.futures.Future()
    done.set_result(None)
    return done


@dataclass(frozen=True)
class Stored:
    """A tensor that is still in its file, as its elements follow one another."""

    path: str
    offset: int
    like: torch.Tensor  # without memory


def _read(reader: FileSystemReader, item: ReadItem) -> torch.Tensor | Stored | io.BytesIO:
    """The file is opened for each tensor: a checkpoint may have more files than a process may keep open."""
    place = reader.storage_data[item.storage_index]
    path = reader.fs.concat_path(reader.path, place.relative_path)
    with reader.fs.create_stream(path, "rb") as file:
        part = reader._slice_file(file, place)
        stream = reader.transforms.transform_load_stream(item, place.transform_descriptors or (), part)
        if item.type == LoadItemType.BYTE_IO:
            return io.BytesIO(stream.read(-1))
        seekable = stream if stream.seekable() else io.BytesIO(stream.read(-1))
        as_written = isinstance(reader.fs, filesystem.FileSystem) and stream is part
        if as_written and place.length >= LARGE:
            stored = torch.load(seekable, map_location="meta", weights_only=True)
            wanted = filesystem.narrow_tensor_by_index(stored, item.storage_offsets, item.lengths)
            begin = getattr(stored.untyped_storage(), "_checkpoint_offset", None)
            if begin is not None and wanted.is_contiguous():
                skipped = wanted.storage_offset() * wanted.element_size()
                return Stored(str(path), place.offset + begin + skipped, wanted)
            seekable.seek(0)
        tensor = torch.load(seekable, map_location="cpu", weights_only=True)
        return filesystem.narrow_tensor_by_index(tensor, item.storage_offsets, item.lengths)


def _hand_over(item: ReadItem, read: Future, planner: LoadPlanner, pieces: Pieces) -> None:
    """As PyTorch does it."""
    found = read.result()
    if item.type == LoadItemType.BYTE_IO:
        planner.load_bytes(item, found)
        return
    target = planner.resolve_tensor(item).detach()
    size = found.like.size() if isinstance(found, Stored) else found.size()
    if target.size() != size:
        raise AssertionError(f"req {item.storage_index} mismatch sizes {target.size()} vs {size}")
    if not isinstance(found, Stored):
        target.copy_(found)
    elif type(target) is torch.Tensor and target.dtype == found.like.dtype and target.is_contiguous():
        pieces.read(found, target)
    else:
        memory = torch.empty_like(found.like, device="cpu")
        pieces.read(found, memory)
        target.copy_(memory)
    planner.commit_tensor(item, target)


class Pieces:
    """Of one tensor after the other, each read by a thread of its own."""

    def __init__(self, pool: ThreadPoolExecutor, threads: int) -> None:
        self.pool = pool
        self.threads = threads
        self.by_pinned_memory: list[PinnedMemory] = []

    def read(self, stored: Stored, target: torch.Tensor) -> None:
        goal = target.view(-1).view(torch.uint8)
        share = min(max(-(-len(goal) // self.threads), LARGE // 4), LARGEST_PIECE)
        file = os.open(stored.path, os.O_RDONLY | os.O_CLOEXEC)

        def every(number: int) -> None:
            for begin in range(number * share, len(goal), self.threads * share):
                ways[number](file, stored.offset + begin, goal[begin : begin + share])

        try:
            with self._to(target.device) as ways:
                tasks = [self.pool.submit(every, number) for number in range(min(self.threads, -(-len(goal) // share)))]
                wait(tasks)  # all of them, before the file is closed
                for task in tasks:
                    task.result()
        finally:
            os.close(file)

    @contextmanager
    def _to(self, device: torch.device) -> Iterator[Sequence[Callable[[int, int, torch.Tensor], None]]]:
        """What comes before and after on this thread's stream comes before and after the copies of others."""
        if device.type != "cuda":
            yield [_read_exactly] * self.threads
            return
        if not self.by_pinned_memory:
            self.by_pinned_memory = [PinnedMemory(device) for _ in range(self.threads)]
        usual = torch.cuda.current_stream(device)
        for way in self.by_pinned_memory:
            way.stream.wait_stream(usual)
        yield self.by_pinned_memory
        for way in self.by_pinned_memory:
            usual.wait_stream(way.stream)


class PinnedMemory:
    """One thread's way to a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.memory = torch.empty(LARGEST_PIECE, dtype=torch.uint8, pin_memory=True)
        self.stream = torch.cuda.Stream(device)

    def __call__(self, file: int, offset: int, piece: torch.Tensor) -> None:
        memory = self.memory[: len(piece)]
        self.stream.synchronize()  # the last piece has left this memory
        _read_exactly(file, offset, memory)
        with torch.cuda.stream(self.stream):
            piece.copy_(memory, non_blocking=True)


def _read_exactly(file: int, offset: int, memory: torch.Tensor) -> None:
    rest = memoryview(memory.numpy())
    while rest:
        count = os.preadv(file, [rest], offset)
        if count == 0:
            raise EOFError(f"a file of the checkpoint ends {len(rest)} bytes too early")
        rest, offset = rest[count:], offset + count
