"""Comparison of checkpoints: every tensor, the counters, and the random number states.

They are read as PyTorch's distributed checkpoints, by name and without a model. So checkpoints of different layouts can
be compared, with memory for two tensors at a time.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from megaboa.bridge import untrusted
from megaboa.records import Tree

OPTIMIZER = "optimizer."
SHARDS = "optimizer.distributed."  # prefix of optimizer shards that belong to ranks, if the state wasn't gathered
COMMON, RANDOM = "common_state", "rng_state"
# Megatron pads their rows to a multiple for tensor parallel ranks.
PADDED = ("word_embeddings.weight", "output_layer.weight")
PIECE = 1 << 24  # elements compared at a time: 64 MB in fp32
OF_LAYOUT = {"params", "is_expert_parallel"}  # fields of a parameter group that depend on the layout
# Counters of `train_state.pt` that are the same in every layout.
COUNTED = ("step", "consumed_train_samples", "skipped_train_samples", "consumed_valid_samples")


@dataclass(frozen=True)
class Distance:
    """Distance of a tensor from the reference's."""

    relative: float  # the norm of the difference, divided by the reference's norm
    numbers: int = 0  # number of elements that differ
    of: int = 0

    @property
    def equal(self) -> bool:
        return self.numbers == 0


class Checkpoint:
    def __init__(self, folder: Path):
        self.folder = folder

    @cached_property
    def _reader(self) -> dcp.FileSystemReader:
        return dcp.FileSystemReader(self.folder)

    @cached_property
    def _kinds(self) -> Tree:
        return self._reader.read_metadata().state_dict_metadata

    @cached_property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors, by name."""
        return {name: tuple(kind.size) for name, kind in self._kinds.items() if hasattr(kind, "size")}

    @property
    def has_shards(self) -> bool:
        """Whether the optimizer's tensors are shards of ranks, not states of parameters."""
        return any(name.startswith(SHARDS) for name in self.tensors)

    def tensor(self, name: str) -> torch.Tensor:
        kind = self._kinds[name]
        wanted = {name: torch.empty(kind.size, dtype=kind.properties.dtype)}
        dcp.load(wanted, storage_reader=self._reader, no_dist=True)
        return wanted[name]

    def objects(self, prefix: str) -> Tree:
        """The entries that aren't tensors, by name."""
        names = [name for name, kind in self._kinds.items() if not hasattr(kind, "size") and name.startswith(prefix)]
        wanted: Tree = {name: io.BytesIO() for name in names}
        if names:
            with untrusted.told(self.folder):
                dcp.load(wanted, storage_reader=self._reader, no_dist=True)
        return wanted

    @cached_property
    def counters(self) -> Tree:
        """The run's counters according to every part of its state, and the optimizer's settings."""
        states = [state for found in self.objects(COMMON).values() for state in found]
        return counters(states, torch.load(self.folder / "train_state.pt", weights_only=True))


def counters(states: Collection[Tree], train_state: Tree) -> Tree:
    """The counters of a checkpoint. `states`: its entries that aren't tensors."""
    found = {name: _plain(train_state[name]) for name in COUNTED if name in train_state}
    for state in states:
        found |= {f"schedule.{name}": value for name, value in (state.get("opt_param_scheduler") or {}).items()}
    groups = [group for state in states for group in _groups(state.get("optimizer") or {})]
    # As a set of values, because a layout may have one more group with the same settings.
    for name in sorted({name for group in groups for name in group} - OF_LAYOUT):
        values = {repr(_plain(group[name])) for group in groups if name in group}
        found[f"optimizer.{name}"] = " and ".join(sorted(values))
    return found


def _groups(state: Any) -> Iterator[Tree]:
    """The parameter groups of all optimizers."""
    if isinstance(state, dict):
        for name, part in state.items():
            if name == "param_groups":
                yield from part
            else:
                yield from _groups(part)


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def same(one: Any, other: Any) -> bool:
    """Whether two trees of numbers and tensors are equal to the last bit."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.shape == other.shape and distance(one, other).equal
    if isinstance(one, io.BytesIO):
        return isinstance(other, io.BytesIO) and one.getvalue() == other.getvalue()
    if isinstance(one, Mapping):
        return isinstance(other, Mapping) and one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    if type(one).__module__ == "numpy":
        return type(one) is type(other) and repr(one.tolist()) == repr(other.tolist())
    return bool(one == other)


@dataclass(frozen=True)
class Difference:
    """Differences between the tensors of two checkpoints. `missing`: tensors that one of them lacks, or of different
    shapes."""

    distances: dict[str, Distance]
    missing: tuple[str, ...]

    def part(self, optimizer: bool) -> Difference:
        """Only the differences in the optimizer's tensors, or only those in the weights."""
        chosen = {name: one for name, one in self.distances.items() if name.startswith(OPTIMIZER) == optimizer}
        return Difference(chosen, tuple(name for name in self.missing if name.startswith(OPTIMIZER) == optimizer))

    @property
    def largest(self) -> float:
        return max((one.relative for one in self.distances.values()), default=0.0)

    @property
    def equal(self) -> bool:
        return not self.missing and all(one.equal for one in self.distances.values())


def differences(reference: Checkpoint, others: Mapping[str, Checkpoint]) -> dict[str, Difference]:
    """The differences between each of the other checkpoints and the reference, whose tensors are read only once."""
    distances: dict[str, dict[str, Distance]] = {name: {} for name in others}
    missing = {name: sorted(_missing(other, reference)) for name, other in others.items()}
    for tensor, shape in reference.tensors.items():
        wanted = {name: other for name, other in others.items() if _comparable(tensor, shape, other)}
        expected = reference.tensor(tensor) if wanted else None
        for name, other in wanted.items():
            distances[name][tensor] = distance(expected, other.tensor(tensor))
    return {name: Difference(distances[name], tuple(missing[name])) for name in others}


def _missing(other: Checkpoint, reference: Checkpoint) -> Iterator[str]:
    for name in {*other.tensors, *reference.tensors}:
        shape = reference.tensors.get(name)
        if shape is None or not _comparable(name, shape, other):
            yield name


def _comparable(name: str, shape: tuple[int, ...], other: Checkpoint) -> bool:
    theirs = other.tensors.get(name)
    return theirs == shape or (theirs is not None and name.endswith(PADDED) and theirs[1:] == shape[1:])


def distance(expected: torch.Tensor, found: torch.Tensor) -> Distance:
    """The distance over the rows that both tensors have."""
    rows = min(len(expected), len(found)) if expected.dim() else None
    one, other = expected[:rows].flatten(), found[:rows].flatten()  # [:None] takes all
    count, apart, size = 0, 0.0, 0.0
    for begin in range(0, one.numel(), PIECE):
        ours, theirs = one[begin : begin + PIECE], other[begin : begin + PIECE]
        count += int((_bits(ours) != _bits(theirs)).any(-1).sum())
        size += float(ours.double().square().sum())
        apart += float((ours.double() - theirs.double()).square().sum())
    if count == 0:
        return Distance(0.0, 0, one.numel())
    relative = math.sqrt(apart / size) if size else math.inf
    return Distance(math.inf if math.isnan(relative) else relative, count, one.numel())


def _bits(numbers: torch.Tensor) -> torch.Tensor:
    """The bytes of each element, as a row."""
    return numbers.contiguous().view(torch.uint8).reshape(numbers.numel(), -1)


def short(name: str) -> str:
    """A readable name: for the optimizer's state, it refers to the weight."""
    found = re.fullmatch(r"optimizer\.state\.(\w+?)\.(.+)", name)
    return f"{found[1]} of {found[2]}" if found else name
