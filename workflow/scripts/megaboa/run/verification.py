"""Is a checkpoint what was saved? It is read before the ranks that are to load it start, a large one by one task per
node; its checksums are made so at a run's end. Of what was saved or read in this life only the sizes are compared.

Files whose checksums differ are read again, in a job of several nodes by another node: one with bad memory would call
every checkpoint damaged, and lead the run back to its first step.
"""

from __future__ import annotations

import os
import shutil
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

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
MOST_SECONDS, SLOWEST = 120.0, 50e6  # a step's start; bytes a second of a node that is waited for

type Said = tuple[int, str]  # the number of the node that has read a file, and the checksum


def damage(call: Call, beginning: Beginning, target: AttemptFolder) -> str | None:
    """What is wrong with the checkpoint that an attempt begins with."""
    found = call.found  # also where there is nothing to read yet: what comes later is of this life
    folder = beginning.parent or call.payload.checkpoints
    # With a parent's weights alone a run begins at its own step 0.
    iteration = call.folder.run.parent.iteration if beginning.parent else beginning.iteration
    if not iteration or not call.resumption.verifies or not checkpoints.has_digests(folder, iteration):
        return None
    if beginning.parent is None and (iteration in call.sound or iteration not in found):
        return None
    readers = Readers(call, target)
    problem = checkpoints.damage(folder, iteration, read=readers.read, again=readers.read_again)
    if problem is None:
        readers.blame(iteration)
        if beginning.parent is None:
            call.sound.add(iteration)
    return problem


def record_checksums(call: Call, target: AttemptFolder) -> None:
    """Of what the run's end leaves: its GPUs have nothing to do until then."""
    call.patiently(lambda: call.resumption.prove_newest(Readers(call, target).read))


@dataclass
class Readers:
    """Who reads a checkpoint's files."""

    call: Call
    target: AttemptFolder
    first: dict[str, str] = field(default_factory=dict)  # which node read a file first
    doubted: list[str] = field(default_factory=list)  # files that were read again

    @property
    def nodes(self) -> Sequence[str]:
        """Of a job of several."""
        return self.call.site.nodes if self.call.site.job and len(self.call.site.nodes) > 1 else ()

    def read(self, path: Path, names: list[str]) -> dict[str, str]:
        """One task per node for a large checkpoint in a job of several."""
        size = _bytes(path, names)
        if self.nodes and size > ONE_READER_BYTES:
            found = self._by_nodes(path, size / len(self.nodes))
            if found.keys() >= set(names):
                self.first = {name: self.nodes[node] for name, (node, _) in found.items()}
                return {name: found[name][1] for name in names}
        self.first = dict.fromkeys(names, cluster().node_name(os.environ) or socket.gethostname())
        return checkpoints.read_here(path, names)

    def read_again(self, path: Path, names: list[str]) -> dict[str, str]:
        """Each file by the node after the one that read it first; here, where there is no other or it says nothing."""
        self.doubted, found = names, {}
        if self.nodes:
            after = {node: (number + 1) % len(self.nodes) for number, node in enumerate(self.nodes)}
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
            if node in self.nodes:
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
                time.sleep(0.5)
        finally:
            tasks.kill()
        said: dict[str, Said] = {}
        for answer in out.glob("*.json"):
            said |= {name: (int(answer.stem), digest) for name, digest in read(CheckpointShare, answer).digests.items()}
        return said


def _bytes(path: Path, names: list[str]) -> int:
    return sum((path / name).stat().st_size for name in names)
