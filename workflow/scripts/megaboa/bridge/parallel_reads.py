"""Checkpoints are read by several threads of a rank in training.

PyTorch reads one tensor, copies it to where it belongs, and reads the next: 1 GiB/s a rank on the host of two H200s,
though the files were in memory (docs/benchmarks/saves.md). Here threads read ahead, and the rank's own thread copies in
the order of the files, because planners are not thread-safe.
"""

from __future__ import annotations

import io
import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch.distributed.checkpoint import FileSystemReader, filesystem
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

THREADS = 8
AHEAD_BYTES = 2**30  # of a rank's host memory, or one tensor that is larger


def install() -> None:
    """In this process."""
    FileSystemReader.read_data = read_data


def read_data(self: FileSystemReader, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
    places = {item: self.storage_data[item.storage_index] for item in plan.items}
    in_order = sorted(plan.items, key=lambda item: (places[item].relative_path, places[item].offset))
    reading: deque[tuple[ReadItem, Future]] = deque()
    ahead = 0
    pool = ThreadPoolExecutor(min(THREADS, len(os.sched_getaffinity(0))))
    try:
        for item in in_order:
            size = places[item].length
            while reading and ahead + size > AHEAD_BYTES:
                ahead -= places[reading[0][0]].length
                _hand_over(*reading.popleft(), planner)
            reading.append((item, pool.submit(_read, self, item)))
            ahead += size
        while reading:
            _hand_over(*reading.popleft(), planner)
    finally:
        pool.shutdown(cancel_futures=True)
    done: torch.futures.Future[None] = torch.futures.Future()
    done.set_result(None)
    return done


def _read(reader: FileSystemReader, item: ReadItem) -> torch.Tensor | io.BytesIO:
    """The file is opened for each tensor: a checkpoint may have more files than a process may keep open."""
    place = reader.storage_data[item.storage_index]
    with reader.fs.create_stream(reader.fs.concat_path(reader.path, place.relative_path), "rb") as file:
        part = reader._slice_file(file, place)
        stream = reader.transforms.transform_load_stream(item, place.transform_descriptors or (), part)
        if item.type == LoadItemType.BYTE_IO:
            return io.BytesIO(stream.read(-1))
        seekable = stream if stream.seekable() else io.BytesIO(stream.read(-1))
        tensor = torch.load(seekable, map_location="cpu", weights_only=True)
        return filesystem.narrow_tensor_by_index(tensor, item.storage_offsets, item.lengths)


def _hand_over(item: ReadItem, read: Future, planner: LoadPlanner) -> None:
    """As PyTorch does it."""
    found = read.result()
    if item.type == LoadItemType.BYTE_IO:
        planner.load_bytes(item, found)
        return
    target = planner.resolve_tensor(item).detach()
    if target.size() != found.size():
        raise AssertionError(f"req {item.storage_index} mismatch sizes {target.size()} vs {found.size()}")
    target.copy_(found)
    planner.commit_tensor(item, target)
