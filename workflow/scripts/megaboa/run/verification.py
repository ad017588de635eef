"""Is a checkpoint what was saved? It is read before the ranks that are to load it start, a large one while they start,
in a job of several nodes by one task per node: they wait for the word before they load it. Its checksums are made so
at a run's end. Of what was saved or read in this life only the sizes are compared.

Files whose checksums differ are read again, in a job of several nodes by another node: one with bad memory would call
every checkpoint damaged, and lead the run back to its first step.
"""

from __future__ import annotations

import os
import shutil
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megaboa.causes import Cause
from megaboa.paths import AttemptFolder
from megaboa.records import CheckpointShare, read
from megaboa.run import checkpoints, node_memory
from megaboa.run.call import Call
from megaboa.run.command import SCRIPTS, rank_environment
from megaboa.run.resume import Beginning
from megaboa.run.site import python_of
from megaboa.scheduler.registry import cluster

READ_CHECKPOINT = SCRIPTS / "read_checkpoint.py"
ONE_READER_BYTES = 4 << 30  # more is divided among the job's nodes
POLL_SECONDS = 0.5
LEAVE_SECONDS = 10.0  # for a step to be ended
MOST_SECONDS, SLOWEST = 120.0, 50e6  # a step's start; bytes a second of a node that is waited for

type Said = tuple[int, str]  # the number of the node that has read a file, and the checksum


def takes_long(call: Call, beginning: Beginning) -> bool:
    """Whether ranks had better start meanwhile. A parent's checkpoint is read before: if it is damaged, nothing can be
    trained."""
    if beginning.parent or not (iteration := _unread(call, beginning)):
        return False
    return checkpoints.sizes(call.payload.checkpoints)[iteration] > ONE_READER_BYTES


def damage(call: Call, beginning: Beginning, target: AttemptFolder) -> str | None:
    """What is wrong with the checkpoint that an attempt begins with."""
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
    """The checkpoint that is to be read; 0 if there is none."""
    found = call.found  # also where there is nothing to read yet: what comes later is of this life
    folder = beginning.parent or call.payload.checkpoints
    # With a parent's weights alone a run begins at its own step 0.
    iteration = call.folder.run.parent.iteration if beginning.parent else beginning.iteration
    if not iteration or not call.resumption.verifies or not checkpoints.has_digests(folder, iteration):
        return 0
    return 0 if beginning.parent is None and (iteration in call.sound or iteration not in found) else iteration


def _nodes(call: Call) -> Sequence[str]:
    """Of a job of several."""
    return call.site.nodes if call.site.job and len(call.site.nodes) > 1 else ()


class Reading:
    """A checkpoint that is read while ranks start."""

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
        """For which ranks are ended. Where there is none they get the word, once."""
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
        """The ranks have ended."""
        self._readers.left.set()
        self._thread.join(LEAVE_SECONDS)

    def _read(self) -> None:
        try:
            self._found = self._call.patiently(lambda: _damage(self._beginning, self._readers))
        except Exception as error:  # the supervisor's own thread raises it
            self._error = error


class _Left(Exception):
    """Nobody waits for what is read."""


def record_checksums(call: Call, target: AttemptFolder) -> None:
    """Of what the run's end leaves: its GPUs have nothing to do until then."""
    call.patiently(lambda: call.resumption.prove_newest(Readers(call, target).read))


@dataclass
class Readers:
    """Who reads a checkpoint's files."""

    call: Call
    target: AttemptFolder
    left: threading.Event = field(default_factory=threading.Event)  # set when nobody waits for it any more
    first: dict[str, str] = field(default_factory=dict)  # which node read a file first
    doubted: list[str] = field(default_factory=list)  # files that were read again

    def read(self, path: Path, names: list[str]) -> dict[str, str]:
        """One task per node for a large checkpoint in a job of several."""
        self.doubted = []  # by an earlier try, which the file system has ended
        size, nodes = _bytes(path, names), _nodes(self.call)
        if nodes and size > ONE_READER_BYTES:
            found = self._by_nodes(path, size / len(nodes))
            if found.keys() >= set(names):
                self.first = {name: nodes[node] for name, (node, _) in found.items()}
                return {name: found[name][1] for name in names}
        self.first = dict.fromkeys(names, cluster().node_name(os.environ) or socket.gethostname())
        return checkpoints.read_here(path, names)

    def read_again(self, path: Path, names: list[str]) -> dict[str, str]:
        """Each file by the node after the one that read it first; by the supervisor if that fails."""
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
        """Of a checkpoint that is sound: who read it wrongly. Such a node is remembered, and used all the same."""
        for node in sorted({self.first[name] for name in self.doubted}):
            names = ", ".join(name for name in self.doubted if self.first[name] == node)
            said = f"{node} read {names} of checkpoint {iteration} wrongly, and a second reading was right"
            self.call.say(f"WARNING: {said}: the checkpoint is used; test the memory of {node}")
            if node in _nodes(self.call):
                node_memory.remember(self.call.folder, {node: said}, "unhealthy", self.target.number)

    def _by_nodes(self, path: Path, most: float, again: Mapping[int, list[str]] | None = None) -> dict[str, Said]:
        """What the nodes say of their shares of the files, `most` bytes each, or of those that they are to read
        `again`: less than all, if one of them says nothing in time."""
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
