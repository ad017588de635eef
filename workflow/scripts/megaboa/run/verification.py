"""Verification of checkpoints: is a checkpoint still what was saved?

It is read before the ranks that load it start. A large one is read while they start, and they wait for the result
before they load it; in a job of several nodes, one task per node reads a share. Checksums are computed in the same way
at a run's end. For checkpoints that were saved or verified in this life, only sizes are compared.

Files with wrong checksums are read again, by another node if there are several. Otherwise a node with bad memory would
declare every checkpoint damaged, and send the run back to its first step.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megaboa.causes import Cause
from megaboa.records import CheckpointShare, read
from megaboa.run import checkpoints, node_memory
from megaboa.run.call import Call
from megaboa.run.command import SCRIPTS, rank_environment
from megaboa.run.resume import Beginning
from megaboa.run.site import python_of
from megaboa.scheduler.registry import cluster
from megaboa.store_paths import AttemptFolder

READ_CHECKPOINT = SCRIPTS / "read_checkpoint.py"
ONE_READER_BYTES = 4 << 30  # a larger checkpoint is divided among the job's nodes
POLL_SECONDS = 0.5
LEAVE_SECONDS = 10.0  # for the step to end
MOST_SECONDS, SLOWEST = 120.0, 50e6  # for a step to start; bytes per second of a node that is waited for

type Said = tuple[int, str]  # number of a file's reader node, and the checksum


def takes_long(call: Call, beginning: Beginning) -> bool:
    """Whether ranks should start before the checkpoint is verified. Not for a parent's checkpoint: if that is damaged,
    the run can't be trained at all."""
    if beginning.parent or not (iteration := _unread(call, beginning)):
        return False
    return checkpoints.sizes(call.payload.checkpoints)[iteration] > ONE_READER_BYTES


def damage(call: Call, beginning: Beginning, target: AttemptFolder) -> str | None:
    """The damage of the checkpoint that an attempt starts from; None if it is sound."""
    return _damage(beginning, Readers(call, target))


def _damage(beginning: Beginning, readers: Readers) -> str | None:
    call = readers.call
    if not (iteration := _unread(call, beginning)):
        return None
    folder = beginning.parent or call.payload.checkpoints
    problem = checkpoints.damage(folder, iteration, read=readers.read, again=readers.read_again)
    if problem is None:
        readers.blame(iteration)
        if beginning.parent is None:
            call.sound.add(iteration)
    return problem


def _unread(call: Call, beginning: Beginning) -> int:
    """The checkpoint that must be read; 0 if there is none."""
    found = call.found  # evaluated here in any case, so that later checkpoints count as this life's own
    folder = beginning.parent or call.payload.checkpoints
    # With only a parent's weights, the run starts at its own step 0.
    iteration = call.folder.run.parent.iteration if beginning.parent else beginning.iteration
    if not iteration or not call.resumption.verifies or not checkpoints.has_digests(folder, iteration):
        return 0
    return 0 if beginning.parent is None and (iteration in call.sound or iteration not in found) else iteration


def _nodes(call: Call) -> Sequence[str]:
    """The job's nodes, if it has several."""
    return call.site.nodes if call.site.job and len(call.site.nodes) > 1 else ()


class Reading:
    """Verification of a checkpoint while ranks start."""

    def __init__(self, call: Call, beginning: Beginning, target: AttemptFolder):
        self._call, self._beginning, self._target = call, beginning, target
        self._readers = Readers(call, target)
        self._found: str | None = None
        self._error: Exception | None = None
        self._told = False
        target.may_load.touch()
        nodes = len(_nodes(call))
        by = f" by {nodes} nodes" if nodes else ""
        call.say(f"checkpoint {beginning.iteration} is read{by} while ranks start")
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    @property
    def goes_on(self) -> bool:
        return self._thread.is_alive()

    def problem(self) -> tuple[Cause, str] | None:
        """The reason to end the ranks. If the checkpoint is sound, they are told so once."""
        if self._told or self.goes_on:
            return None
        if self._error:
            raise self._error
        if self._found:
            self._call.resumption.set_aside(self._beginning.iteration, self._found)
        else:
            self._target.may_load.write_text("yes")
        self._told = True
        return ("damaged_checkpoint", self._found) if self._found else None

    def leave(self) -> None:
        """Stop reading, because the ranks have ended."""
        self._readers.left.set()
        self._thread.join(LEAVE_SECONDS)

    def _read(self) -> None:
        try:
            self._found = self._call.patiently(lambda: _damage(self._beginning, self._readers))
        except Exception as error:  # raised in the supervisor's own thread
            self._error = error


class _Left(Exception):
    """Nobody waits for the result any more."""


def record_checksums(call: Call, target: AttemptFolder) -> None:
    """Record checksums of the checkpoints that a finished or stopped run leaves. Its GPUs are idle meanwhile."""
    call.patiently(lambda: call.resumption.prove_newest(Readers(call, target).read))


def record_last_checksums(call: Call) -> None:
    """Record the checksums of the last checkpoint of a run that Ctrl-C ended: the next call resumes from it.

    Another signal ends the wait. A scheduler gives a cancelled job no time for it.
    """
    own, signals = call.payload.checkpoints, len(call.signals.seen)
    newest = checkpoints.latest(own)
    if call.site.job or not newest or not call.resumption.verifies or checkpoints.has_digests(own, newest):
        return
    call.say(f"checksums of checkpoint {newest} are computed; Ctrl-C ends without them")

    def add() -> None:
        with contextlib.suppress(OSError):
            checkpoints.add_digests(own, newest)

    thread = threading.Thread(target=add, daemon=True)
    thread.start()
    while thread.is_alive() and len(call.signals.seen) == signals:
        thread.join(POLL_SECONDS)


@dataclass
class Readers:
    """Readers of a checkpoint's files: the supervisor, or tasks on the job's nodes."""

    call: Call
    target: AttemptFolder
    left: threading.Event = field(default_factory=threading.Event)  # set when nobody waits for the result any more
    first: dict[str, str] = field(default_factory=dict)  # file -> the node that read it first
    doubted: list[str] = field(default_factory=list)  # files that were read again

    def read(self, path: Path, names: list[str]) -> dict[str, str]:
        """Checksums of these files; a large checkpoint is divided among the nodes of the job."""
        self.doubted = []  # may be left from an earlier try that a file system error ended
        size, nodes = _bytes(path, names), _nodes(self.call)
        if nodes and size > ONE_READER_BYTES:
            found = self._by_nodes(path, size / len(nodes))
            if found.keys() >= set(names):
                self.first = {name: nodes[node] for name, (node, _) in found.items()}
                return {name: found[name][1] for name in names}
        self.first = dict.fromkeys(names, cluster().node_name(os.environ) or socket.gethostname())
        return checkpoints.read_here(path, names)

    def read_again(self, path: Path, names: list[str]) -> dict[str, str]:
        """Checksums from a second reading, each by the node after the one that read the file first, else by the
        supervisor."""
        self.doubted, found = names, {}
        if nodes := _nodes(self.call):
            after = {node: (number + 1) % len(nodes) for number, node in enumerate(nodes)}
            shares: dict[int, list[str]] = {}
            for name in names:
                shares.setdefault(after.get(self.first[name], 0), []).append(name)
            found = self._by_nodes(path, max(_bytes(path, share) for share in shares.values()), shares)
        here = checkpoints.read_again(path, [name for name in names if name not in found])
        return here | {name: digest for name, (_, digest) in found.items()}

    def blame(self, iteration: int) -> None:
        """Report and remember nodes that misread files of a sound checkpoint. They remain in use."""
        for node in sorted({self.first[name] for name in self.doubted}):
            names = ", ".join(name for name in self.doubted if self.first[name] == node)
            said = f"{node} read {names} of checkpoint {iteration} wrongly, and a second reading was right"
            self.call.say(f"WARNING: {said}: the checkpoint is used; test the memory of {node}")
            if node in _nodes(self.call):
                node_memory.remember(self.call.folder, {node: said}, "unhealthy", self.target.number)

    def _by_nodes(self, path: Path, most: float, again: Mapping[int, list[str]] | None = None) -> dict[str, Said]:
        """Results from tasks on the nodes: for their shares of `most` bytes each, or for the files in `again`.
        Incomplete if a node doesn't answer in time."""
        call, out = self.call, self.target.verified
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        command = [python_of(call.folder.launch), str(READ_CHECKPOINT), f"--checkpoint={path}", f"--out={out}"]
        if again:
            command.append("--again")
            for node, names in again.items():
                (out / f"{node}.names").write_text("\n".join(names))
        tasks = call.site.start_on_nodes(command, f"verify-{out.parent.name}", out, rank_environment(call.folder))
        deadline = time.monotonic() + MOST_SECONDS + most / SLOWEST
        try:
            while tasks.poll() is None and not call.signals.seen and time.monotonic() < deadline:
                if self.left.wait(POLL_SECONDS):
                    raise _Left
        finally:
            tasks.kill()
        said: dict[str, Said] = {}
        for answer in out.glob("*.json"):
            said |= {name: (int(answer.stem), digest) for name, digest in read(CheckpointShare, answer).digests.items()}
        return said


def _bytes(path: Path, names: list[str]) -> int:
    return sum((path / name).stat().st_size for name in names)
