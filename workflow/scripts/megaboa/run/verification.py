"""Is a checkpoint what was saved? It is read while the ranks that are to load it start, on large ones by one task per
node; what was saved or read in this life of the supervisor is only looked at by its sizes, before.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

from megaboa.paths import AttemptFolder
from megaboa.records import CheckpointShare, read
from megaboa.run import checkpoints
from megaboa.run.call import Call
from megaboa.run.command import SCRIPTS, rank_environment
from megaboa.run.resume import Beginning
from megaboa.run.site import python_of

CHECK_CHECKPOINT = SCRIPTS / "check_checkpoint.py"
QUICK_SECONDS = 2.0  # small ones are read before ranks start for nothing
ONE_READER_BYTES = 4 << 30  # more is divided among the job's nodes


class Verification:
    """On its way in a thread. `problem` is None while nothing is wrong, `over` says whether all has been read."""

    def __init__(self, look: Callable[[Callable[[], bool]], str | None]):
        """`look`: returns what is wrong, and ends early when its argument says so."""
        self.problem: str | None = None
        self._stopped = threading.Event()

        def work() -> None:
            with contextlib.suppress(OSError):  # the file system's trouble, not the checkpoint's: ranks will meet it
                self.problem = look(self._stopped.is_set)

        self._thread = threading.Thread(target=work, daemon=True)
        self._thread.start()

    @property
    def over(self) -> bool:
        return not self._thread.is_alive()

    def wait(self, seconds: float | None = None) -> str | None:
        """What is wrong, as far as that is known then."""
        self._thread.join(seconds)
        return self.problem

    def stop(self) -> None:
        self._stopped.set()


def nothing_to_read() -> Verification:
    return Verification(lambda stopped: None)


def begin(call: Call, beginning: Beginning, target: AttemptFolder) -> Verification:
    """Of the checkpoint that an attempt begins with."""
    folder = beginning.parent or call.payload.checkpoints
    # With a parent's weights alone a run begins at its own step 0.
    iteration = call.folder.run.parent.iteration if beginning.parent else beginning.iteration
    if not iteration or not call.resumption.verifies or not checkpoints.has_digests(folder, iteration):
        return nothing_to_read()
    if beginning.parent is None and (iteration in call.sound or _saved_since(folder, iteration, call.began)):
        return nothing_to_read()

    def look(stopped: Callable[[], bool]) -> str | None:
        divided = call.site.job and len(call.site.nodes) > 1 and checkpoints.bytes_of(folder, iteration)
        if divided and divided > ONE_READER_BYTES:
            problem = _by_nodes(call, folder, iteration, target.verified, stopped)
        else:
            problem = checkpoints.damage(folder, iteration)
        if problem is None and not stopped() and beginning.parent is None:
            call.sound.add(iteration)
        return problem

    return Verification(look)


def _saved_since(folder: Path, iteration: int, moment: float) -> bool:
    return checkpoints.completed_at(folder).get(iteration, 0.0) >= moment


def _by_nodes(call: Call, folder: Path, iteration: int, out: Path, stopped: Callable[[], bool]) -> str | None:
    """A task on each node reads its share of the files. Where one says nothing, everything is read here."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    nodes = len(call.site.nodes)
    command = [python_of(call.folder.launch), str(CHECK_CHECKPOINT), f"--checkpoints={folder}"]
    command += [f"--iteration={iteration}", f"--out={out}"]
    tasks = call.site.start_on_nodes(command, f"verify-{out.parent.name}", out, rank_environment(call.folder))
    try:
        while tasks.poll() is None and not stopped():
            if problem := next((share.problem for share in _shares(out) if share.problem), None):
                return problem
            time.sleep(0.5)
    finally:
        tasks.kill()
    shares = _shares(out)
    if stopped() or len(shares) == nodes:
        return next((share.problem for share in shares if share.problem), None)
    return checkpoints.damage(folder, iteration)


def _shares(out: Path) -> list[CheckpointShare]:
    return [read(CheckpointShare, path) for path in out.glob("*.json")]
