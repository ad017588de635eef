"""SLURM. Only this package knows its commands, variables and states.

By subject: `queries` (its commands and their output), `allocation` and `srun` (a job's nodes, and ranks as one step of
it), `queue` (our jobs), `requests` (a job's resources), `partitions` (the cluster), `limits` (what it grants no job).
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megaboa.records import ImageStart, LaunchSpec
from megaboa.scheduler.answers import Choice, Excess, Life, QueuedJob, Request, Table, Task
from megaboa.scheduler.protocol import Container, Environment
from megaboa.scheduler.slurm import allocation, job_ends, limits, partitions, queries, queue, requests, srun


class Slurm:
    """Implements `megaboa.scheduler.protocol.Scheduler`."""

    name = "SLURM"
    profile = "slurm"
    inquiry = "sacct -j JOB, sinfo -R"
    accounts = "sacct"
    image_plugin = "srun with pyxis"
    names = partitions.NAMES
    resources = staticmethod(requests.resources)
    options = staticmethod(requests.options)
    tasks_per_node = staticmethod(requests.tasks_per_node)
    options_problem = staticmethod(requests.options_problem)
    where = staticmethod(requests.where)

    def is_here(self) -> bool:
        return shutil.which("squeue") is not None

    def several(self, nodes: int) -> str:
        return f"`snakemake --profile slurm`, or `salloc --nodes={nodes}` by hand"

    def prepare(self) -> None:
        queries.forget_users_defaults()
        queries.announce_silence()

    def ask_once(self) -> None:
        queries.ask_once()

    def settings_problem(self, settings: Any, jobs: Iterable[tuple[str, Collection[str]]]) -> str | None:
        return requests.settings_problem(settings, jobs)

    def excesses(self, asked: Sequence[Request]) -> list[list[Excess]]:
        return limits.excesses(asked)

    def in_job(self, environment: Environment) -> bool:
        return "SLURM_JOB_ID" in environment

    def place(
        self, launch: LaunchSpec, device: str, environment: Environment, container: Container
    ) -> allocation.Allocation | None:
        return allocation.here(launch, device, environment, container)

    def task(self, environment: Environment) -> Task | None:
        return srun.task(environment)

    def node_name(self, environment: Environment) -> str | None:
        return environment.get("SLURMD_NODENAME")

    def cluster(self) -> str:
        return queries.cluster()

    def job(self, job: str) -> queries.Job | None:
        return queries.show_job(job)

    def is_alive(self, job: str) -> bool | None:
        return queries.is_alive(job)

    def cancel(self, job: str) -> bool:
        return queries.cancel(job)

    def exclude(self, job: str, nodes: Iterable[str]) -> bool:
        return queries.exclude(job, nodes)

    def waiting(self) -> list[queries.Job]:
        return queries.waiting_jobs()

    def queue(self) -> list[QueuedJob]:
        return queue.read()

    def run_of(self, job: QueuedJob, rule: str, results: Path) -> str | None:
        return queue.run_of(job, rule, results)

    def lives(self, jobs: Sequence[str]) -> list[Life] | None:
        return queue.read_lives(jobs)

    def hostnames(self, nodes: str) -> list[str]:
        return queries.hostnames(nodes)

    def usable_nodes(self, partition: str) -> set[str]:
        return queries.usable_nodes(partition)

    def gpus_of_a_node(self, partition: str) -> int:
        return partitions.gpus_of_a_node(partition)

    def fallen(self, nodes: Sequence[str], since: float) -> dict[str, str]:
        return job_ends.fallen_of(nodes, since)

    def find(self, names: Collection[str], known: Mapping[str, str]) -> Choice:
        return partitions.find(names, known)

    def describe(self) -> tuple[str, list[Table]]:
        return partitions.describe()

    def starts_images(self, launcher: str | None = None) -> bool:
        return srun.has_pyxis(launcher or "srun")

    def process(self, wanted: ImageStart, environment: Environment, step: bool, gpus: int = 0) -> list[str]:
        return srun.one_process(wanted, step or self.in_job(environment), gpus)

    def refusal(self, said: str) -> str | None:
        return srun.refusal(said)
