"""Is a checkpoint what was saved? It is read before the ranks that are to load it start, a large one by one task per
node. Of what was saved or read in this life of the supervisor only the sizes are compared, before.
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

CHECK_CHECKPOINT = SCRIPTS / "check_checkpoint.py"
ONE_READER_BYTES = 4 << 30  # more is divided among the job's nodes


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
    divided = call.site.job and len(call.site.nodes) > 1 and checkpoints.bytes_of(folder, iteration)
    if divided and divided > ONE_READER_BYTES:
        problem = _by_nodes(call, folder, iteration, target.verified)
    else:
        problem = checkpoints.damage(folder, iteration)
    if problem is None and beginning.parent is None:
        call.sound.add(iteration)
    return problem


def _by_nodes(call: Call, folder: Path, iteration: int, out: Path) -> str | None:
    """A task on each node reads its share of the files. Where one says nothing, everything is read here."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    nodes = len(call.site.nodes)
    command = [python_of(call.folder.launch), str(CHECK_CHECKPOINT), f"--checkpoints={folder}"]
    command += [f"--iteration={iteration}", f"--out={out}"]
    tasks = call.site.start_on_nodes(command, f"verify-{out.parent.name}", out, rank_environment(call.folder))
    try:
        while tasks.poll() is None:
            if problem := next((share.problem for share in _shares(out) if share.problem), None):
                return problem
            time.sleep(0.5)
    finally:
        tasks.kill()
    shares = _shares(out)
    if len(shares) == nodes:
        return next((share.problem for share in shares if share.problem), None)
    return checkpoints.damage(folder, iteration)


def _shares(out: Path) -> list[CheckpointShare]:
    return [read(CheckpointShare, path) for path in out.glob("*.json")]
