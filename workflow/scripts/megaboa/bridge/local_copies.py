"""Copies of a run's state on the nodes, every few steps: what Bridge calls local checkpoints, without NVRx.

Bridge saves and loads them (`non_persistent_ckpt_type: local`) through a manager, which it takes from
nvidia-resiliency-ext. This is another one with the same methods. Its copies carry checksums, belong to one run and one
attempt, and are found by what is on a node and not by the number of the rank that looks
(docs/decisions/0066-local-copies.md).

    <folder>/megaboa-<user>/<run>/<name>/<host>/iter_0000015/3.pt, 3.json     of rank 3; also of the partner's ranks
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import distributed

from megaboa import files
from megaboa.errors import InputError
from megaboa.paths import RunFolder
from megaboa.records import LocalBeginning, LocalName, LocalPart, plain, read, read_if_there, write
from megaboa.store_paths import AttemptFolder, RunStore

NONE = -1  # Bridge's value for "there is none"
PIECE = 1 << 28  # bytes per message between two nodes
# A copy is read in the layout that saved it, so no rank needs to gather the optimizer's state for others.
AS_IT_LIES = {"dist_ckpt_optim_fully_reshardable": False, "async_save": False}

type Key = tuple[int, int]  # iteration and attempt


def place(folder: Path, store: RunStore, name: str) -> Path:
    """The folder of this host's copies, below one that belongs to this user alone and is created here: copies are
    pickles, so nobody else may write there."""
    if not folder.is_dir():
        raise InputError(
            f"checkpoint.local.folder {folder} isn't a folder on {socket.gethostname()}: make it on every node, or "
            "name another one"
        )
    own = folder / f"megaboa-{os.getuid()}"
    if not files.is_ours_alone(own):
        raise InputError(
            f"checkpoint.local.folder: {own} on host {socket.gethostname()} can't be written, or belongs to another "
            "user: name another folder"
        )
    run = "-".join(store.path.parts[-3:])
    return own / f"{run}-{files.digest(str(store.path.resolve()))[:8]}" / name / socket.gethostname()


def refuse(config: Any) -> None:
    """Refuse configurations whose copies would be incomplete or of no use, or that lack checkpoints to fall back on."""
    saved, optimizer = config.checkpoint, str(config.optimizer.optimizer)
    why = None
    if saved.ckpt_format != "torch_dist":
        why = f"checkpoints in the format {saved.ckpt_format} aren't made of parts that a rank could keep for itself"
    elif config.peft is not None:
        why = "adapters are resumed from checkpoints alone"
    elif optimizer not in ("adam", "sgd", "muon"):
        why = f"the optimizer {optimizer} keeps its state in files of its own"
    elif config.train.exit_interval or config.train.exit_duration_in_mins:
        why = "train.exit_interval and train.exit_duration_in_mins end a run without a checkpoint after a copy"
    elif not saved.save:
        why = "a run that saves no checkpoint has nothing to fall back on"
    if why:
        raise InputError(f"checkpoint.local: {why}: remove it")


class LocalCopies:
    """Bridge's local checkpoint manager. All ranks call each method at the same time."""

    def __init__(
        self,
        root: Path,
        attempt: int,
        per_node: int,
        newer_than: int | None,
        since: int,
        partner: bool,
        begins: Callable[[int], None],
    ):
        """`newer_than`: step of the existing checkpoint; None: copies must not be used. `since`: the first attempt
        whose copies count.

        `begins` is called with the step whose copies are about to be read, or with NONE if there are none.
        """
        self._root, self._attempt, self._per_node, self._begins = root, attempt, per_node, begins
        self._newer_than, self._since, self._partner = newer_than, since, partner
        self._rank, self._world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._found: int | None = None
        self._state: Any = None
        self._damaged: set[Path] = set()  # so that each is tried only once, even if it can't be renamed
        self._group: Any = None
        self.saved = 0  # the step of the last checkpoint
        self.copied: Callable[[int, float], None] | None = None  # called with the step and the seconds that a copy took

    @property
    def local_ckpt_dir(self) -> str:
        return str(self._root)

    def find_latest(self) -> int:
        """The step of the newest complete and unchanged copies, over all nodes."""
        if self._found is None:
            self._group = distributed.new_group(backend="gloo")
            self._found = NONE if self._newer_than is None else self._choose(self._newer_than)
            self._remove_others()
        return self._found

    def load(self) -> tuple[Any, str]:
        state, self._state = self._state, None
        return state, str(self._root / _folder(self._found or 0))

    def save(self, state: Any, iteration: int, is_async: bool = False) -> None:
        """Save a copy. If one can't be written, the previous copies are kept, and training goes on."""
        state.copy_tensors_to_cpu()
        buffer = io.BytesIO()
        torch.save(state, buffer)
        mine = buffer.getbuffer()
        kept = self._keep(self._rank, iteration, mine)
        if self._partner:
            others = self._swap(mine)
            kept = self._keep((self._rank - self._per_node) % self._world, iteration, others) and kept
        if all(self._gathered(kept)):
            self._remove(lambda one: one < iteration)
        else:
            self._remove(lambda one: one == iteration)
            if self._rank == 0:
                _say(f"WARNING: no copies of step {iteration} on the nodes: not every one could write its own")

    @property
    def taken(self) -> bool:
        return self._found not in (None, NONE)

    def forget_at(self, last: int) -> None:
        """Remove all copies at the run's end, if the last step's checkpoint is complete."""
        if self.saved >= last and int(os.environ["LOCAL_RANK"]) == 0:
            shutil.rmtree(self._root.parents[1], ignore_errors=True)

    def _choose(self, newer_than: int) -> int:
        """Load the newest complete copies. Damaged parts are set aside, and the next newest are tried.

        This terminates, because a part only counts at its own place, and a rank that fails to read it excludes it.
        """
        everyone = {*range(self._world)}
        while True:
            there = self._gathered({key: sorted(parts) for key, parts in self._parts().items()})
            keys = {key for found in there for key in found if key[0] > newer_than and key[1] >= self._since}
            covered = {key: {rank for found in there for rank in found.get(key, ())} for key in keys}
            key = max((key for key, ranks in covered.items() if ranks >= everyone), default=None)
            if key is None:
                self._begins(NONE)
                return NONE
            self._begins(key[0])  # failures from here on are attributed to the copies
            holders = [self._holder(rank, key, there) for rank in range(self._world)]
            read = {rank: self._read(key, rank) for rank in range(self._world) if holders[rank] == self._rank}
            if all(self._gathered(all(data is not None for data in read.values()))):
                mine = self._handed_out(read, holders)
                self._state = torch.load(io.BytesIO(mine), weights_only=False, map_location="cpu")
                self._state.restore_tensor_device(non_blocking=False)
                return key[0]

    def _holder(self, rank: int, key: Key, there: list[dict[Key, list[int]]]) -> int:
        """The rank that reads another one's part: the rank itself, if its node has the part."""
        holders = [holder for holder, found in enumerate(there) if rank in found.get(key, ())]
        return rank if rank in holders else holders[rank % len(holders)]  # spreads the work over the node's ranks

    def _parts(self) -> dict[Key, set[int]]:
        """The ranks whose parts this node has, judged by place and size."""
        found: dict[Key, set[int]] = {}
        for path in {*self._root.glob("iter_*/*.json")} - self._damaged:
            with contextlib.suppress(OSError, ValueError):
                part = read(LocalPart, path)
                if path != self._place(part.iteration, part.rank).with_suffix(".json"):
                    self._set_aside(path)
                elif part.world_size == self._world and path.with_suffix(".pt").stat().st_size == part.bytes:
                    found.setdefault((part.iteration, part.attempt), set()).add(part.rank)
        return found

    def _read(self, key: Key, rank: int) -> bytearray | None:
        """A part's content; None if it has changed since it was written, in which case it is set aside for good."""
        path = self._place(key[0], rank)
        with contextlib.suppress(OSError, ValueError):
            data = bytearray(path.stat().st_size)
            with path.open("rb") as stream:
                stream.readinto(data)
            if _digest(data) == read(LocalPart, path.with_suffix(".json")).sha256:
                return data
        self._set_aside(path.with_suffix(".json"))
        return None

    def _set_aside(self, record: Path) -> None:
        self._damaged.add(record)
        try:
            record.replace(record.with_suffix(".damaged"))
        except FileNotFoundError:
            return  # another rank of this node was faster
        except OSError:
            pass
        part = record.with_suffix(".pt")
        _say(f"WARNING: {part} on host {socket.gethostname()} has changed since it was written, and is not used")

    def _place(self, iteration: int, rank: int) -> Path:
        return self._root / _folder(iteration) / f"{rank}.pt"

    def _keep(self, rank: int, iteration: int, data: memoryview) -> bool:
        """Write a part and then its record. Neither is flushed to disk, as a checksum shows losses after a power
        failure."""
        path = self._place(iteration, rank)
        part = LocalPart(
            iteration=iteration,
            rank=rank,
            attempt=self._attempt,
            world_size=self._world,
            bytes=len(data),
            sha256=_digest(data),
        )
        try:
            path.with_suffix(".json").unlink(missing_ok=True)
            files.write_bytes(path, data, durable=False)
            files.write_bytes(path.with_suffix(".json"), files.canonical(plain(part)).encode(), durable=False)
        except OSError as error:
            _say(f"WARNING: {path} on host {socket.gethostname()} can't be written: {error}")
            return False
        return True

    def _swap(self, mine: memoryview) -> memoryview:
        """Send this rank's part to the same place on the next node, and receive that of the previous node."""
        target, source = ((self._rank + step) % self._world for step in (self._per_node, -self._per_node))
        sizes = self._gathered(len(mine))
        theirs = bytearray(sizes[source])
        waiting = [*self._sent(mine, target), *self._received(theirs, source)]
        for one in waiting:
            one.wait()
        return memoryview(theirs)

    def _handed_out(self, read: dict[int, bytearray | None], holders: list[int]) -> bytearray:
        """This rank's part, read here or received from a node that has it."""
        known = self._gathered({rank: len(data or b"") for rank, data in read.items()})
        mine, waiting = read.pop(self._rank, None), []
        for rank, data in read.items():
            waiting += self._sent(memoryview(data or b""), rank)
        if mine is None:
            mine = bytearray(known[holders[self._rank]][self._rank])
            waiting += self._received(mine, holders[self._rank])
        for one in waiting:
            one.wait()
        return mine

    def _sent(self, data: memoryview, target: int) -> Iterator[Any]:
        for piece in _pieces(data):
            yield distributed.isend(piece, target, group=self._group)

    def _received(self, data: bytearray, source: int) -> Iterator[Any]:
        for piece in _pieces(memoryview(data)):
            yield distributed.irecv(piece, source, group=self._group)

    def _gathered(self, value: Any) -> list[Any]:
        found: list[Any] = [None] * self._world
        distributed.all_gather_object(found, value, group=self._group)
        return found

    def _remove_others(self) -> None:
        """Remove copies of other steps, and those under the run's earlier names, once all ranks have read theirs."""
        if int(os.environ["LOCAL_RANK"]) == 0:
            self._remove(lambda one: one != self._found)
            name = self._root.parent
            for other in name.parent.glob("*"):
                if other != name:
                    shutil.rmtree(other, ignore_errors=True)
        distributed.barrier(group=self._group)

    def _remove(self, which: Callable[[int], bool]) -> None:
        for path in self._root.glob("iter_*"):
            if which(int(path.name.removeprefix("iter_"))):
                shutil.rmtree(path, ignore_errors=True)


def attach(
    config: Any,
    checkpointing: ModuleType,
    run: RunFolder,
    store: RunStore,
    attempt: AttemptFolder,
    name: str,
    newer_than: int | None,
) -> LocalCopies:
    """Have Bridge make copies, and start from them if they are newer than the checkpoint that it would load."""
    from megatron.core.dist_checkpointing import tensor_aware_state_dict

    wanted = run.launch.checkpoint["local"]
    refuse(config)
    instead = config.checkpoint.load, config.checkpoint.pretrained_checkpoint

    def begins(iteration: int) -> None:
        """Record the step before its copies are read, so that the supervisor knows it even if the ranks die then."""
        taken = iteration != NONE  # Bridge looks for a checkpoint after this
        config.checkpoint.load, config.checkpoint.pretrained_checkpoint = (None, None) if taken else instead
        if int(os.environ["RANK"]) == 0:
            attempt.local_beginning.unlink(missing_ok=True)
            if taken:
                write(attempt.local_beginning, LocalBeginning(iteration=iteration))
                _say(f"continues from the nodes' copies of step {iteration}")

    root = place(Path(wanted["folder"]), store, name)
    known = read_if_there(LocalName, store.local_copies)
    since = known.since if known else 1
    nodes, per_node = run.launch.nodes, run.launch.gpus_per_node
    copies = LocalCopies(
        root, attempt.number, per_node, newer_than, since, wanted["partner"] is not False and nodes > 1, begins
    )
    saved = config.checkpoint
    saved.non_persistent_ckpt_type, saved.non_persistent_local_ckpt_algo = "local", "atomic"
    saved.non_persistent_save_interval, saved.non_persistent_local_ckpt_dir = wanted["every"], str(root)
    # The class is megatron-core's own; it only takes an interface from NVRx.
    tensor_aware_state_dict.HAVE_NVRX = True
    checkpointing.init_checkpointing_context = lambda config: {"local_checkpoint_manager": copies}
    save, load = checkpointing.save_checkpoint, checkpointing.load_checkpoint

    def save_checkpoint(*arguments: Any, non_persistent_ckpt: bool = False, **named: Any) -> None:
        began, step = time.time(), int(named["state"].train_state.step)
        if not non_persistent_ckpt:
            save(*arguments, **named)
            copies.saved = step
            return
        with _set(saved, **AS_IT_LIES):
            save(*arguments, non_persistent_ckpt=True, **{**named, "callback_manager": None})
        if copies.copied:
            copies.copied(step, time.time() - began)

    def load_checkpoint(*arguments: Any, **named: Any) -> Any:
        with _set(saved, **AS_IT_LIES) if copies.taken else contextlib.nullcontext():
            return load(*arguments, **named)

    checkpointing.save_checkpoint, checkpointing.load_checkpoint = save_checkpoint, load_checkpoint
    return copies


@contextlib.contextmanager
def _set(section: Any, **values: Any) -> Iterator[None]:
    before = {name: getattr(section, name) for name in values}
    for name, value in values.items():
        setattr(section, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(section, name, value)


def _digest(data: bytearray | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()


def _folder(iteration: int) -> str:
    return f"iter_{iteration:07d}"


def _pieces(data: memoryview) -> Iterator[torch.Tensor]:
    for begin in range(0, len(data), PIECE):
        yield torch.frombuffer(data[begin : begin + PIECE], dtype=torch.uint8)


def _say(text: str) -> None:
    sys.stderr.write(f"megaboa: {text}\n")
    sys.stderr.flush()
