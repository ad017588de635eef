"""Is a checkpoint what was saved? It is read before the ranks that are to load it start, a large one by one task per
node; its checksums are made so at a run's end. Of what was saved or read in this life only the sizes are compared.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path

from megaboa.paths import AttemptFolder
from megaboa.records import CheckpointShare, read
from megaboa.run import checkpoints
from megaboa.run.call import Call
from megaboa.run.command import SCRIPTS, rank_environment
from megaboa.run.resume import Beginning
from megaboa.run.site import python_of

READ_CHECKPOINT = SCRIPTS / "read_checkpoint.py"
ONE_READER_BYTES = 4 << 30  # more is divided among the job's nodes
MOST_SECONDS, SLOWEST = 120.0, 50e6  # a step's start; bytes a second of a node that is waited for


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
    problem = checkpoints.damage(folder, iteration, read=readers(call, target))
    if problem is None and beginning.parent is None:
        call.sound.add(iteration)
    return problem


def record_checksums(call: Call, target: AttemptFolder) -> None:
    """Of what the run's end leaves: its GPUs have nothing to do until then."""
    call.patiently(lambda: call.resumption.prove_newest(readers(call, target)))


def readers(call: Call, target: AttemptFolder) -> checkpoints.Reader:
    """One task per node for a large checkpoint in a job of several."""

    def read_files(path: Path, names: list[str]) -> dict[str, str]:
        divided = call.site.job and len(call.site.nodes) > 1
        if divided and (size := sum((path / name).stat().st_size for name in names)) > ONE_READER_BYTES:
            found = _by_nodes(call, path, size, target.verified)
            if found.keys() >= set(names):
                return {name: found[name] for name in names}
        return checkpoints.read_here(path, names)

    return read_files


def _by_nodes(call: Call, path: Path, checkpoint_bytes: int, out: Path) -> dict[str, str]:
    """What the nodes say of their shares of the files: less than all, if one of them says nothing in time."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    command = [python_of(call.folder.launch), str(READ_CHECKPOINT), f"--checkpoint={path}", f"--out={out}"]
    tasks = call.site.start_on_nodes(command, f"verify-{out.parent.name}", out, rank_environment(call.folder))
    seconds = MOST_SECONDS + checkpoint_bytes / SLOWEST / len(call.site.nodes)
    deadline = time.monotonic() + seconds
    try:
        while tasks.poll() is None and not call.signals.seen and time.monotonic() < deadline:
            time.sleep(0.5)
    finally:
        tasks.kill()
    said: dict[str, str] = {}
    for answer in out.glob("*.json"):
        said |= read(CheckpointShare, answer).digests
    return said
