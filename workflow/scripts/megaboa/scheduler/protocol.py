"""The interface of a scheduler. A cluster's scheduler is a module or package next to this file, with an object that
implements `Scheduler`, and a line in registry.py. `local.py` is this machine, which has no jobs.

Nothing may be concluded from a scheduler that can't be asked: then every question raises `UnreachableError`, unless it
says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, Protocol

from megaboa.causes import Failure
from megaboa.paths import RunFolder
from megaboa.records import ImageStart, LaunchSpec
from megaboa.scheduler.answers import Choice, Life, QueuedJob, Size, Table, Task, Where
from megaboa.scheduler.ranks import Ranks

Environment = Mapping[str, str]


class Job(Protocol):
    """A job, as the scheduler told it last."""

    id: str
    restarts: int  # times that it was put back into the queue
    start: float | None
    nodes: str  # as the scheduler writes several: `Scheduler.hostnames`
    excluded: str  # nodes that it is kept away from, written likewise
    partition: str

    @property
    def waits(self) -> bool: ...
    @property
    def has_ended(self) -> bool:
        """For good."""

    @property
    def can_requeue(self) -> bool: ...


class Container(Protocol):
    """Puts a command into an image, or leaves it as it is."""

    runtime: str

    def around(self, command: Sequence[str], environment: Iterable[str]) -> list[str]: ...
    def inherited(self) -> dict[str, str]: ...
    def named(self, name: str) -> Container: ...


class Place(Protocol):
    """Where a supervisor runs and starts ranks: this machine, or the nodes of its job."""

    job: Job | None
    nodes: list[str]  # that ranks start on
    spares: list[str]  # other nodes of the job, which wait to take the place of these

    def replace(self, bad: Set[str], for_good: bool = True) -> bool:
        """Let spares take the place of these nodes, which this job uses no more (or only as its last spares); False,
        and nothing is done, where there are too few."""

    def unused(self) -> list[str]:
        """Nodes that were replaced, and that the job still holds."""

    def lost(self) -> dict[str, str]:
        """Nodes among `nodes` that the scheduler has taken out of the job, which goes on, with what it says of each."""

    def start(self, command: Sequence[str], world_size: int, logs: Path, environment: Environment) -> Ranks:
        """Every rank writes to `logs/rank-K.log`, or every node to `logs/node-K.log`."""

    def stand_by(self, command: Sequence[str], world_size: int, logs: Path, environment: Environment) -> None:
        """Prepare the next `start` on these nodes, while ranks run, where that saves time. Never raises.

        `command`: how every rank's begins; `logs`: a folder for it."""

    @property
    def stands_by(self) -> bool:
        """Whether a next `start` was prepared."""

    def start_on_nodes(self, command: Sequence[str], name: str, logs: Path, environment: Environment) -> Ranks:
        """One process on each node."""

    def unpack_image(self, nodes: int, logs: Path) -> Ranks | None:
        """Begin to unpack the image on the first nodes, spares last, for steps to share; None where that isn't how they
        start."""

    def share_image(self) -> None:
        """From now on steps take what was unpacked."""

    def remove_image(self) -> None:
        """What was unpacked goes. Never raises."""

    def close(self) -> None:
        """The supervisor ends: what the place keeps for it goes. Never raises."""

    def end_left_over(self, logs: Path) -> None:
        """End ranks that an earlier supervisor of this place has left behind; `logs`: where they write."""

    def deadline(self) -> float | None:
        """When the place is taken away, in unix seconds; None where it isn't."""

    def now(self) -> float:
        """The time by the clock that `deadline` goes by."""

    def interruption(self, since: float) -> Failure | None:
        """What the scheduler did to the ranks, as far as it knows; None: nothing, or unknown."""

    def cancelled(self) -> str | None:
        """Whether the job was cancelled, if the scheduler can be asked."""

    def requeue(self, excluded: Set[str]) -> bool:
        """Give the place back and be started again on other nodes than these. Only to be called last."""


class Scheduler(Protocol):
    name: str  # as people call it
    profile: str  # for it, of ours; and Snakemake's executor of that name
    inquiry: str  # commands that tell a person what became of a job or a node
    accounts: str  # what goodput.json calls them
    image_plugin: str  # what starts processes in images
    names: Sequence[str]  # of the profile's default-resources, which the site may leave open

    # This process
    def is_here(self) -> bool:
        """Whether it can be asked on this machine; also in a job. Never raises."""

    def several(self, nodes: int) -> str:
        """How a person gets so many nodes."""

    def prepare(self) -> None:
        """Called once by a process from which Snakemake submits."""

    def in_job(self, environment: Environment) -> bool: ...
    def place(self, launch: LaunchSpec, device: str, environment: Environment, container: Container) -> Place | None:
        """The nodes of the job that this process is in; None: ranks start on this machine. Raises `NoPlaceError`."""

    def task(self, environment: Environment) -> Task | None:
        """This process's rank among those started together; None: it was started alone."""

    def node_name(self, environment: Environment) -> str | None:
        """The name by which this node is excluded, where it isn't the host's."""

    # Jobs and nodes
    def cluster(self) -> str:
        """Its name: jobs of another one that shares the store have the same numbers."""

    def job(self, job: str) -> Job | None:
        """None: forgotten, or never known."""

    def is_alive(self, job: str) -> bool | None:
        """Whether it runs, or will; None: the scheduler doesn't know it, so a job of ours is over."""

    def cancel(self, job: str) -> bool:
        """Whether that was done. Never raises."""

    def exclude(self, job: str, nodes: Iterable[str]) -> bool:
        """Keep a waiting job away from these nodes alone; whether that was done. Never raises."""

    def waiting(self) -> Sequence[Job]:
        """Our jobs that wait."""

    def queue(self) -> list[QueuedJob]:
        """Our jobs that wait or run."""

    def run_of(self, job: QueuedJob, rule: str, results: Path) -> str | None:
        """The run of the experiment with these results for which Snakemake made the job by this rule. Never raises."""

    def lives(self, jobs: Sequence[str]) -> list[Life] | None:
        """The lives of these jobs, oldest first; None: there is no accounting, or it can't be read. Never raises."""

    def hostnames(self, nodes: str) -> list[str]:
        """One by one, in the order of ranks."""

    def usable_nodes(self, partition: str) -> set[str]:
        """Those that a job could get, now or later."""

    def gpus_of_a_node(self, partition: str) -> int:
        """The most that a node of this partition has (or of these, with commas between); 0: none that it knows of."""

    def fallen(self, nodes: Sequence[str], since: float) -> dict[str, str]:
        """Of nodes whose supervisor is gone those that failed since, with what is said of each. Never raises."""

    # What Snakemake's jobs ask for, in its executor's words; functions take a job's wildcards
    def resources(
        self,
        size: Callable[[Any], Size] | None = None,  # an allocation: the job starts ranks on its nodes by itself
        where: Callable[[Any], Where] | None = None,
        options: Callable[[Any], str] | None = None,
        gpus: Callable[[Any], int] | None = None,  # of a node
        profile: Mapping[str, str] = ...,  # its default-resources
    ) -> dict[str, Any]: ...
    def options(
        self,
        own: str = "",
        returns: bool = False,
        after: RunFolder | None = None,
        rule: str = "",
        outlives: bool = False,
    ) -> str:
        """Further options of a job. `own`: the user's; `returns`: it may be put back into the queue;
        `after`: not before jobs have ended that the rule has made of this run; `outlives`: it goes on without a node
        that fails."""

    def tasks_per_node(self, options: str) -> int | None:
        """What the user's options say of it."""

    def options_problem(self, options: str) -> str | None:
        """What the user's options must leave to the keys of the experiment, if anything."""

    def where(self, profile: Mapping[str, str]) -> Where:
        """Training goes by a profile's default-resources."""

    def find(self, names: Collection[str], known: Mapping[str, str]) -> Choice:
        """Values for names that a profile leaves open. `known`: what it says, or the site."""

    def describe(self) -> tuple[str, list[Table]]:
        """The cluster, as its user sees it: in a line, and in tables."""

    # One process in an image, started by the scheduler's plugin
    def starts_images(self, launcher: str | None = None) -> bool:
        """Whether that plugin is here. `launcher`: the user's name for what starts processes."""

    def process(self, wanted: ImageStart, environment: Environment, step: bool, gpus: int = 0) -> list[str]:
        """What goes before its command; `step`: within this job, else as a job of its own where we are in none."""

    def refusal(self, said: str) -> str | None:
        """Where it has started nothing: why."""
