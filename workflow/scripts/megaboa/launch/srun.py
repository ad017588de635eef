"""Ranks as one step of a SLURM job, on any number of nodes."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from megaboa.launch import slurm
from megaboa.launch.ranks import STACKS_SIGNAL, Ended, ReservedPort, rendezvous_environment

# srun's own output, beside the logs of the ranks.
SRUN_LOG = "srun.log"
GONE_SECONDS = 30
# `srun: error: n2: task 1: Killed`, `srun: error: n[1-2]: tasks 0-1: Exited with exit code 1`
_TASK = re.compile(r"^srun: error: (?P<node>\S+): tasks? (?P<rank>\d+)\S*: (?P<what>.*)$", re.MULTILINE)
# From here on tasks end because srun makes them.
_CANCELLED = re.compile(r"^slurmstepd\S*: error: \*\*\* STEP \S+ ON \S+ CANCELLED", re.MULTILINE)
_SAID = re.compile(r"^(?:srun|slurmstepd\S*): error: .*", re.MULTILINE)
_EXIT_CODE = re.compile(r"Exited with exit code (\d+)")
_SIGNALS = {"Killed": 9, "Terminated": 15, "Segmentation fault": 11, "Aborted": 6, "Bus error": 7, "Interrupt": 2}


class SrunRanks:
    """One srun process; every task writes its own log on its own node."""

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
    ):
        self.tasks_are_ranks = tasks_are_ranks
        self.job, self.name, self.log = job, name, logs / SRUN_LOG
        # Reserved on this host, which is the first of the job's: rank 0 is here too. Held until the ranks have ended.
        self.port = ReservedPort()
        kept = {name: value for name, value in inherited.items() if not name.startswith(("SRUN_", "SBATCH_"))}
        with self.log.open("ab") as stream:
            self.process = subprocess.Popen(
                command,
                env={**kept, **environment, **rendezvous_environment(address, self.port.number)},
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is the supervisor's business
            )

    def poll(self) -> Ended | None:
        code = self.process.poll()
        if code is None:
            return None
        if code:
            end_step(self.job, self.name)
        self.port.close()
        try:
            said = self.log.read_text(errors="replace")
        except OSError:
            said = ""
        ended = read_end(code, said)
        return ended if self.tasks_are_ranks else replace(ended, rank=None)

    def ask(self) -> bool:
        return self._signal("TERM")

    def dump(self) -> None:
        self._signal(STACKS_SIGNAL.name.removeprefix("SIG"))

    def kill(self) -> None:
        if self.process.poll() is None:
            self._end()
        self.port.close()

    def _end(self) -> None:
        if not self._signal("KILL"):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGTERM)  # srun then ends the step itself
        deadline = time.monotonic() + GONE_SECONDS
        while self.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.2)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def _signal(self, name: str) -> bool:
        try:
            step = slurm.step_of(self.job, self.name)
        except slurm.SlurmUnreachableError:
            return False
        return step is not None and slurm.signal_step(step, name)


def end_step(job: str, name: str) -> None:
    """Ranks outlive an srun that is killed; they must not go on next to those that are started next."""
    deadline = time.monotonic() + GONE_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(slurm.SlurmUnreachableError):
            step = slurm.step_of(job, name)
            if step is None:
                return
            slurm.signal_step(step, "KILL")
        time.sleep(0.5)


def read_end(code: int, log: str) -> Ended:
    """How the ranks ended, from srun's exit code and its words.

    A task that was killed is the cause of others that failed; those that srun terminated are nobody's cause.
    """
    if code == 0:
        return Ended()
    tasks = [_task(match) for match in _TASK.finditer(_CANCELLED.split(log, maxsplit=1)[0])]
    tasks = tasks or [_task(match) for match in _TASK.finditer(log)]
    worst = min(tasks, key=_blame, default=Ended(returncode=code))
    return Ended(worst.rank, worst.returncode, worst.node, "\n".join(_SAID.findall(log)[:20]))


def _blame(task: Ended) -> tuple[bool, bool]:
    return task.returncode == -signal.SIGTERM, task.returncode > 0


def _task(match: re.Match[str]) -> Ended:
    exited = _EXIT_CODE.search(match["what"])
    number = next((number for word, number in _SIGNALS.items() if word in match["what"]), None)
    code = int(exited[1]) if exited else -number if number else 1
    return Ended(int(match["rank"]), code, match["node"])
