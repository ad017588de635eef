"""Parallel reads of checkpoints, by several threads per rank, in training.

PyTorch reads a tensor into newly allocated memory, copies it to its place, and then reads the next one. That was 1
GiB/s per rank on the host of two H200s, although the files were in memory (docs/benchmarks/saves.md): the allocation is
slow. Here threads read pieces of tensors into reused buffers, pinned ones for a GPU. The rank's own thread copies the
pieces in the order of the files. Only that thread talks to the planner, which is not thread-safe, and to the GPU.
"""

from __future__ import annotations

import io
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch
from torch.distributed.checkpoint import FileSystemReader, filesystem
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

THREADS = 8
AHEAD_BYTES = 2**30  # limit for tensors that were located or read whole, but not copied; or one larger tensor
MIN_BYTES_IN_PIECES = 2**20
PIECE_BYTES = 16 * 2**20
BUFFERS = 2 * THREADS


def install() -> None:
    """Replace PyTorch's reader in this process."""
    FileSystemReader.read_data = read_data


def read_data(self: FileSystemReader, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
    places = {item: self.storage_data[item.storage_index] for item in plan.items}
    pool = ThreadPoolExecutor(min(THREADS, len(os.sched_getaffinity(0))))
    try:
        reading = Reading(self, planner, pool)
        for item in sorted(plan.items, key=lambda item: (places[item].relative_path, places[item].offset)):
            reading.add(item, places[item].length)
        reading.finish()
    finally:
        pool.shutdown(cancel_futures=True)
    done: torch.futures.Future[None] = torch.futures.Future()
    done.set_result(None)
    return done


class Reading:
    """State of a read. `located`: tensors being located or read by threads; `in_order`: this thread's next actions,
    each with the read that it waits for."""

    def __init__(self, reader: FileSystemReader, planner: LoadPlanner, pool: ThreadPoolExecutor) -> None:
        self.reader, self.planner, self.pool = reader, planner, pool
        self.located: deque[tuple[ReadItem, int, Future]] = deque()
        self.in_order: deque[tuple[Future, Callable[[], None]]] = deque()
        self.ahead = 0  # bytes of located tensors
        self.buffers: list[Buffer] = []
        self.free: deque[Buffer] = deque()

    def add(self, item: ReadItem, length: int) -> None:
        while self.ahead and self.ahead + length > AHEAD_BYTES:
            self._advance()
        self.located.append((item, length, self.pool.submit(_locate_or_read, self.reader, item)))
        self.ahead += length

    def finish(self) -> None:
        while self.located or self.in_order:
            self._advance()
        for buffer in self.buffers:
            buffer.wait()

    def _advance(self) -> None:
        """Complete the oldest read if it is done, which frees its memory; otherwise schedule more."""
        if self.in_order and (self.in_order[0][0].done() or not self.located):
            self._finish_the_oldest()
        else:
            self._schedule(*self.located.popleft())

    def _finish_the_oldest(self) -> None:
        read, then = self.in_order.popleft()
        read.result()
        then()

    def _schedule(self, item: ReadItem, length: int, located: Future) -> None:
        found = located.result()
        if not isinstance(found, TensorInFile):
            self.in_order.append((located, partial(self._hand_over, item, length, found)))
            return
        self.ahead -= length
        target = Target(item, found, self.planner)
        for piece in found.pieces:
            buffer = self._buffer()
            read = self.pool.submit(buffer.read, found, piece)
            self.in_order.append((read, partial(self._write, target, piece, buffer)))

    def _buffer(self) -> Buffer:
        if not self.free and len(self.buffers) < BUFFERS:
            self.buffers.append(Buffer())
            return self.buffers[-1]
        while not self.free:
            self._finish_the_oldest()
        buffer = self.free.popleft()
        buffer.wait()
        return buffer

    def _write(self, target: Target, piece: range, buffer: Buffer) -> None:
        target.write(piece, buffer)
        self.free.append(buffer)

    def _hand_over(self, item: ReadItem, length: int, found: torch.Tensor | io.BytesIO) -> None:
        """Hand a tensor or bytes over to the planner, as PyTorch does."""
        self.ahead -= length
        if item.type == LoadItemType.BYTE_IO:
            self.planner.load_bytes(item, found)
            return
        target = _resolve(item, found.size(), self.planner)
        target.copy_(found)
        self.planner.commit_tensor(item, target)


@dataclass(frozen=True)
class TensorInFile:
    """A tensor whose bytes follow one another in its file. `meta` has its size and type, but no memory."""

    path: str
    offset: int
    meta: torch.Tensor

    @property
    def pieces(self) -> list[range]:
        """Byte ranges of at most PIECE_BYTES."""
        size = self.meta.nbytes
        return [range(begin, min(begin + PIECE_BYTES, size)) for begin in range(0, size, PIECE_BYTES)]


def _locate_or_read(reader: FileSystemReader, item: ReadItem) -> torch.Tensor | TensorInFile | io.BytesIO:
    """Locate a tensor in its file, or read it. Files are opened each time, as a checkpoint may have more than a process
    may keep open."""
    place = reader.storage_data[item.storage_index]
    path = reader.fs.concat_path(reader.path, place.relative_path)
    with reader.fs.create_stream(path, "rb") as file:
        part = reader._slice_file(file, place)
        stream = reader.transforms.transform_load_stream(item, place.transform_descriptors or (), part)
        if item.type == LoadItemType.BYTE_IO:
            return io.BytesIO(stream.read(-1))
        seekable = stream if stream.seekable() else io.BytesIO(stream.read(-1))
        as_written = isinstance(reader.fs, filesystem.FileSystem) and stream is part
        if as_written and place.length >= MIN_BYTES_IN_PIECES:
            stored = torch.load(seekable, map_location="meta", weights_only=True)
            wanted = filesystem.narrow_tensor_by_index(stored, item.storage_offsets, item.lengths)
            begin = getattr(stored.untyped_storage(), "_checkpoint_offset", None)
            if begin is not None and wanted.numel() and _is_plain(wanted):
                skipped = wanted.storage_offset() * wanted.element_size()
                return TensorInFile(str(path), place.offset + begin + skipped, wanted)
            seekable.seek(0)
        tensor = torch.load(seekable, map_location="cpu", weights_only=True)
        return filesystem.narrow_tensor_by_index(tensor, item.storage_offsets, item.lengths)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor's bytes are those of its elements, one after the other."""
    return type(tensor) is torch.Tensor and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


class Buffer:
    """Host memory for one piece. Reusable once the copies from it have completed."""

    def __init__(self) -> None:
        self.memory = torch.empty(PIECE_BYTES, dtype=torch.uint8, device="cpu", pin_memory=torch.cuda.is_initialized())
        self.copied: torch.cuda.Event | None = None

    def read(self, tensor: TensorInFile, piece: range) -> None:
        """Read a piece. Called by a thread."""
        rest = memoryview(self.memory[: len(piece)].numpy())
        with open(tensor.path, "rb", buffering=0) as file:
            file.seek(tensor.offset + piece.start)
            while rest:
                if not (count := file.readinto(rest)):
                    raise EOFError(f"{tensor.path} ends {len(rest)} bytes too early")
                rest = rest[count:]

    def copy_to(self, target: torch.Tensor) -> None:
        """`target`: bytes, one-dimensional."""
        target.copy_(self.memory[: len(target)], non_blocking=True)
        if target.is_cuda:
            self.copied = torch.cuda.Event(blocking=True)
            self.copied.record(torch.cuda.current_stream(target.device))

    def wait(self) -> None:
        if self.copied:
            self.copied.synchronize()
            self.copied = None


class Target:
    """Destination of a tensor. The planner is asked for it when the first piece has arrived."""

    def __init__(self, item: ReadItem, stored: TensorInFile, planner: LoadPlanner) -> None:
        self.item, self.stored, self.planner = item, stored, planner

    def write(self, piece: range, buffer: Buffer) -> None:
        """Copy a piece to its place. Pieces arrive in order."""
        meta = self.stored.meta
        if piece.start == 0:
            self.tensor = _resolve(self.item, meta.size(), self.planner)
            fits = _is_plain(self.tensor) and self.tensor.dtype == meta.dtype
            self.memory = self.tensor if fits else torch.empty_like(meta, device="cpu")
        buffer.copy_to(self.memory.view(-1).view(torch.uint8)[piece.start : piece.stop])
        if piece.stop == meta.nbytes:
            if self.memory is not self.tensor:
                self.tensor.copy_(self.memory)
            self.planner.commit_tensor(self.item, self.tensor)


def _resolve(item: ReadItem, size: torch.Size, planner: LoadPlanner) -> torch.Tensor:
    target = planner.resolve_tensor(item).detach()
    if target.size() != size:
        raise AssertionError(f"req {item.storage_index} mismatch sizes {target.size()} vs {size}")
    return target
