"""A scheduler of another kind, by `megaboa.scheduler.protocol` alone: its jobs live in the memory of this process, and
its nodes are processes of this machine."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

from megaboa.causes import Failure
from megaboa.scheduler.answers import Choice, Life, QueuedJob, Table, Task, Where
from megaboa.scheduler.local import Machine

NODES = ("east", "west")
VARIABLE = "TOWER_JOB"  # of a job's processes


@dataclass(frozen=True)
class TowerJob:
    id: str
    restarts: int = 0
    start: float | None = None
    nodes: str = ""
    excluded: str = ""  # with blanks between them
    partition: str = "tower"
    state: str = "waits"
    can_requeue: bool = True

    @property
    def waits(self):
        return self.state == "waits"

    @property
    def has_ended(self):
        return self.state == "over"


class TowerPlace(Machine):
    """The one node of a job."""

    def __init__(self, tower, job, container):
        super().__init__(container)
        self.tower, self.job, self.nodes = tower, job, job.nodes.split()

    def interruption(self, since):
        bad = self.tower.fallen(self.nodes, since)
        return Failure("node_failure", "; ".join(bad.values()), nodes=tuple(bad)) if bad else None

    def requeue(self, excluded):
        self.tower.put_back(self.job.id, excluded)
        return True


@dataclass
class Tower:
    """Runs one job at a time, on the first node that is well."""

    name: str = "Tower"
    profile: str = "tower"
    inquiry: str = "tower look"
    image_plugin: str = "tower that starts images"
    accounts: str = "tower's book"
    names: tuple[str, ...] = ("floor",)
    jobs: dict[str, TowerJob] = field(default_factory=dict)
    down: dict[str, float] = field(default_factory=dict)  # nodes, and since when

    # What an administrator, or chance, does

    def run(self, job):
        known = self.jobs.get(job, TowerJob(job))
        node = next(node for node in NODES if node not in known.excluded.split())
        self.jobs[job] = replace(known, state="runs", nodes=node, start=time.time())

    def put_back(self, job, excluded):
        known = self.jobs[job]
        told = " ".join(sorted(excluded))
        self.jobs[job] = replace(known, state="waits", nodes="", excluded=told, restarts=known.restarts + 1)

    # This process

    def is_here(self):
        return True

    def several(self, nodes):
        return f"`tower climb {nodes}`"

    def prepare(self):
        pass

    def ask_once(self):
        pass

    def in_job(self, environment):
        return VARIABLE in environment

    def place(self, launch, device, environment, container) -> TowerPlace | None:
        if launch.start.starter == "local" or VARIABLE not in environment:
            return None
        return TowerPlace(self, self.jobs[environment[VARIABLE]], container)

    def task(self, environment):
        return Task(0, 0, 1, 0, 1) if VARIABLE in environment else None

    def node_name(self, environment):
        return None

    # Jobs and nodes

    def cluster(self):
        return "babel"

    def job(self, job):
        return self.jobs.get(job)

    def is_alive(self, job):
        return not self.jobs[job].has_ended if job in self.jobs else None

    def cancel(self, job):
        self.jobs[job] = replace(self.jobs[job], state="over")
        return True

    def exclude(self, job, nodes):
        self.jobs[job] = replace(self.jobs[job], excluded=" ".join(sorted(nodes)))
        return True

    def waiting(self):
        return [job for job in self.jobs.values() if job.waits]

    def queue(self):
        living = [job for job in self.jobs.values() if not job.has_ended]
        return [QueuedJob(job.id, job.state, waits=job.waits, nodes=job.nodes) for job in living]

    def run_of(self, job, rule, results):
        return None

    def lives(self, jobs):
        return [Life(job, 0.0, self.jobs[job].start, time.time()) for job in jobs] or None

    def hostnames(self, nodes):
        return nodes.split()

    def usable_nodes(self, partition):
        return {node for node in NODES if node not in self.down}

    def gpus_of_a_node(self, partition):
        return 0

    def fallen(self, nodes, since):
        return {node: f"{node} fell" for node in nodes if self.down.get(node, 0.0) > since}

    # What jobs ask for

    def resources(self, size=None, where=None, options=None, gpus=None, profile=None):
        asked = {"floors": lambda wildcards: size(wildcards).nodes} if size else {}
        return asked | ({} if options is None else {"climb": options})

    def options(self, own="", returns=False, after=None, rule="", outlives=False):
        return f"{own} up".strip()

    def tasks_per_node(self, options):
        return None

    def options_problem(self, options):
        return None

    def settings_problem(self, settings, jobs):
        return None

    def excesses(self, asked):
        return [[] for _ in asked]

    def where(self, profile):
        return Where(profile.get("floor"), None)

    def find(self, names, known):
        return Choice(dict.fromkeys(names, "first"), [], [])

    def describe(self):
        return "a tower", [Table(("node",), [(node,) for node in NODES])]

    # Images

    def starts_images(self, launcher=None):
        return False

    def process(self, wanted, environment, step, gpus=0):
        return ["climb"]

    def refusal(self, said):
        return None
