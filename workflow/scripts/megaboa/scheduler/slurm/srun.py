"""Ranks as one step of a SLURM job, on any number of nodes."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from megaboa.records import ImageStart
from megaboa.scheduler.answers import Task, UnreachableError
from megaboa.scheduler.ranks import (
    LAST_WORDS_SECONDS,
    STACKS_SIGNAL,
    AnyPort,
    Ended,
    ReservedPort,
    rendezvous_environment,
)
from megaboa.scheduler.slurm import queries

# srun's own output, next to the ranks' logs, and the output of a node's only task.
SRUN_LOG, NODE_LOG = "srun.log", "node-{}.log"
GONE_SECONDS = 30
LOOK_SECONDS = 1
# Options for one process: within the job's allocation, next to the step that waits for it, or as a job of its own.
STEP = ("--overlap", "--nodes=1", "--ntasks=1")
# With a limit, because the making of an image shouldn't wait in the queue for a free GPU.
JOB = ("--nodes=1", "--ntasks=1", "--time=30", "--job-name=megaboa-image", "--immediate=60")
_NO_ALLOCATION = re.compile(
    r"Unable to (allocate resources|create step|confirm allocation|contact slurm controller).*", re.IGNORECASE
)
# `srun: error: n2: task 1: Killed`, `srun: error: n[1-2]: tasks 0-1: Exited with exit code 1`
_TASK = re.compile(r"^srun: error: (?P<node>\S+): tasks? (?P<rank>\d+)\S*: (?P<what>.*)$", re.MULTILINE)
# After this line, tasks end because srun ends them.
_CANCELLED = re.compile(r"^slurmstepd\S*: error: \*\*\* STEP \S+ ON \S+ CANCELLED", re.MULTILINE)
# SLURM ends the step by itself: a node failed, somebody cancelled it, or its time is over.
_ENDS_ANYWAY = re.compile(rf"{_CANCELLED.pattern}|^srun: Job step aborted", re.MULTILINE)
_SAID = re.compile(r"^(?:srun|slurmstepd\S*): error: .*", re.MULTILINE)
# Last words of a node's only task, which starts its ranks.
_RANK = re.compile(r"^rank (\d+) (?:was killed by|ended with)", re.MULTILINE)
_EXIT_CODE = re.compile(r"Exited with exit code (\d+)")
_SIGNALS = {"Killed": 9, "Terminated": 15, "Segmentation fault": 11, "Aborted": 6, "Bus error": 7, "Interrupt": 2}


def srun_command(
    command: Sequence[str],
    *,
    nodes: int,
    tasks_per_node: int,
    cpus_per_task: int,
    output: str,
    name: str,
    srun: str = "srun",
    gpus_per_node: int = 0,
    cpu_bind: str | None = None,
    further: Sequence[str] = (),
    chosen: Sequence[str] = (),
) -> list[str]:
    """The command that starts the ranks. All counts are explicit, because SLURM_* variables in a rule's shell aren't
    reliable.

    `chosen`: the nodes, if they aren't all of the job's; ranks are assigned in the job's order.
    """
    return [
        srun,
        f"--nodes={nodes}",
        *([f"--nodelist={','.join(chosen)}"] if chosen else []),
        f"--ntasks={nodes * tasks_per_node}",
        f"--ntasks-per-node={tasks_per_node}",
        f"--cpus-per-task={cpus_per_task}",
        "--distribution=block",  # neighbouring ranks share a node
        "--mem=0",  # all memory of the job, as the step is alone
        # Regardless of the job's own option, this one works with every SLURM.
        *([f"--gres=gpu:{gpus_per_node}"] if gpus_per_node else []),
        *([f"--cpu-bind={cpu_bind}"] if cpu_bind else []),
        "--overlap",  # doesn't wait for an earlier step that won't die
        "--kill-on-bad-exit=0",  # otherwise srun sends SIGTERM, ignored in a collective, and waits for KillWait
        "--export=ALL",
        f"--output={output}",
        f"--job-name={name}",
        *further,
        *command,
    ]


def without_options(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment without variables that srun would interpret as its options.

    GPUs per task are hidden from the node's other tasks; since SLURM 23.11 the last variable also names them.
    """
    options = ("SRUN_", "SBATCH_", "SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK")
    return {name: value for name, value in environment.items() if not name.startswith(options)}


def one_process(wanted: ImageStart, step: bool, gpus: int) -> list[str]:
    """The words before a command that start one process. `wanted`: how the image is started; its options for the plugin
    follow these words."""
    gpu = [f"--gres=gpu:{gpus}"] if gpus else []
    return [wanted.srun, *(STEP if step else (*JOB, *wanted.places)), *gpu, *wanted.srun_args]


def refusal(said: str) -> str | None:
    """srun's message if it has started nothing."""
    found = _NO_ALLOCATION.search(said)
    return f"srun gave no allocation: {found[0]}" if found else None


def has_pyxis(srun: str) -> bool:
    """Whether srun here has the plugin's options."""
    if shutil.which(srun) is None:
        return False
    return "--container-image" in subprocess.run([srun, "--help"], capture_output=True, text=True).stdout


def task(environment: Mapping[str, str]) -> Task | None:
    """This process's place among the tasks of a step."""
    if "SLURM_PROCID" not in environment:
        return None
    # A batch script is a single task, and lacks the other variables.
    names = {
        "SLURM_PROCID": 0,
        "SLURM_LOCALID": 0,
        "SLURM_NTASKS": 1,
        "SLURM_NODEID": 0,
        "SLURM_NNODES": 1,
        "SLURM_CPUS_ON_NODE": 0,
    }
    return Task(*(int(environment.get(name, alone)) for name, alone in names.items()))


class SrunRanks:
    """Ranks started by one srun process; every task writes its own log on its own node."""

    def __init__(
        self,
        job: str,
        command: Sequence[str],
        name: str,
        logs: Path,
        environment: Mapping[str, str],
        address: str,
        tasks_are_ranks: bool = True,
        inherited: Mapping[str, str] = os.environ,
        ports: str | None = None,
        is_here: bool = True,
    ):
        """`address`: the host of rank 0; `is_here`: whether that is this host."""
        self.tasks_are_ranks = tasks_are_ranks
        self.job, self.name, self.log = job, name, logs / SRUN_LOG
        self._look_at, self._one_failed = 0.0, False
        self._end_before_ours: Ended | None = None
        # Reserved until the ranks have ended. If a spare has replaced this host, rank 0 is elsewhere, and free ports
        # here say nothing: a port in use is then a transient failure, and the next attempt takes another.
        self.port = ReservedPort(ports=ports) if is_here else AnyPort(ports)
        with self.log.open("ab") as stream:
            self.process = subprocess.Popen(
                command,
                env={**without_options(inherited), **environment, **rendezvous_environment(address, self.port.number)},
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is handled by the supervisor
            )

    def poll(self) -> Ended | None:
        code = self.process.poll()
        if code is None:
            self._end_what_waits_for_one_that_failed()
            return None
        if code:
            end_step(self.job, self.name)
        self.port.close()
        ended = self._end_before_ours or read_end(code, self._said())
        return ended if self.tasks_are_ranks else replace(ended, rank=self._failed_rank_of(ended.rank))

    def _failed_rank_of(self, task: int | None) -> int | None:
        """The failed rank, from the log of a node's only task, if it is visible on this host yet."""
        if task is None:
            return None
        found = _RANK.findall(_text(self.log.with_name(NODE_LOG.format(task))))
        return int(found[-1]) if found else None

    @property
    def sound(self) -> bool:
        return self.process.poll() is None and not _TASK.search(self._said())

    def _end_what_waits_for_one_that_failed(self) -> None:
        if time.monotonic() < self._look_at:
            return
        said, wait = self._said(), float(LOOK_SECONDS)
        if _ENDS_ANYWAY.search(said):  # another signal would only find slurmd ending the step
            self._one_failed = False
        elif self._one_failed:
            self._end_before_ours = self._end_before_ours or read_end(1, said)
            wait = LAST_WORDS_SECONDS if self._kill_step() else GONE_SECONDS
        elif _TASK.search(said):
            self._one_failed, wait = True, LAST_WORDS_SECONDS
        self._look_at = time.monotonic() + wait

    def _said(self) -> str:
        return _text(self.log)

    def ask(self) -> bool:
        return self._signal("TERM")

    def dump(self) -> None:
        self._signal(STACKS_SIGNAL.name.removeprefix("SIG"))

    def kill(self) -> None:
        if self.process.poll() is None:
            self._end()
        self.port.close()

    def _end(self) -> None:
        self._kill_step()
        deadline = time.monotonic() + GONE_SECONDS
        while self.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.2)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def _kill_step(self) -> bool:
        """Kill the step by SLURM; if the controller doesn't answer, ask srun to do it.

        Returns whether SLURM does it.
        """
        if self._signal("KILL"):
            return True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)
        return False

    def _signal(self, name: str) -> bool:
        try:
            step = queries.step_of(self.job, self.name)
        except UnreachableError:
            return False
        return step is not None and queries.signal_step(step, name)


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def end_step(job: str, name: str) -> None:
    """End a step. Ranks outlive a killed srun, and must not run alongside those that are started next."""
    deadline = time.monotonic() + GONE_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(UnreachableError):
            step = queries.step_of(job, name)
            if step is None:
                return
            queries.signal_step(step, "KILL")
        time.sleep(0.5)


def read_end(code: int, log: str) -> Ended:
    """How the ranks ended, from srun's exit code and output.

    A task that was killed is the cause of failures of other tasks. Tasks that srun terminated caused nothing, and one
    that aborts may do so because NCCL lost another.
    """
    if code == 0:
        return Ended()
    tasks = [_task(match) for match in _TASK.finditer(_CANCELLED.split(log, maxsplit=1)[0])]
    tasks = tasks or [_task(match) for match in _TASK.finditer(log)]
    worst = min(tasks, key=_blame, default=Ended(returncode=code))
    return Ended(worst.rank, worst.returncode, worst.node, "\n".join(_SAID.findall(log)[:20]))


def _blame(task: Ended) -> tuple[bool, bool]:
    return task.returncode == -signal.SIGTERM, task.returncode > 0 or task.returncode == -signal.SIGABRT


def _task(match: re.Match[str]) -> Ended:
    exited = _EXIT_CODE.search(match["what"])
    number = next((number for word, number in _SIGNALS.items() if word in match["what"]), None)
    code = int(exited[1]) if exited else -number if number else 1
    return Ended(int(match["rank"]), code, match["node"])
