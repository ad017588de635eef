"""The nodes of a SLURM job as a place for ranks: how they start, stand by, are replaced, and are requeued."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import time
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path

from megaboa.causes import Failure
from megaboa.records import LaunchSpec, StandbyOrder, line
from megaboa.scheduler.answers import NoPlaceError, UnreachableError
from megaboa.scheduler.protocol import Container, Environment
from megaboa.scheduler.ranks import FORKED, GO, OF_A_RANK, RENDEZVOUS, Ranks, step_on_nodes
from megaboa.scheduler.slurm import job_ends, queries, shared_images
from megaboa.scheduler.slurm.srun import NODE_LOG, SRUN_LOG, STEP, SrunRanks, end_step, srun_command, without_options
from megaboa.store_paths import AttemptFolder

ASK_AGAIN_SECONDS = 30.0
PATIENCE_SECONDS = 600.0
REQUEUE_AGAIN_SECONDS = 3.0
EXCLUDE_TRIES, EXCLUDE_AGAIN_SECONDS = 10, 0.3
REMOVE_SECONDS = 120.0  # enough for tens of gigabytes on the slowest node
GPUS_OF_JOB = ("SLURM_JOB_GPUS", "SLURM_GPUS")  # prefixes of variables that SLURM sets for a job with GPUs
START_NODE = Path(__file__).parents[3] / "start_node.py"


# Options of srun per task, whose meaning changes if one task has several ranks.
OF_EACH_TASK = re.compile(r"per-task|per-gpu|gpu-bind|\b(?:map|mask)_|\brank")
# Host memory for a rank (the default of resources.mem_mb_per_rank), for standby on a node, and for each standby rank.
RANK_MB, STANDBY_MB, STANDBY_MB_PER_RANK = 4000, 1000, 400
# A job that outlives its nodes (sbatch --no-kill) also outlives its batch script's node, and then idles for the rest of
# its wall time. So another node watches the supervisor's, and requeues the job. Arguments: the node, and the seconds
# between two looks.
GUARD_SECONDS = 5
GUARD = """
while sleep "$2"; do
  scontrol -o show node "$1" | grep -q ' State=DOWN' &&
    scontrol -o show job "$SLURM_JOB_ID" | grep -q ' JobState=RUNNING ' && scontrol requeue "$SLURM_JOB_ID" && exit
done
"""


class Allocation:
    """The nodes of a SLURM job. The supervisor runs on the first one.

    With `launch.spare_nodes`, ranks start on the first nodes, and the rest are spares.
    """

    def __init__(self, job: queries.Job, launch: LaunchSpec, device: str, container: Container, counted: bool = True):
        """`counted`: SLURM manages the job's GPUs; otherwise it has whole nodes, and steps request none."""
        self.job, self._launch, self._container = job, launch, container
        self._plain, self._name = container, ""
        self._device = device
        self._gpus = launch.gpus_per_node if device == "cuda" and counted else 0
        self._all = queries.hostnames(job.nodes)
        kept = launch.nodes if launch.spare_nodes else len(self._all)
        self.nodes, self.spares = self._all[:kept], self._all[kept:]
        self._guard: subprocess.Popen | None = None
        self._standby: _Standby | None = None
        self._asked = time.monotonic()
        self._ahead: float | None = None  # seconds that our clock is ahead of the controller's; None: not asked yet

    def start(self, command: Sequence[str], world_size: int, logs: Path, environment: Environment) -> Ranks:
        self._keep_guarded()
        standby, self._standby = self._standby, None
        if standby:
            if standby.fits(self.nodes, self._container):
                return standby.begin(command, logs, environment)
            standby.ranks.kill()
        return self._start(command, world_size, logs, environment, step_name(logs))

    def stand_by(self, command: Sequence[str], world_size: int, logs: Path, environment: Environment) -> None:
        if self._standby or not self._has_one_task_per_node or environment.get(FORKED) == "0":
            return
        if not self._launch.start.tasks and not self._has_memory_to_spare():
            return
        if self._plain.runtime == "pyxis":  # a step with the same container name would run inside the ranks' container
            return
        with contextlib.suppress(OSError):
            logs.mkdir(parents=True, exist_ok=True)
            go = logs / GO
            go.write_text("")
            ranks = self._start(command, world_size, logs, environment, standby_name(logs.parent), go)
            self._standby = _Standby(ranks, go, tuple(self.nodes), self._container)

    @property
    def _has_one_task_per_node(self) -> bool:
        """Whether one task starts all ranks of a node. By default on GPUs, whose hosts have spare cores to prepare the
        next attempt, unless the user has set options per task."""
        start = self._launch.start
        if start.tasks:
            return start.tasks == "node"
        return self._device == "cuda" and not any(map(OF_EACH_TASK.search, [start.cpu_bind or "", *start.srun_args]))

    def _has_memory_to_spare(self) -> bool:
        """Whether the job's memory on each node suffices for standby; 0 means all of the node's memory."""
        given, ranks = os.environ.get("SLURM_MEM_PER_NODE", "0"), self._launch.gpus_per_node
        enough = ranks * RANK_MB + STANDBY_MB + ranks * STANDBY_MB_PER_RANK
        return not given.isdigit() or int(given) == 0 or int(given) >= enough

    @property
    def stands_by(self) -> bool:
        return self._standby is not None

    def _start(
        self,
        command: Sequence[str],
        world_size: int,
        logs: Path,
        environment: Environment,
        name: str,
        wait: Path | None = None,
    ) -> SrunRanks:
        """Start a step for the ranks. `wait`: the file with the order that a standby step waits for."""
        start, per_node = self._launch.start, self._launch.gpus_per_node
        one_task = self._has_one_task_per_node
        if one_task:
            forks = [f"--fork={self._device}"] if environment.get(FORKED) != "0" else []
            waits = [f"--wait={wait}"] if wait else []
            binds = [] if {"no", "none"} & set((start.cpu_bind or "").split(",")) else ["--bind"]
            spawner = [
                command[0],
                str(START_NODE),
                f"--ranks={per_node}",
                f"--logs={logs}",
                *forks,
                *waits,
                *binds,
                "--",
            ]
            command = [*spawner, *command]
        srun = srun_command(
            self._container.around(command, {*environment, *OF_A_RANK}),
            nodes=world_size // per_node,
            tasks_per_node=1 if one_task else per_node,
            cpus_per_task=self._launch.cpus_per_rank * (per_node if one_task else 1),
            output=str(logs / (NODE_LOG.format("%n") if one_task else "rank-%t.log")),
            name=name,
            srun=start.srun,
            gpus_per_node=self._gpus,
            cpu_bind=start.cpu_bind,
            further=start.srun_args,
            chosen=self._chosen(self.nodes),
        )
        inherited = self._container.inherited()
        first, ports = self.nodes[0], start.ports
        return SrunRanks(
            self.job.id, srun, name, logs, environment, first, not one_task, inherited, ports, self._has_rank_0_here
        )

    def start_on_nodes(self, command: Sequence[str], name: str, logs: Path, environment: Environment) -> Ranks:
        inside = self._container.around(command, {*environment, *RENDEZVOUS})
        srun = self._one_each(inside, self.nodes, logs, name)
        inherited = self._container.inherited()
        return SrunRanks(
            self.job.id,
            srun,
            name,
            logs,
            environment,
            self.nodes[0],
            inherited=inherited,
            ports=self._launch.start.ports,
            is_here=self._has_rank_0_here,
        )

    def unpack_image(self, nodes: int, logs: Path) -> Ranks | None:
        if self._plain.runtime != "pyxis":
            return None
        if not self._name:
            self._name = shared_images.new_name(self.job)
            with contextlib.suppress(UnreachableError):
                lives = queries.lives_of_ours()
                if f"{self.job.id}.{self.job.restarts}" in lives:  # otherwise there may be jobs that aren't listed here
                    self._remove_images(shared_images.of_jobs_gone(queries.cluster()), *lives)
        first = [*self.nodes, *self.spares][:nodes]
        srun = self._one_each(self._plain.named(self._name).around(["true"], ()), first, logs, "image")
        return SrunRanks(self.job.id, srun, "image", logs, {}, self.nodes[0], inherited=self._plain.inherited())

    def share_image(self) -> None:
        self._container = self._plain.named(self._name)

    def remove_image(self) -> None:
        self._container = self._plain
        if self._name:
            self._remove_images(shared_images.named(self._name))
        self._name = ""

    def _remove_images(self, pattern: str, *kept: str) -> None:
        """Remove images on all nodes. Images that can't be removed now are removed by the next job on the node."""
        everywhere = [*self.nodes, *self.spares]
        srun = self._one_each(["sh", "-c", shared_images.REMOVE, "sh", pattern, *kept], everywhere, None, "image-away")
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(srun, capture_output=True, stdin=subprocess.DEVNULL, timeout=REMOVE_SECONDS)

    def _one_each(self, command: Sequence[str], nodes: Sequence[str], logs: Path | None, name: str) -> list[str]:
        """The srun command for one process on each of these nodes."""
        start = self._launch.start
        return srun_command(
            command,
            nodes=len(nodes),
            tasks_per_node=1,
            cpus_per_task=self._launch.cpus_per_rank * self._launch.gpus_per_node,
            output=str(logs / NODE_LOG.format("%n")) if logs else "/dev/null",
            name=name,
            srun=start.srun,
            gpus_per_node=self._gpus,
            further=start.srun_args,
            chosen=self._chosen(nodes),
        )

    @property
    def _has_rank_0_here(self) -> bool:
        """Whether rank 0 is on this host: the supervisor always stays on the job's first node."""
        return self.nodes[0] == self._all[0]

    def _chosen(self, nodes: Sequence[str]) -> Sequence[str]:
        """Nodes to name in a step, which is only needed if the job has, or had, spares."""
        return nodes if self._launch.spare_nodes else ()

    def replace(self, bad: Set[str], for_good: bool = True) -> bool:
        gone = {*bad, *self._gone_of(self.spares)}
        kept, spares = ([node for node in nodes if node not in gone] for nodes in (self.nodes, self.spares))
        missing = len(self.nodes) - len(kept)
        if missing > len(spares):
            return False
        waiting = [] if for_good else [node for node in self.nodes if node in bad]
        now = {*kept, *spares[:missing]}
        self.nodes = [node for node in self._all if node in now]  # the order in which SLURM assigns ranks to nodes
        self.spares = [*spares[missing:], *waiting]
        return True

    def unused(self) -> list[str]:
        replaced = [node for node in self._all if node not in {*self.nodes, *self.spares}]
        gone = self._gone_of(replaced)
        return [node for node in replaced if node not in gone]

    def lost(self) -> dict[str, str]:
        try:
            gone = self._gone_of(self.nodes)
            nodes = queries.show_nodes(",".join(gone)) if gone else []
            return {node.name: job_ends.what_happened(node) for node in nodes}
        except UnreachableError:
            return {}

    def _gone_of(self, nodes: Sequence[str]) -> list[str]:
        """The nodes among these that SLURM has removed from the job, which continues."""
        now = self._now() if self._launch.spare_nodes and nodes else None  # else SLURM ends the job itself
        if now is None or now.restarts > self.job.restarts or now.state != "RUNNING":
            return []
        try:
            left = set(queries.hostnames(now.nodes))
        except UnreachableError:
            return []
        return [node for node in nodes if node not in left]

    def _keep_guarded(self) -> None:
        """Keep a process on the last node that watches the first one, where this process runs: see GUARD."""
        here = self._all[0]
        others = [node for node in (*self.nodes, *self.spares) if node != here]
        if not (self._launch.spare_nodes and others and self.job.can_requeue):
            return
        if self._guard and self._guard.poll() is None:
            return
        gone = set(self._gone_of(others))
        if not (others := [node for node in others if node not in gone]):
            return
        words = [self._launch.start.srun, *STEP, f"--nodelist={others[-1]}", "--mem=0", "--job-name=guard"]
        with contextlib.suppress(OSError):
            self._guard = subprocess.Popen(
                [*words, "--output=none", "sh", "-c", GUARD, "sh", here, str(GUARD_SECONDS)],
                env=without_options(os.environ),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )

    def close(self) -> None:
        if self._standby:
            self._standby.ranks.kill()
        self.remove_image()
        if self._guard and self._guard.poll() is None:
            self._guard.terminate()  # srun then ends its step
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._guard.wait(GUARD_SECONDS)

    def end_left_over(self, logs: Path) -> None:
        """End steps of a killed supervisor, whose srun processes outlive it."""
        names = [step_name(logs), standby_name(logs), step_on_nodes(AttemptFolder(logs).next_health)]
        if (logs / SRUN_LOG).is_symlink():  # the ranks were started by a standby step
            names.append(standby_name((logs / SRUN_LOG).resolve().parents[1]))
        for name in names:
            end_step(self.job.id, name)

    def deadline(self) -> float | None:
        """End of the job's wall time. Updated at intervals, because an administrator can change it."""
        if time.monotonic() - self._asked > ASK_AGAIN_SECONDS:
            self._asked = time.monotonic()
            self._keep_guarded()
            with contextlib.suppress(UnreachableError):
                now = queries.show_job(self.job.id)
                if now and now.restarts == self.job.restarts:  # otherwise it is over, and only remembered by SLURM
                    self.job = replace(self.job, end=now.end)
            self._compare_clocks()
        return self.job.end

    def now(self) -> float:
        if self._ahead is None:
            self._compare_clocks()
        return time.time() - (self._ahead or 0.0)

    def _compare_clocks(self) -> None:
        asked, theirs = time.time(), None
        with contextlib.suppress(UnreachableError):
            theirs = queries.controllers_time()
        self._ahead = asked - theirs if theirs else self._ahead or 0.0

    def interruption(self, since: float) -> Failure | None:
        try:
            now = queries.show_job(self.job.id)
            # Only nodes in use: one that was replaced and died later has nothing to do with this end.
            nodes = queries.show_nodes(",".join([*self.nodes, *self.spares]))
        except UnreachableError:
            return None
        bad = job_ends.fallen(nodes, since - (self._ahead or 0.0))
        if lost := self.lost():
            return Failure("node_failure", "; ".join(lost.values()), nodes=tuple(lost))
        found = job_ends.interruption(self.job, now) if now else None
        # Cancellation has priority: a cancelled job with a dead node must not be requeued.
        if bad and (now is None or (found and found.cause in ("requeued", "node_failure"))):
            return Failure("node_failure", job_ends.why(bad), nodes=tuple(node.name for node in bad))
        if bad and found:
            return replace(found, evidence=f"{found.evidence}; {job_ends.why(bad)}")
        return found

    def cancelled(self) -> str | None:
        """A sentence if the job was cancelled, as far as SLURM can be asked."""
        now = self._now()
        return f"SLURM job {self.job.id} was cancelled" if now and job_ends.is_cancelled(self.job, now) else None

    def requeue(self, excluded: Set[str]) -> bool:
        if not self.job.can_requeue:
            return False
        # SLURM only accepts ExcNodeList for waiting jobs, so the requeue comes first, although it ends this process.
        # There is a grace period before the kill, and the job waits longer than that. If the exclusion is lost, the
        # job's next life finds itself on an avoided node and comes here again.
        deadline = time.monotonic() + PATIENCE_SECONDS  # long enough for a restart of the controller
        while not (done := self._is_requeued()) and not self.cancelled():
            if (done := queries.requeue(self.job.id)) or time.monotonic() > deadline:
                break
            time.sleep(REQUEUE_AGAIN_SECONDS)
        if done:
            self._exclude(excluded)  # even if there is nothing to exclude: nodes excluded earlier may be allowed again
        return done

    def _exclude(self, nodes: Set[str]) -> None:
        """Exclude nodes, with retries: SLURM's SIGTERM to all of the job's processes may hit the command."""
        for _ in range(EXCLUDE_TRIES):
            if queries.exclude(self.job.id, nodes):
                return
            time.sleep(EXCLUDE_AGAIN_SECONDS)

    def _is_requeued(self) -> bool:
        """Whether SLURM has already requeued the job."""
        now = self._now()
        return now is not None and now.restarts > self.job.restarts and not job_ends.is_cancelled(self.job, now)

    def _now(self) -> queries.Job | None:
        try:
            return queries.show_job(self.job.id)
        except UnreachableError:
            return None


@dataclass(frozen=True)
class _Standby:
    """A standby step of one task per node, which has imported Bridge and waits for its order."""

    ranks: SrunRanks
    go: Path
    nodes: tuple[str, ...]
    container: Container

    def fits(self, nodes: Sequence[str], container: Container) -> bool:
        return tuple(nodes) == self.nodes and container == self.container and self.ranks.sound

    def begin(self, command: Sequence[str], logs: Path, environment: Environment) -> SrunRanks:
        with contextlib.suppress(FileExistsError):
            (logs / SRUN_LOG).symlink_to(self.ranks.log.resolve())
        order = StandbyOrder(command=tuple(command), logs=str(logs), environment=dict(environment))
        try:
            self.go.write_text(line(order) + "\n")
        except OSError:  # a retry starts a step as usual
            self.ranks.kill()
            raise
        return self.ranks


def here(launch: LaunchSpec, device: str, environment: Environment, container: Container) -> Allocation | None:
    """The nodes of the job that this process is in, if the run's settings ask for them."""
    starter, job = launch.start.starter, environment.get("SLURM_JOB_ID")
    if starter == "local" or (starter == "auto" and not (job and _has_srun(launch))):
        if container.runtime == "pyxis":
            raise NoPlaceError(
                "image.runtime is pyxis, which is a plugin of srun, and this is not a SLURM job: submit it with "
                "`--profile slurm`, or set image.runtime to apptainer or none"
            )
        return None
    if not job:
        raise NoPlaceError(
            "launch.starter is srun, but this is not a SLURM job: take `auto`, or start it by sbatch or salloc"
        )
    found = _show_job_once_reachable(job)
    if found is None:
        raise NoPlaceError(
            f"SLURM knows no job {job}, which SLURM_JOB_ID names: unset it, or set launch.starter to local"
        )
    counted = any(name.startswith(GPUS_OF_JOB) for name in environment)
    return Allocation(found, launch, device, container, counted)


def standby_name(logs: Path) -> str:
    """Name of the standby step prepared while the ranks run whose logs are in this folder."""
    return f"standby-{logs.name}"


def step_name(logs: Path) -> str:
    """Name of the step whose ranks' logs are in this folder."""
    return f"attempt-{logs.name}"


def _has_srun(launch: LaunchSpec) -> bool:
    return shutil.which(launch.start.srun) is not None and queries.available()


def _show_job_once_reachable(job: str) -> queries.Job | None:
    """The job according to SLURM, after waiting for a controller that restarts."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            return queries.show_job(job)
        except UnreachableError:
            if time.monotonic() > deadline:
                raise
            time.sleep(5)
