"""Checkpoints are read by several threads of a rank in training.

PyTorch reads one tensor into memory that it takes for it, copies it to where it belongs, and reads the next: 1 GiB/s a
rank on the host of two H200s, though the files were in memory (docs/benchmarks/saves.md). Taking memory is what takes
long. Here threads read tensors in pieces to buffers that are used again and again, pinned ones for a GPU. The rank's
own thread copies the pieces in the order of the files and alone talks to the planner, which is not thread-safe.
"""

from __future__ import annotations

import io
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch
from torch.distributed.checkpoint import FileSystemReader, filesystem
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

THREADS = 8
AHEAD_BYTES = 2**30  # of the files, whose tensors are looked at ahead
SMALL = 2**20  # bytes of a tensor that is read as PyTorch does
PIECE = 16 * 2**20
BUFFERS = 2 * THREADS  # of a piece


def install() -> None:
    """In this process."""
    FileSystemReader.read_data = read_data


def read_data(self: FileSystemReader, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
    pool = ThreadPoolExecutor(min(THREADS, len(os.sched_getaffinity(0))))
    try:
        _read_all(self, plan.items, planner, pool)
    finally:
        pool.shutdown(cancel_futures=True)
    done: torch.futures.Future[None] = torch.futures.Future()
    done.set_result(None)
    return done


@dataclass(frozen=True)
class Stored:
    """A tensor that is still in its file, where its elements follow one another."""

    path: str
    offset: int
    like: torch.Tensor  # without memory

    @property
    def pieces(self) -> list[range]:
        """Of its bytes."""
        return [range(begin, min(begin + PIECE, self.like.nbytes)) for begin in range(0, self.like.nbytes, PIECE)]


class Buffer:
    """Of one piece, and free again when what was copied from it is where it belongs."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.copied = torch.cuda.Event() if memory.is_pinned() else None

    def read(self, stored: Stored, piece: range) -> None:
        if self.copied:
            self.copied.synchronize()
        rest, offset = memoryview(self.memory[: len(piece)].numpy()), stored.offset + piece.start
        file = os.open(stored.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            while rest:
                if not (count := os.preadv(file, [rest], offset)):
                    raise EOFError(f"{stored.path} ends {len(rest)} bytes too early")
                rest, offset = rest[count:], offset + count
        finally:
            os.close(file)

    def copy_to(self, target: torch.Tensor) -> None:
        """Bytes."""
        target.copy_(self.memory[: len(target)], non_blocking=True)
        if self.copied:
            self.copied.record(torch.cuda.current_stream(target.device))


def _buffers() -> list[Buffer]:
    memory = torch.empty(BUFFERS, PIECE, dtype=torch.uint8, pin_memory=torch.cuda.is_initialized())
    return [Buffer(one) for one in memory]


def _read_all(reader: FileSystemReader, items: list[ReadItem], planner: LoadPlanner, pool: ThreadPoolExecutor) -> None:
    free: deque[Buffer] | None = None  # until there is a tensor to be read in pieces
    in_order: deque[Callable[[], None]] = deque()  # what this thread does next, as soon as it has been read

    def take(target: Target, piece: range, buffer: Buffer, read: Future) -> None:
        read.result()
        target.take(piece, buffer)
        free.append(buffer)

    for item, found in _looked_at(reader, items, pool):
        if isinstance(found, Stored):
            target = Target(item, found, planner)
            if free is None:
                free = deque(_buffers())
            for piece in found.pieces:
                while not free:
                    in_order.popleft()()
                buffer = free.popleft()
                read = pool.submit(buffer.read, found, piece)
                in_order.append(partial(take, target, piece, buffer, read))
        else:
            in_order.append(partial(_hand_over, item, found, planner))
            if len(in_order) > 2 * BUFFERS:
                in_order.popleft()()
    while in_order:
        in_order.popleft()()


def _looked_at(
    reader: FileSystemReader, items: list[ReadItem], pool: ThreadPoolExecutor
) -> Iterator[tuple[ReadItem, torch.Tensor | Stored | io.BytesIO]]:
    """In the order of the files."""
    places = {item: reader.storage_data[item.storage_index] for item in items}
    ahead: deque[tuple[ReadItem, Future]] = deque()
    size = 0
    for item in sorted(items, key=lambda item: (places[item].relative_path, places[item].offset)):
        while ahead and size + places[item].length > AHEAD_BYTES:
            first, looked = ahead.popleft()
            size -= places[first].length
            yield first, looked.result()
        ahead.append((item, pool.submit(_look, reader, item)))
        size += places[item].length
    for first, looked in ahead:
        yield first, looked.result()


def _look(reader: FileSystemReader, item: ReadItem) -> torch.Tensor | Stored | io.BytesIO:
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
        if as_written and place.length >= SMALL:
            stored = torch.load(seekable, map_location="meta", weights_only=True)
            wanted = filesystem.narrow_tensor_by_index(stored, item.storage_offsets, item.lengths)
            begin = getattr(stored.untyped_storage(), "_checkpoint_offset", None)
            if begin is not None and wanted.is_contiguous():
                skipped = wanted.storage_offset() * wanted.element_size()
                return Stored(str(path), place.offset + begin + skipped, wanted)
            seekable.seek(0)
        tensor = torch.load(seekable, map_location="cpu", weights_only=True)
        return filesystem.narrow_tensor_by_index(tensor, item.storage_offsets, item.lengths)


class Target:
    """Where a tensor belongs. The planner is asked when the first piece is there."""

    def __init__(self, item: ReadItem, stored: Stored, planner: LoadPlanner) -> None:
        self.item = item
        self.stored = stored
        self.planner = planner

    def take(self, piece: range, buffer: Buffer) -> None:
        if piece.start == 0:
            self.tensor = _resolve(self.item, self.stored.like.size(), self.planner)
            plain = type(self.tensor) is torch.Tensor and self.tensor.is_contiguous()
            fits = plain and self.tensor.dtype == self.stored.like.dtype
            self.memory = self.tensor if fits else torch.empty_like(self.stored.like, device="cpu")
        buffer.copy_to(self.memory.view(-1).view(torch.uint8)[piece.start : piece.stop])
        if piece.stop == self.stored.like.nbytes:
            if self.memory is not self.tensor:
                self.tensor.copy_(self.memory)
            self.planner.commit_tensor(self.item, self.tensor)


def _hand_over(item: ReadItem, found: torch.Tensor | io.BytesIO, planner: LoadPlanner) -> None:
    """As PyTorch does it."""
    if item.type == LoadItemType.BYTE_IO:
        planner.load_bytes(item, found)
        return
    target = _resolve(item, found.size(), planner)
    target.copy_(found)
    planner.commit_tensor(item, target)


def _resolve(item: ReadItem, size: torch.Size, planner: LoadPlanner) -> torch.Tensor:
    target = planner.resolve_tensor(item).detach()
    if target.size() != size:
        raise AssertionError(f"req {item.storage_index} mismatch sizes {target.size()} vs {size}")
    return target
