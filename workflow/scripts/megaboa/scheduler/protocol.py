"""The interface of a scheduler. A cluster's scheduler is a module or package next to this file, with an object that
implements `Scheduler`, and a line in registry.py. `local.py` is this machine, which has no jobs; a scheduler's
places may inherit its `Machine`.

If a scheduler can't be asked, nothing may be concluded: every query then raises `UnreachableError`, unless it says
otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, Protocol

from megaboa.causes import Failure
from megaboa.paths import RunFolder
from megaboa.records import ImageStart, LaunchSpec
from megaboa.scheduler.answers import Choice, Excess, Life, QueuedJob, Request, Size, Table, Task, Where
from megaboa.scheduler.ranks import Ranks

Environment = Mapping[str, str]


class Job(Protocol):
    """A job, as last reported by the scheduler."""

    id: str
    restarts: int  # times that it was requeued
    start: float | None
    nodes: str  # in the scheduler's notation for several nodes: `Scheduler.hostnames`
    excluded: str  # nodes that it must not get, in the same notation
    partition: str

    @property
    def waits(self) -> bool: ...
    @property
    def has_ended(self) -> bool:
        """Whether it has ended for good."""

    @property
    def can_requeue(self) -> bool: ...


class Container(Protocol):
    """Wraps a command to run it in an image, or leaves it unchanged."""

    runtime: str

    def around(self, command: Sequence[str], environment: Iterable[str]) -> list[str]: ...
    def inherited(self) -> dict[str, str]: ...
    def named(self, name: str) -> Container: ...


class Place(Protocol):
    """Where a supervisor runs and starts ranks: this machine, or the nodes of its job."""

    job: Job | None
    nodes: list[str]  # nodes that ranks start on
    spares: list[str]  # other nodes of the job, which can replace these

    def replace(self, bad: Set[str], for_good: bool = True) -> bool:
        """Replace these nodes by spares; this job no longer uses them (or only as its last spares). Returns False, and
        does nothing, if there are too few spares."""

    def unused(self) -> list[str]:
        """Replaced nodes that the job still holds."""

    def lost(self) -> dict[str, str]:
        """Those of `nodes` that the scheduler has removed from the job, which continues, each with the reason."""

    def start(self, command: Sequence[str], world_size: int, logs: Path, environment: Environment) -> Ranks:
        """Start ranks. Every rank writes to `logs/rank-K.log`, or every node to `logs/node-K.log`."""

    def stand_by(self, command: Sequence[str], world_size: int, logs: Path, environment: Environment) -> None:
        """Prepare the next `start` on these nodes while ranks run, if that saves time. Never raises.

        `command`: beginning of every rank's command; `logs`: a folder for the preparation.
        """

    @property
    def stands_by(self) -> bool:
        """Whether the next `start` is prepared."""

    def start_on_nodes(self, command: Sequence[str], name: str, logs: Path, environment: Environment) -> Ranks:
        """Start one process on each node."""

    def unpack_image(self, nodes: int, logs: Path) -> Ranks | None:
        """Start to unpack the image on the first nodes (spares come last), for steps to share. None if ranks start in
        another way."""

    def share_image(self) -> None:
        """Let later steps use the unpacked image."""

    def remove_image(self) -> None:
        """Remove the unpacked image. Never raises."""

    def close(self) -> None:
        """Release everything that the place keeps for the supervisor, which ends. Never raises."""

    def end_left_over(self, logs: Path) -> None:
        """End ranks left behind by an earlier supervisor of this place; `logs`: the folder that they write to."""

    def deadline(self) -> float | None:
        """Unix time at which the place is taken away; None if it isn't."""

    def now(self) -> float:
        """The time by the clock of `deadline`."""

    def interruption(self, since: float) -> Failure | None:
        """What the scheduler did to the ranks; None: nothing, or unknown."""

    def cancelled(self) -> str | None:
        """A sentence if the job was cancelled; None if not, or if the scheduler can't be asked."""

    def requeue(self, excluded: Set[str]) -> bool:
        """Give up the place, to be started again on nodes other than these. Must be the last call."""


class Scheduler(Protocol):
    name: str  # for people
    profile: str  # our profile for it, and Snakemake's executor, have this name
    inquiry: str  # commands that tell a person about a job or a node
    accounts: str  # the accounting's name in goodput.json
    image_plugin: str  # the plugin that starts processes in images
    names: Sequence[str]  # default-resources of a profile that may be left open to the site

    # This process
    def is_here(self) -> bool:
        """Whether it can be asked on this machine, also in a job. Never raises."""

    def several(self, nodes: int) -> str:
        """How a person gets this number of nodes."""

    def prepare(self) -> None:
        """Called once by a process in which Snakemake submits jobs."""

    def ask_once(self) -> None:
        """Called by a process that only looks: once a question has got no answer, it asks nothing for a while, and says
        early that there is none."""

    def in_job(self, environment: Environment) -> bool: ...
    def place(self, launch: LaunchSpec, device: str, environment: Environment, container: Container) -> Place | None:
        """The nodes of the job that this process is in; None if ranks start on this machine. Raises `NoPlaceError`."""

    def task(self, environment: Environment) -> Task | None:
        """This process's place among those started together; None if it was started alone."""

    def node_name(self, environment: Environment) -> str | None:
        """The name by which this node is excluded, if it isn't the host's."""

    # Jobs and nodes
    def cluster(self) -> str:
        """The cluster's name. Another cluster that shares the store has jobs with the same numbers."""

    def job(self, job: str) -> Job | None:
        """A job; None if it is forgotten, or was never known."""

    def is_alive(self, job: str) -> bool | None:
        """Whether a job runs, or will; None if the scheduler doesn't know it, so that a job of ours has ended."""

    def cancel(self, job: str) -> bool:
        """Cancel a job; returns whether that worked. Never raises."""

    def exclude(self, job: str, nodes: Iterable[str]) -> bool:
        """Exclude exactly these nodes from a waiting job; returns whether that worked. Never raises."""

    def waiting(self) -> Sequence[Job]:
        """Our waiting jobs."""

    def queue(self) -> list[QueuedJob]:
        """Our waiting and running jobs."""

    def run_of(self, job: QueuedJob, rule: str, results: Path) -> str | None:
        """The run of the experiment in `results` that Snakemake submitted this job for, by this rule. Never raises."""

    def lives(self, jobs: Sequence[str]) -> list[Life] | None:
        """The lives of these jobs, oldest first; None if there is no accounting, or it can't be read. Never raises."""

    def hostnames(self, nodes: str) -> list[str]:
        """The names of nodes, in the order of ranks."""

    def usable_nodes(self, partition: str) -> set[str]:
        """The nodes that a job could get, now or later."""

    def gpus_of_a_node(self, partition: str) -> int:
        """The largest number of GPUs of a node in this partition (or these, separated by commas); 0 if it knows of
        none."""

    def fallen(self, nodes: Sequence[str], since: float) -> dict[str, str]:
        """Nodes that failed since then, out of those whose supervisor is gone, with reasons. Never raises."""

    # Requests of Snakemake's jobs, in terms of its executor; functions get a job's wildcards
    def resources(
        self,
        size: Callable[[Any], Size] | None = None,  # an allocation, on whose nodes the job starts ranks itself
        where: Callable[[Any], Where] | None = None,
        options: Callable[[Any], str] | None = None,
        gpus: Callable[[Any], int] | None = None,  # per node
        profile: Mapping[str, str] = ...,  # the profile's default-resources
    ) -> dict[str, Any]: ...
    def options(
        self,
        own: str = "",
        returns: bool = False,
        after: RunFolder | None = None,
        rule: str = "",
        outlives: bool = False,
    ) -> str:
        """Further options of a job. `own`: the user's; `returns`: it may be requeued; `after`: it waits for earlier
        jobs that the rule made for this run; `outlives`: it continues without a node that fails."""

    def tasks_per_node(self, options: str) -> int | None:
        """The number in the user's options, if any."""

    def options_problem(self, options: str) -> str | None:
        """What the user's options set although keys of the experiment must set it, if anything."""

    def settings_problem(self, settings: Any, jobs: Iterable[tuple[str, Collection[str]]]) -> str | None:
        """What in the settings of Snakemake's executor keeps jobs from starting their ranks, if anything.

        `jobs`: the rule and the resources of each job of the call.
        """

    def excesses(self, asked: Sequence[Request]) -> list[list[Excess]]:
        """For each request, what the cluster doesn't grant, as far as it says."""

    def where(self, profile: Mapping[str, str]) -> Where:
        """Where training runs, according to a profile's default-resources."""

    def find(self, names: Collection[str], known: Mapping[str, str]) -> Choice:
        """Values for names that a profile leaves open. `known`: values from the profile or the site."""

    def describe(self) -> tuple[str, list[Table]]:
        """The cluster from its user's view: one line, and tables."""

    # One process in an image, started by the scheduler's plugin
    def starts_images(self, launcher: str | None = None) -> bool:
        """Whether the plugin is installed. `launcher`: the user's name for the program that starts processes."""

    def process(self, wanted: ImageStart, environment: Environment, step: bool, gpus: int = 0) -> list[str]:
        """The words before a command that start it in an image. `step`: within this job; else as a job of its own, if
        in none."""

    def refusal(self, said: str) -> str | None:
        """The reason why nothing was started, if the output has one."""
