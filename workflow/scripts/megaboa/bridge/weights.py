"""The weights in a Hugging Face folder: its safetensors files, read tensor by tensor and written file by file.

Bridge's own writer copies the source's files or, if there are none, holds the whole model in memory. Here memory is
needed for one file's tensors at most.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from megaboa.errors import InputError
from megaboa.files import read_json
from megaboa.formats import counted

if TYPE_CHECKING:
    import torch

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
OS_ERROR = re.compile(r"os error (\d+)")  # in safetensors' message for an error such as a full disk
METADATA = {"format": "pt"}  # transformers refuses files without it


@dataclass(frozen=True)
class Kind:
    """Shape and type of a tensor."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def is_float(self) -> bool:
        """Whether it holds numbers as they are; quantized ones are packed into integers, in another shape."""
        return self.dtype.startswith(("F", "BF"))

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


PART = re.compile(r"-\d+-of-\d+\.safetensors$")


def files(folder: str | Path) -> list[Path]:
    """The files that transformers reads; a repository may also have the weights in other formats."""
    if (whole := Path(folder, WHOLE)).exists():
        return [whole]
    index = Path(folder, INDEX)
    if index.exists():
        return [Path(folder, name) for name in sorted(set(read_json(index)["weight_map"].values()))]
    return sorted(Path(folder).glob("*.safetensors"))


def is_of_weights(name: str) -> bool:
    """Whether a file holds the model's weights; adapters are in a folder of their own."""
    return "/" not in name and (name.endswith(".safetensors") or name == INDEX)


def share(folder: str | Path) -> None:
    """Give weight files the config's permissions, because safetensors makes them readable for their owner only."""
    mode = Path(folder, "config.json").stat().st_mode
    for path in files(folder):
        path.chmod(mode)


def count(folder: str | Path) -> int:
    """Number of weights; 0 without safetensors files."""
    with Tensors(folder) as tensors:
        return sum(math.prod(tensors.kind(name).shape) for name in tensors)


def require_whole(folder: str | Path) -> None:
    """Refuse weights with a truncated or missing file, or with a tensor that is not where the index says."""
    index, paths = Path(folder, INDEX), files(folder)
    if not index.exists() and (parts := [path.name for path in paths if PART.search(path.name)]):
        raise InputError(f"{folder}: {parts[0]} is a part of the weights, and {index.name} is missing: copy it, too")
    if missing := [path.name for path in paths if not path.exists()]:
        raise InputError(f"{folder}: {missing[0]} is missing, and {index.name} names it: download or copy it again")
    with Tensors(folder) as found:
        named = read_json(index)["weight_map"].keys() if index.exists() and not Path(folder, WHOLE).exists() else []
        if lost := sorted(set(named) - set(found)):
            raise InputError(
                f"{folder}: {index.name} names {counted(len(lost), 'tensor')} that no file has, such as {lost[0]}: "
                "download or copy the folder again"
            )


class Tensors:
    """A context in which tensors can be looked up by name."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def __enter__(self) -> Tensors:
        from safetensors import SafetensorError, safe_open

        self._stack = ExitStack()
        self._open = {}
        for path in files(self.folder):
            try:
                stream = self._stack.enter_context(safe_open(path, framework="pt"))
            except SafetensorError as error:
                self._stack.close()
                raise InputError(f"{path} is damaged ({error}): download, copy or make it again") from error
            self._open |= dict.fromkeys(stream.keys(), stream)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()

    def __iter__(self) -> Iterator[str]:
        return iter(self._open)

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, name: str) -> bool:
        return name in self._open

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._open[name].get_tensor(name)

    def kind(self, name: str) -> Kind:
        """Shape and type, without reading the tensor."""
        part = self._open[name].get_slice(name)
        return Kind(tuple(part.get_shape()), part.get_dtype())

    def kinds(self) -> dict[str, Kind]:
        return {name: self.kind(name) for name in self}


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
            final = WHOLE if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
            self._part(number).rename(self._folder / final)
            weight_map |= dict.fromkeys(names, final)
        if count > 1:
            metadata = {"total_parameters": self._weights, "total_size": self._bytes_by_type.total()}
            index = json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=2, sort_keys=True)
            (self._folder / INDEX).write_text(index + "\n", encoding="utf-8")
        return self._bytes_by_type.most_common(1)[0][0]

    def _flush(self) -> None:
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        if not self._held:
            return
        self._files.append(list(self._held))
        path = self._part(len(self._files))
        try:
            save_file(self._held, path, metadata=METADATA)
        except SafetensorError as error:
            if (code := OS_ERROR.search(str(error))) is None:
                raise
            raise OSError(int(code[1]), os.strerror(int(code[1])), str(path)) from error
        self._held, self._held_bytes = {}, 0

    def _part(self, number: int) -> Path:
        return self._folder / f"part-{number}"


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in memory of its own, if it is a view of a larger one."""
    tensor = tensor.detach().cpu().contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()
