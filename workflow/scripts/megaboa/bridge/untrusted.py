"""Checkpoints that anybody may have written, as in a shared store: nothing in them is executed.

PyTorch unpickles a checkpoint's index, and its entries that aren't tensors, with full rights, and a pickle may call any
function. Here it unpickles only what such files are made of. Bridge calls what a checkpoint's `run_config.yaml` names,
if its name begins like torch's, as `torch.os.system` does. Here it only makes configurations.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pickle
import re
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import numpy as np
import torch
from megatron.core.rerun_state_machine import Call, Caller
from megatron.training.config import instantiate_utils
from torch.distributed.checkpoint import (
    CheckpointException,
    DefaultLoadPlanner,
    Metadata,
    filesystem,
    metadata,
    planner,
)
from torch.distributed.checkpoint._nested_dict import set_element
from torch.distributed.checkpoint.planner import ReadItem

from megaboa.errors import InputError

# Modules whose dataclasses and enums make up an index, and what else is in one; types of tensors are, too.
OF_AN_INDEX = {one.__name__: one for one in (metadata, planner, filesystem)}
ALSO = {
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),  # as Python 3.13 writes it
    ("torch", "Size"),
    ("torch", "device"),
    ("torch.serialization", "_get_layout"),
}
# What numbers of numpy are made of; Megatron allows arrays.
OF_NUMBERS = [np.core.multiarray.scalar, *(type(np.dtype(kind)) for kind in "?bBhHiIlLqQefdgFDGSUOmM")]
OF_A_FAULT = [Call, Caller]  # of one that is calculated again from a checkpoint; Megatron allows the rest
# Packages that have more classes than those of configurations, such as readers of files.
LARGE = ("numpy", "torch", "transformers")
_refusals: list[UnsafeCheckpointError] = []  # of this process
_call = instantiate_utils._call_target
_REFUSED = re.compile(r"GLOBAL (\S+) (?:was not an allowed global|whose module)")  # by torch.load


class UnsafeCheckpointError(InputError):
    """A checkpoint asks for something that could run commands."""


def install() -> None:
    """Restrict what PyTorch unpickles in this process."""
    filesystem.pickle = SimpleNamespace(load=load_index, dump=pickle.dump)
    DefaultLoadPlanner.load_bytes = load_bytes
    torch.serialization.add_safe_globals([*OF_NUMBERS, *OF_A_FAULT])
    instantiate_utils._call_target = call_target


@contextlib.contextmanager
def told(checkpoint: Path) -> Iterator[None]:
    """Raise the refusal itself, with the checkpoint's name. PyTorch raises an exception that only has its text."""
    before = len(_refusals)
    try:
        yield
    except CheckpointException:
        if len(_refusals) == before:
            raise
        raise _refusals[-1] from None
    except UnsafeCheckpointError as error:
        raise error if str(checkpoint) in str(error) else UnsafeCheckpointError(f"{checkpoint}: {error}") from None


def load_index(stream: IO[bytes]) -> Any:
    found = _Index(stream).load()
    if isinstance(found, Metadata):
        found.read_from = Path(getattr(stream, "name", ".")).parent  # for messages
    return found


class _Index(pickle.Unpickler):
    def __init__(self, stream: IO[bytes]) -> None:
        super().__init__(stream)
        self._name = getattr(stream, "name", "the checkpoint's index")

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in ALSO:
            return super().find_class(module, name)
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        found = getattr(OF_AN_INDEX.get(module), name, None)
        if isinstance(found, type) and found.__module__ == module and _holds_data(found):
            return found
        raise _refused(self._name, f"{module}.{name}")


def _holds_data(kind: type) -> bool:
    return dataclasses.is_dataclass(kind) or issubclass(kind, Enum)


def load_bytes(self: DefaultLoadPlanner, read_item: ReadItem, value: IO[bytes]) -> None:
    """`DefaultLoadPlanner.load_bytes`, with `weights_only`."""
    try:
        loaded = torch.load(value, weights_only=True)
    except pickle.UnpicklingError as error:
        if not (named := _REFUSED.search(str(error))):
            raise
        index = getattr(self, "metadata", None)
        place = index.storage_data[read_item.storage_index].relative_path if index else ""
        file = Path(getattr(index, "read_from", ""), place)
        raise _refused(f"{file}, entry {read_item.dest_index.fqn}", named[1]) from None
    name = read_item.dest_index.fqn
    if self.flatten_state_dict:
        set_element(self.original_state_dict, self.mappings[name], loaded)
    else:
        self.state_dict[name] = loaded


def call_target(target: Any, partial: bool, args: Any, kwargs: Any, key: str) -> Any:
    """`instantiate_utils._call_target`: functions may only be named, and classes called, or their `from_dict`."""
    kind = target
    if getattr(target, "__name__", "") == "from_dict":
        kind = getattr(target, "__self__", None)
    package = (getattr(kind, "__module__", None) or "").partition(".")[0]
    allowed = {prefix.partition(".")[0] for prefix in instantiate_utils.target_allowlist.allowed_prefixes}
    if package in allowed and (partial or (isinstance(kind, type) and _configures(kind, package))):
        return _call(target, partial, args, kwargs, key)
    named = f"{getattr(target, '__module__', None)}.{getattr(target, '__qualname__', target)}"
    raise _refused(f"run_config.yaml{', ' if key else ''}{key}", named)


def _configures(kind: type, package: str) -> bool:
    return package not in LARGE or _holds_data(kind) or kind.__name__.endswith("Config")


def _refused(place: str, name: str) -> UnsafeCheckpointError:
    _refusals.append(
        UnsafeCheckpointError(
            f"{place}: asks for {name}, which isn't data and could run any command: nothing of it was loaded. Find out "
            "who wrote this checkpoint, and copy it again from where it was trained, or remove it"
        )
    )
    return _refusals[-1]
