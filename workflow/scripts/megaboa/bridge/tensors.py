"""The tensors of a Hugging Face folder, read from its safetensors files one at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from megaboa.errors import InputError
from megaboa.files import read_json

if TYPE_CHECKING:
    import torch

WHOLE, INDEX_END = "model.safetensors", ".index.json"


@dataclass(frozen=True)
class Kind:
    """What a tensor is but for its values."""

    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


def files(folder: str | Path) -> list[Path]:
    """The files that transformers reads: a repository may hold the same weights in another form beside them."""
    if (whole := Path(folder, WHOLE)).exists():
        return [whole]
    index = Path(folder, WHOLE + INDEX_END)
    if index.exists():
        return [Path(folder, name) for name in sorted(set(read_json(index)["weight_map"].values()))]
    return sorted(Path(folder).glob("*.safetensors"))


def share(folder: str | Path) -> None:
    """Let others read the weights as they may read the config: safetensors writes its files for their owner alone."""
    mode = Path(folder, "config.json").stat().st_mode
    for path in files(folder):
        path.chmod(mode)


def count(folder: str | Path) -> int:
    """Number of weights; 0 where there are no safetensors files."""
    with Tensors(folder) as tensors:
        return sum(math.prod(tensors.kind(name).shape) for name in tensors)


def require_whole(folder: str | Path) -> None:
    """Refuse weights of which a file is cut off or missing, or a tensor is not where the index says."""
    index = Path(folder, WHOLE + INDEX_END)
    if missing := [path.name for path in files(folder) if not path.exists()]:
        raise InputError(f"{folder}: {missing[0]} is missing, and {index.name} names it: download or copy it again")
    with Tensors(folder) as found:
        named = read_json(index)["weight_map"].keys() if index.exists() and not Path(folder, WHOLE).exists() else []
        if lost := sorted(set(named) - set(found)):
            raise InputError(
                f"{folder}: the tensor {lost[0]} is not there, nor are {len(lost) - 1} others that {index.name} "
                "names: download or copy the folder again"
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
