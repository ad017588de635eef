"""Weights as safetensors files, written one file at a time: no more than one file's tensors are held in memory.

Bridge's own writer copies the files of the source; where there is none, it holds the whole model.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file

INDEX = "model.safetensors.index.json"
METADATA = {"format": "pt"}  # transformers refuses files that don't say so


def write(tensors: Iterable[tuple[str, torch.Tensor]], folder: Path, file_bytes: int) -> torch.dtype:
    """Write tensors to files of at most so many bytes (a larger tensor has one of its own); return their main type."""
    writer = _Writer(folder, file_bytes)
    for name, tensor in tensors:
        writer.add(name, _alone(tensor))
    return writer.finish()


class _Writer:
    def __init__(self, folder: Path, file_bytes: int):
        self._folder, self._limit = folder, file_bytes
        self._held: dict[str, torch.Tensor] = {}
        self._held_bytes = 0
        self._files: list[list[str]] = []
        self._bytes_by_type: Counter[torch.dtype] = Counter()
        self._weights = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        if self._held and self._held_bytes + tensor.nbytes > self._limit:
            self._flush()
        self._held[name] = tensor
        self._held_bytes += tensor.nbytes
        self._bytes_by_type[tensor.dtype] += tensor.nbytes
        self._weights += tensor.numel()

    def finish(self) -> torch.dtype:
        """Name the files as transformers does: only now is their number known."""
        self._flush()
        count = len(self._files)
        weight_map = {}
        for number, names in enumerate(self._files, start=1):
            final = "model.safetensors" if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
            self._part(number).rename(self._folder / final)
            weight_map |= dict.fromkeys(names, final)
        if count > 1:
            metadata = {"total_parameters": self._weights, "total_size": self._bytes_by_type.total()}
            index = json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=2, sort_keys=True)
            (self._folder / INDEX).write_text(index + "\n", encoding="utf-8")
        return self._bytes_by_type.most_common(1)[0][0]

    def _flush(self) -> None:
        if not self._held:
            return
        self._files.append(list(self._held))
        save_file(self._held, self._part(len(self._files)), metadata=METADATA)
        self._held, self._held_bytes = {}, 0

    def _part(self, number: int) -> Path:
        return self._folder / f"part-{number}"


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without the rest of the memory that it is a view of."""
    tensor = tensor.detach().cpu().contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()
