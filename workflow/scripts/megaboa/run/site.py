"""The place of a run's supervisor, the start of processes there, and the health of its nodes."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from megaboa import scheduler
from megaboa.image.runtimes import NO_CONTAINER, Container
from megaboa.image.tools import why_not_started
from megaboa.peaks import memory_gib
from megaboa.records import Image, LaunchSpec
from megaboa.run import health, pass_marks
from megaboa.run.inputs import UnusableInputError
from megaboa.scheduler.answers import NoPlaceError, UnreachableError
from megaboa.scheduler.protocol import Environment, Place
from megaboa.scheduler.ranks import GO, Ended, Ranks, step_on_nodes

CHECK_SECONDS_GPU = 60  # importing torch from a cold image takes a while
# Time for nodes to start the health check: the experiment's setting, or three times what half of the nodes took, if
# longer.
SLOW_START = 3.0
CHECK_END_SECONDS = 10.0  # for the launcher to end its processes
UNPACK_SECONDS = 1800.0  # an image may have tens of gigabytes, on a file system that all nodes read
CHECK_NODE = Path(__file__).parents[2] / "check_node.py"


def here(
    launch: LaunchSpec, device: str, environment: Environment = os.environ, container: Container = NO_CONTAINER
) -> Place:
    """The place where this process can start ranks; raises UnusableInputError if that isn't what the run's settings
    want."""
    try:
        return scheduler.place(launch, device, environment, container)
    except NoPlaceError as error:
        raise UnusableInputError(str(error)) from None


@dataclass(frozen=True)
class Unfit:
    """Nodes that ranks should not start on, with their problems."""

    nodes: dict[str, list[str]]
    what: str = "unhealthy"  # or "slow": the kind of trouble in run/node_memory.py


@dataclass(frozen=True)
class WaitingCheck:
    """A health check on standby for the next attempt, with all imports done."""

    tasks: Ranks
    out: Path
    nodes: tuple[str, ...]

    def fits(self, place: Place) -> bool:
        return tuple(place.nodes) == self.nodes and self.tasks.sound

    def begin(self) -> None:
        (self.out / GO).write_text("now")


def prepare_check(
    place: Place, launch: LaunchSpec, device: str, out: Path, environment: Environment
) -> WaitingCheck | None:
    """Start a waiting health check. Returns None if that isn't possible; never raises."""
    try:
        tasks = _start_check(place, launch, device, out, environment, waits=True)
    except OSError:
        return None
    return WaitingCheck(tasks, out, tuple(place.nodes))


def _start_check(
    place: Place, launch: LaunchSpec, device: str, out: Path, environment: Environment, waits: bool = False
) -> Ranks:
    shutil.rmtree(out, ignore_errors=True)  # an old result would hide a dead node
    out.mkdir(parents=True)
    gpus = launch.gpus_per_node if device == "cuda" else 0
    command = [python_of(launch), str(CHECK_NODE), f"--out={out}", f"--seconds={_check_seconds(device)}"]
    command += [f"--gpus={gpus}", f"--folder={out}"]
    if gpus and (named := memory_gib(launch.gpu)):  # the plan has found that the run fits this memory
        command.append(f"--memory-gib={named}")
    if waits:
        (out / GO).touch()
        command.append(f"--wait={out / GO}")
    return place.start_on_nodes(command, step_on_nodes(out), out, environment)


def _check_seconds(device: str) -> float:
    return CHECK_SECONDS_GPU if device == "cuda" else health.SECONDS


def check_nodes(
    place: Place,
    launch: LaunchSpec,
    device: str,
    out: Path,
    environment: Environment,
    waiting: WaitingCheck | None = None,
) -> Unfit:
    """Run the health check, one process per node, and judge the results. `waiting`: use this check, if it fits the
    place."""
    if place.job is None:  # the user's own machine
        return Unfit({})
    seconds = _check_seconds(device)
    if waiting and waiting.fits(place):
        tasks, out = waiting.tasks, waiting.out
        waiting.begin()
    else:
        if waiting:
            waiting.tasks.kill()
        tasks = _start_check(place, launch, device, out, environment)
    waited = wait_for_answers(tasks, out, len(place.nodes), seconds, launch.start.health_check_seconds)
    tasks.kill()
    if not any(out.glob("*.json")):  # the launcher or the scheduler failed, which says nothing about the nodes
        return Unfit({})
    found = health.verdict(out, place.nodes, seconds, waited)
    if any(found.values()):  # slowness isn't judged, because a broken node may slow the others down
        return Unfit({node: problems for node, problems in found.items() if problems})
    return Unfit(pass_marks.slow(health.results_of(out, place.nodes), launch.start.pass_marks), "slow")


def share_image(place: Place, logs: Path, stopped: Callable[[], object]) -> str | None:
    """Unpack the image once on every node, before any step's time limit starts. Returns the reason if that fails.

    After a failure each step unpacks the image for itself, and errors show in the ranks' logs. If hosts keep images in
    a common folder, they get in each other's way; so the second attempt unpacks on one host first, and the others find
    it.
    """
    failed = None
    everywhere = len(place.nodes) + len(place.spares)
    for ways in ((everywhere,), (1, everywhere)) if everywhere > 1 else ((1,),):
        for nodes in ways:
            shutil.rmtree(logs, ignore_errors=True)
            logs.mkdir(parents=True)
            tasks = place.unpack_image(nodes, logs)
            if tasks is None:
                logs.rmdir()  # there is no image, or nothing to share
                return None
            ended = _wait_for_image(tasks, stopped)
            if not (ended and ended.ok):
                said = "\n".join(path.read_text(errors="replace") for path in sorted(logs.glob("*.log")))
                failed = why_not_started(said) or str(ended or f"nothing after {UNPACK_SECONDS:.0f} s")
                place.remove_image()
                break
        else:
            place.share_image()
            return None
        if stopped():
            break
    return failed


@contextlib.contextmanager
def image_shared(place: Place, logs: Path) -> Iterator[None]:
    """Share the image between steps, for callers that start ranks without a supervisor; it is removed at the end."""
    try:
        try:
            failed = share_image(place, logs, lambda: False)
        except UnreachableError as error:
            failed = str(error)
        if failed:
            print(f"WARNING: the image could not be unpacked once for all steps: {failed}", file=sys.stderr)
        yield
    finally:
        place.remove_image()


def _wait_for_image(tasks: Ranks, stopped: Callable[[], object]) -> Ended | None:
    """Wait until unpacking has ended. Returns None if it took too long or was stopped."""
    deadline = time.monotonic() + UNPACK_SECONDS
    while (ended := tasks.poll()) is None:
        if stopped() or time.monotonic() > deadline:
            tasks.kill()
            return None
        time.sleep(0.2)
    return ended


def wait_for_answers(tasks: Ranks, out: Path, nodes: int, seconds: float, patience: float) -> float:
    """Wait until all nodes have answered, or their time is up; return the seconds waited. With a slow image or file
    system all nodes start slowly, so they get more time if half of them took long to start."""
    began, half = time.monotonic(), None
    while True:
        waited = time.monotonic() - began
        if half is None and 2 * sum(1 for _ in out.glob("*.begun")) >= nodes:
            half = waited
        start = max(patience, SLOW_START * (half or 0))
        if tasks.poll() is not None or waited > start + seconds + CHECK_END_SECONDS:
            return waited
        time.sleep(0.2)


def python_of(launch: LaunchSpec) -> str:
    return launch.start.python or ("python3" if launch.image else sys.executable)


def container_of(launch: LaunchSpec, image: Image | None) -> Container:
    """The container that ranks start in, if they use one. `image`: its manifest."""
    asked = launch.image
    if not asked:
        return NO_CONTAINER
    assert image
    path = str(Path(image.path).absolute())
    return Container(asked.runtime, path, asked.mounts, asked.secrets, asked.workdir)
