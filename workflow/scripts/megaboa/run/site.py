"""Where the supervisor runs: on a machine, or in a SLURM job. What it may ask there, and how ranks start."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import sys
import time
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from megaboa.image.runtimes import NO_CONTAINER, Container
from megaboa.launch import local, slurm
from megaboa.launch.ranks import Ranks
from megaboa.launch.srun import SrunRanks
from megaboa.records import Image, LaunchSpec
from megaboa.run import health
from megaboa.run.failures import Failure
from megaboa.run.inputs import UnusableInputError

ASK_AGAIN_SECONDS = 30.0
PATIENCE_SECONDS = 600.0
REQUEUE_AGAIN_SECONDS = 3.0
EXCLUDE_TRIES, EXCLUDE_AGAIN_SECONDS = 10, 0.3
CHECK_SECONDS_GPU = 60  # importing torch from a cold image takes its time
# For nodes to start the health check, where the experiment doesn't say; three times what half of them took, if longer.
SLOW_START = 3.0
CHECK_END_SECONDS = 10.0  # for srun to end tasks
CHECK_NODE = Path(__file__).parents[2] / "check_node.py"
START_NODE = Path(__file__).parents[2] / "start_node.py"


class Site(Protocol):
    job: slurm.Job | None
    nodes: list[str]

    def start(self, command: Sequence[str], world_size: int, logs: Path, environment: Mapping[str, str]) -> Ranks: ...

    def deadline(self) -> float | None:
        """When the place is taken away, in unix seconds; None where it isn't."""

    def now(self) -> float:
        """The time by the clock that `deadline` goes by."""

    def interruption(self, since: float) -> Failure | None:
        """What the place itself did to the ranks, as far as it can tell; None: nothing."""

    def cancelled(self) -> str | None:
        """That somebody has cancelled the job, where that is so."""

    def check(self, out: Path, environment: Mapping[str, str]) -> dict[str, list[str]]:
        """Problems by node, where there are any."""

    def requeue(self, excluded: Set[str]) -> bool:
        """Give the place back and be started again on other nodes than these. Only to be called last."""


class Machine:
    """This machine, without SLURM."""

    job = None

    def __init__(self, container: Container = NO_CONTAINER) -> None:
        self.nodes = [socket.gethostname()]
        self._container = container

    def start(self, command: Sequence[str], world_size: int, logs: Path, environment: Mapping[str, str]) -> Ranks:
        inside = self._container.around(command, environment)
        return local.start(inside, world_size, logs, environment, self._container.inherited())

    def deadline(self) -> float | None:
        return None

    def now(self) -> float:
        return time.time()

    def interruption(self, since: float) -> Failure | None:
        return None

    def cancelled(self) -> str | None:
        return None

    def check(self, out: Path, environment: Mapping[str, str]) -> dict[str, list[str]]:
        return {}

    def requeue(self, excluded: Set[str]) -> bool:
        return False


class Allocation:
    """The nodes of a SLURM job. The supervisor runs on the first of them."""

    def __init__(self, job: slurm.Job, launch: LaunchSpec, device: str, container: Container = NO_CONTAINER):
        self.job, self._launch, self._container = job, launch, container
        self._gpus = launch.gpus_per_node if device == "cuda" else 0
        self.nodes = slurm.hostnames(job.nodes)
        self._asked = time.monotonic()
        self._ahead: float | None = None  # this host's clock of the controller's, in seconds; None: not asked yet

    def start(self, command: Sequence[str], world_size: int, logs: Path, environment: Mapping[str, str]) -> Ranks:
        start, per_node = self._launch.start, self._launch.gpus_per_node
        one_task = start.tasks == "node"
        name = f"attempt-{logs.name}"
        if one_task:
            spawner = [command[0], str(START_NODE), f"--ranks={per_node}", f"--logs={logs}", "--"]
            command = [*spawner, *command]
        srun = slurm.srun_command(
            self._container.around(command, environment),
            nodes=world_size // per_node,
            tasks_per_node=1 if one_task else per_node,
            cpus_per_task=self._launch.cpus_per_rank * (per_node if one_task else 1),
            output=str(logs / ("node-%n.log" if one_task else "rank-%t.log")),
            name=name,
            srun=start.srun,
            gpus_per_node=self._gpus,
            cpu_bind=start.cpu_bind,
            further=start.srun_args,
        )
        inherited = self._container.inherited()
        return SrunRanks(self.job.id, srun, name, logs, environment, self.nodes[0], not one_task, inherited)

    def check(self, out: Path, environment: Mapping[str, str]) -> dict[str, list[str]]:
        """One task per node looks at its node, and all of them talk to each other."""
        shutil.rmtree(out, ignore_errors=True)  # an older answer would speak for a dead node
        out.mkdir(parents=True)
        seconds = CHECK_SECONDS_GPU if self._gpus else health.SECONDS
        start, name = self._launch.start, f"health-{out.parent.name}"
        command = [python_of(self._launch), str(CHECK_NODE), f"--out={out}", f"--seconds={seconds}"]
        command += [f"--gpus={self._gpus}", f"--folder={out}"]
        srun = slurm.srun_command(
            self._container.around(command, environment),
            nodes=len(self.nodes),
            tasks_per_node=1,
            cpus_per_task=self._launch.cpus_per_rank * self._launch.gpus_per_node,
            output=str(out / "node-%n.log"),
            name=name,
            srun=start.srun,
            gpus_per_node=self._gpus,
            further=start.srun_args,
        )
        inherited = self._container.inherited()
        tasks = SrunRanks(self.job.id, srun, name, out, environment, self.nodes[0], inherited=inherited)
        waited = self._wait_for_answers(tasks, out, seconds)
        tasks.kill()
        if not any(out.glob("*.json")):  # srun or the controller failed, and says nothing of the nodes
            return {}
        found = health.verdict(out, self.nodes, seconds, waited)
        return {node: problems for node, problems in found.items() if problems}

    def _wait_for_answers(self, tasks: Ranks, out: Path, seconds: float) -> float:
        """Until all have answered, or have had their time: where images and file systems are slow, all start slowly."""
        began, half = time.monotonic(), None
        patience = self._launch.start.health_check_seconds
        while True:
            waited = time.monotonic() - began
            if half is None and 2 * sum(1 for _ in out.glob("*.begun")) >= len(self.nodes):
                half = waited
            start = max(patience, SLOW_START * (half or 0))
            if tasks.poll() is not None or waited > start + seconds + CHECK_END_SECONDS:
                return waited
            time.sleep(0.2)

    def deadline(self) -> float | None:
        """Asked again now and then: an administrator can move it."""
        if time.monotonic() - self._asked > ASK_AGAIN_SECONDS:
            self._asked = time.monotonic()
            with contextlib.suppress(slurm.SlurmUnreachableError):
                now = slurm.show_job(self.job.id)
                if now and now.restarts == self.job.restarts:  # else it is over, and this is the memory of it
                    self.job = replace(self.job, end=now.end)
            self._compare_clocks()
        return self.job.end

    def now(self) -> float:
        if self._ahead is None:
            self._compare_clocks()
        return time.time() - (self._ahead or 0.0)

    def _compare_clocks(self) -> None:
        asked, theirs = time.time(), None
        with contextlib.suppress(slurm.SlurmUnreachableError):
            theirs = slurm.controllers_time()
        self._ahead = asked - theirs if theirs else self._ahead or 0.0

    def interruption(self, since: float) -> Failure | None:
        try:
            now = slurm.show_job(self.job.id)
            nodes = slurm.show_nodes(self.job.nodes)
        except slurm.SlurmUnreachableError:
            return None
        bad = fallen(nodes, since - (self._ahead or 0.0))
        found = _interruption(self.job, now) if now else None
        # Not before a cancellation: who cancels a job with a dead node doesn't want it back.
        if bad and (now is None or (found and found.cause in ("requeued", "node_failure"))):
            return Failure("node_failure", _why(bad), nodes=tuple(node.name for node in bad))
        if bad and found:
            return replace(found, evidence=f"{found.evidence}; {_why(bad)}")
        return found

    def cancelled(self) -> str | None:
        """Whether somebody has cancelled the job, as far as SLURM can be asked."""
        now = self._now()
        return f"SLURM job {self.job.id} was cancelled" if now and _is_cancelled(self.job, now) else None

    def requeue(self, excluded: Set[str]) -> bool:
        if not self.job.can_requeue:
            return False
        # SLURM takes ExcNodeList for waiting jobs only, and ends this process after the first of the two. It gives a
        # grace before it kills, and the job waits longer than that; should the second be lost, the next life of the job
        # finds itself on an avoided node and comes here again.
        deadline = time.monotonic() + PATIENCE_SECONDS  # a controller that is being restarted is waited for
        while not (done := self._is_requeued()) and not self.cancelled():
            if (done := slurm.requeue(self.job.id)) or time.monotonic() > deadline:
                break
            time.sleep(REQUEUE_AGAIN_SECONDS)
        if done:
            self._exclude(excluded)  # also where that is nothing: what was excluded before may come back
        return done

    def _exclude(self, nodes: Set[str]) -> None:
        """Tried again: SLURM's SIGTERM to all of the job's processes may reach the command that is to tell it."""
        for _ in range(EXCLUDE_TRIES):
            if slurm.exclude(self.job.id, nodes):
                return
            time.sleep(EXCLUDE_AGAIN_SECONDS)

    def _is_requeued(self) -> bool:
        """Whether SLURM has done it already."""
        now = self._now()
        return now is not None and now.restarts > self.job.restarts and not _is_cancelled(self.job, now)

    def _now(self) -> slurm.Job | None:
        try:
            return slurm.show_job(self.job.id)
        except slurm.SlurmUnreachableError:
            return None


def here(
    launch: LaunchSpec,
    device: str,
    environment: Mapping[str, str] = os.environ,
    container: Container = NO_CONTAINER,
) -> Site:
    """The place that this process is in, or that the run's settings name."""
    starter, job = launch.start.starter, environment.get("SLURM_JOB_ID")
    if starter == "local" or (starter == "auto" and not (job and _has_srun(launch))):
        if container.runtime == "pyxis":
            raise UnusableInputError(
                "image.runtime is pyxis, which is a plugin of srun, and this is no SLURM job: submit it with "
                "`--profile slurm`, or set image.runtime to apptainer or none"
            )
        return Machine(container)
    if not job:
        raise UnusableInputError(
            "launch.starter is srun, but this is no SLURM job: take `auto`, or start it by sbatch or salloc"
        )
    found = _patiently(job)
    if found is None:
        raise UnusableInputError(
            f"SLURM knows no job {job}, which SLURM_JOB_ID names: unset it, or set launch.starter to local"
        )
    return Allocation(found, launch, device, container)


def fallen(nodes: Sequence[slurm.Node], since: float) -> list[slurm.Node]:
    """Nodes that are down, or were booted since the given time."""
    return [node for node in nodes if node.down or (node.booted or 0) > since]


def fallen_of(names: Sequence[str], since: float) -> dict[str, str]:
    """Of nodes whose supervisor is gone the fallen ones, each with what SLURM says of it.

    Then a slurmd that was started again is a sign as well; alone it isn't, as its upgrade harms no job.
    """
    try:
        nodes = slurm.show_nodes(",".join(names))
        bad = fallen(nodes, since) or [node for node in nodes if (node.started or 0) > since]
        return {node.name: _why([node]) for node in bad}
    except slurm.SlurmUnreachableError:
        return {}


def usable(partition: str, avoided: Mapping[str, float], needed: int, users: Set[str] = frozenset()) -> set[str]:
    """The nodes to avoid, of these with the times at which they failed: a bad node is better than waiting for ever.

    A node more is left than the run needs, as nobody may be left to change the list when the next one dies: who failed
    longest ago is given back for it. Those that failed last are avoided even then, as long as the run has nodes enough.
    """
    if not avoided:
        return set()
    try:
        nodes = slurm.usable_nodes(partition) - users
    except slurm.SlurmUnreachableError:
        return set(avoided)
    kept, newest = sorted(avoided, key=avoided.__getitem__), max(avoided.values())
    while kept and len(nodes.difference(kept)) < needed + (avoided[kept[0]] < newest):
        kept.pop(0)
    return set(kept)


def python_of(launch: LaunchSpec) -> str:
    return launch.start.python or ("python3" if launch.image else sys.executable)


def container_of(launch: LaunchSpec, image: Image | None) -> Container:
    """The image that ranks start in, if they are to; `image`: its manifest."""
    asked = launch.image
    if not asked:
        return NO_CONTAINER
    assert image
    path = str(Path(image.path).absolute())
    return Container(asked.runtime, path, asked.mounts, asked.secrets, asked.workdir)


def _interruption(then: slurm.Job, now: slurm.Job) -> Failure | None:
    if _is_cancelled(then, now):
        return Failure("cancelled", f"SLURM job {now.id} was cancelled")
    if now.preempted and not then.preempted:
        return Failure("preempted", "a job with a higher priority takes the nodes")
    if now.restarts > then.restarts:
        return Failure("requeued", "the job was put back into the queue")
    if now.timed_out:  # whatever its end was when we asked last: it can be moved to the past
        return Failure("time_limit", "the job's wall time was used up")
    return Failure("node_failure", "SLURM ended the job, as it lost a node") if now.lost_node else None


def _is_cancelled(then: slurm.Job, now: slurm.Job) -> bool:
    """SLURM gives a reason for what it ends itself, and none for what somebody cancels.

    A job that it puts back has a restart more from the first moment on; cancelled after that, it is CANCELLED.
    """
    if now.is_ending:
        by_slurm = now.timed_out or now.lost_node or now.preempted or now.restarts > then.restarts
        return not by_slurm
    return now.state == "CANCELLED"


def _why(nodes: Sequence[slurm.Node]) -> str:
    return "; ".join(_what_happened(node) for node in nodes)


def _what_happened(node: slurm.Node) -> str:
    if not node.down and node.started:
        return f"node {node.name} was started again at {time.strftime('%H:%M:%S', time.localtime(node.started))}"
    return f"node {node.name} is {node.state}" + (f" ({node.reason})" if node.reason else "")


def _has_srun(launch: LaunchSpec) -> bool:
    return shutil.which(launch.start.srun) is not None and slurm.available()


def _patiently(job: str) -> slurm.Job | None:
    """The job as SLURM tells it; a controller that is being restarted is waited for."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            return slurm.show_job(job)
        except slurm.SlurmUnreachableError:
            if time.monotonic() > deadline:
                raise
            time.sleep(5)
