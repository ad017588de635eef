"""Queries and commands to SLURM. Runs on the host, where squeue, scontrol and srun are; standard library only."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass

from megaboa.scheduler.answers import UnreachableError

QUERY_SECONDS = 60
# Equivalent to --all: includes partitions that are hidden, or not open to this user's group.
_HIDDEN_TOO = {"SQUEUE_ALL": "1", "SINFO_ALL": "1", "SCONTROL_ALL": "1"}
SLOW_SECONDS = 3.0  # after which a person is told that an answer is missing
SILENT_SECONDS = 30.0  # during which a process that only looks doesn't repeat a question that got no answer
CONTROLLERS = ("squeue", "scontrol", "sinfo")  # commands that the controller answers
WAITING_SECONDS = 20  # short, because callers that ask for waiting jobs have other work to do
# The user's own defaults for SLURM's commands. With SQUEUE_PARTITION, squeue omits jobs of other partitions, as if they
# had ended; SCANCEL_INTERACTIVE waits for a key.
_USERS_DEFAULTS = ("SQUEUE_", "SCANCEL_", "SINFO_", "SCONTROL_", "SACCT_")
# slurmctld's answer about a job that it has forgotten, or never known.
_NO_SUCH_JOB = "Invalid job id"
# States after which a job never runs again.
ENDED = frozenset(
    [
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "TIMEOUT",
        "REVOKED",
    ]
)
WAITING = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT")
# A node in one of these states, or one that doesn't answer (`*`), can't run ranks.
_DOWN_STATES = re.compile(r"DOWN|FAIL|UNKNOWN|NOT_RESPONDING|\*")
_BAD_STATES = re.compile(r"DOWN|FAIL|DRAIN|UNKNOWN|POWERING_DOWN|POWERED_DOWN|NOT_RESPONDING|\*")


@dataclass(frozen=True)
class Job:
    """A job as reported by `scontrol show job`."""

    id: str
    state: str
    reason: str = ""  # why it waits or, as soon as it is ended, why it ended: even while its state is only COMPLETING
    restarts: int = 0
    nodes: str = ""  # SLURM's compressed form, such as n[1-2]
    start: float | None = None
    end: float | None = None  # end of the wall time
    preempted: bool = False
    requeue: bool = False  # whether it may be requeued
    batch: bool = True
    partition: str = ""
    excluded: str = ""

    @property
    def timed_out(self) -> bool:
        return self.state in ("TIMEOUT", "DEADLINE") or (self.is_ending and self.reason in ("TimeLimit", "DeadLine"))

    @property
    def lost_node(self) -> bool:
        """Whether SLURM ended it for good because a node died; a requeued job has another restart instead."""
        return self.state == "NODE_FAIL" or (self.is_ending and self.reason == "NodeDown")

    @property
    def out_of_memory(self) -> bool:
        return self.state == "OUT_OF_MEMORY" or (self.is_ending and self.reason == "OutOfMemory")

    @property
    def is_ending(self) -> bool:
        return self.state == "COMPLETING"

    @property
    def waits(self) -> bool:
        return self.state in WAITING

    @property
    def has_ended(self) -> bool:
        return self.state in ENDED

    @property
    def can_requeue(self) -> bool:
        """Whether SLURM can start it again: an interactive job has nothing to start."""
        return self.requeue and self.batch


@dataclass(frozen=True)
class Node:
    name: str
    state: str
    reason: str = ""
    booted: float | None = None
    started: float | None = None  # when its slurmd was started

    @property
    def down(self) -> bool:
        """Whether everything that ran on the node is gone. A drained node lets its jobs finish."""
        return _DOWN_STATES.search(self.state) is not None


def available() -> bool:
    return shutil.which("scontrol") is not None


def show_job(job: str) -> Job | None:
    """A job; None if SLURM has forgotten it."""
    text = query(["scontrol", "-o", "show", "job", job])
    return parse_job(_record_of(job, text)) if text else None


def _record_of(job: str, records: str) -> str:
    """The job's own line. The number of an array is also that of one of its tasks, and SLURM then shows all of them."""
    lines = records.strip().splitlines()
    return next((line for line in lines if fields(line).get("JobId") == job), lines[0])


def waiting_jobs() -> list[Job]:
    """Our jobs that wait in the queue."""
    text = query(["squeue", "--me", "--noheader", "--states=PENDING", "--format=%i|%P|%x"], WAITING_SECONDS) or ""
    rows = [line.split("|") for line in text.splitlines() if line.count("|") == 2]
    return [Job(job, "PENDING", partition=partition, excluded=given(excluded)) for job, partition, excluded in rows]


def lives_of_ours() -> list[str]:
    """Our waiting and running jobs, with their numbers of restarts: `JOB.RESTARTS`."""
    text = query(["squeue", "--me", "--noheader", "--Format=JobID:32,RestartCnt:16"]) or ""
    return [".".join(line.split()) for line in text.splitlines() if len(line.split()) == 2]


def is_alive(job: str) -> bool | None:
    """Whether a job runs, or waits and will run; None if SLURM doesn't know it.

    A job of ours has then ended long ago. About another user's job it means nothing (PrivateData=jobs).
    """
    text = query(["squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%A %T"]) or ""
    rows = [line.split() for line in text.splitlines()]
    if any(len(row) != 2 for row in rows):  # what isn't understood mustn't be taken for a job's end
        raise UnreachableError(f"squeue: {text.strip()}: the job's number and state were asked for")
    states = [state for number, state in rows if number == job]  # of an array, all tasks are shown
    return any(state not in ENDED for state in states) if states else None


@functools.cache
def cluster() -> str:
    """Name of the cluster that answers here. Another cluster that shares the store has jobs with the same numbers."""
    if "SLURM_JOB_ID" in os.environ and (name := os.environ.get("SLURM_CLUSTER_NAME")):
        return name
    if name := settings().get("ClusterName"):
        return name
    raise UnreachableError("scontrol show config: no ClusterName")


def settings() -> dict[str, str]:
    """slurm.conf, as seen by the controller."""
    text = query(["scontrol", "show", "config"]) or ""
    return dict(re.findall(r"^(\w+)\s*=[ \t]*(.*?)\s*$", text, re.MULTILINE))


def controllers_time() -> float | None:
    """The time of the controller's clock, in whole seconds; None if it isn't reported."""
    text = query(["scontrol", "show", "config"]) or ""
    found = re.search(r"^Configuration data as of (\S+)", text, re.MULTILINE)
    return moment(found[1]) if found else None


def show_nodes(nodes: str) -> list[Node]:
    text = query(["scontrol", "-o", "show", "node", nodes]) if nodes else None
    return parse_nodes(text or "")


def hostnames(nodes: str) -> list[str]:
    """`n[1-2]` as n1 and n2, in the order in which SLURM assigns ranks."""
    return (query(["scontrol", "show", "hostnames", nodes]) or "").split() if nodes else []


def usable_nodes(partition: str) -> set[str]:
    """The nodes of a partition that a job could get, now or later."""
    text = query(["sinfo", "--noheader", "--Node", f"--partition={partition}", "--format=%N %T"]) or ""
    rows = [line.split() for line in text.splitlines()]
    return {name for name, state, *_ in (row for row in rows if len(row) >= 2) if not _BAD_STATES.search(state.upper())}


@functools.lru_cache(maxsize=10_000)
def batch_script(job: str) -> str:
    """A job's batch script, which never changes, so it is cached. Empty if SLURM has forgotten the job."""
    return query(["scontrol", "write", "batch_script", job, "-"]) or ""


def step_of(job: str, name: str) -> str | None:
    """The id of a job's step with this name."""
    text = query(["squeue", "--steps", "--noheader", f"--jobs={job}", "--format=%i %j"]) or ""
    found = [line.split() for line in text.splitlines()]
    return next((row[0] for row in reversed(found) if row[1:] == [name]), None)


def signal_step(step: str, name: str) -> bool:
    return _do(["scancel", f"--signal={name}", step])


def requeue(job: str) -> bool:
    """Requeue our own job. SLURM ends its processes right after it has agreed."""
    return _do(["scontrol", "requeue", job])


def exclude(job: str, nodes: Iterable[str]) -> bool:
    """Exclude nodes from a waiting job. SLURM refuses that for a running one."""
    return _do(["scontrol", "update", f"JobId={job}", f"ExcNodeList={','.join(sorted(nodes))}"])


def cancel(job: str) -> bool:
    return _do(["scancel", job])


def parse_job(text: str) -> Job:
    field = fields(text)
    return Job(
        id=field["JobId"],
        state=field["JobState"],
        reason=field.get("Reason", ""),
        restarts=int(field.get("Restarts", 0)),
        nodes=given(field.get("NodeList")),
        start=moment(field.get("StartTime")),
        end=moment(field.get("EndTime")),
        preempted=moment(field.get("PreemptTime")) is not None,
        requeue=field.get("Requeue") == "1",
        batch=field.get("BatchFlag") != "0",
        partition=field.get("Partition", ""),
        excluded=given(field.get("ExcNodeList")),
    )


def parse_nodes(text: str) -> list[Node]:
    found = []
    for line in text.splitlines():
        field = fields(line)
        if "NodeName" in field:
            reason = re.search(r"\bReason=(.*?)(?: \[\S+@\S+\])?(?= \w+=|$)", line)
            times = moment(field.get("BootTime")), moment(field.get("SlurmdStartTime"))
            found.append(Node(field["NodeName"], field.get("State", ""), reason[1] if reason else "", *times))
    return found


def show_partitions() -> str:
    """scontrol's line for each partition, also for those that are hidden from this user."""
    return query(["scontrol", "-o", "show", "partition"]) or ""


# gpu, gpu:8, gpu:h100:8(S:0-1) or gpu:h100:no_consume:8
_GPUS = re.compile(r"(?:^|,)gpu(?::(?!no_consume\b|\d+(?:[(,]|$))([^:(,]+))?(?::no_consume)?(?::(\d+))?(?=[(,]|$)")


def gpus_in(resources: str) -> dict[str, int]:
    """The GPUs among a node's generic resources, by kind; the kind is empty where SLURM doesn't know it."""
    counts: dict[str, int] = {}
    for kind, number in _GPUS.findall(resources):
        counts[kind] = counts.get(kind, 0) + int(number or 1)
    return counts


def query(command: list[str], seconds: float | None = None) -> str | None:
    """A command's output; None if there is no such job."""
    begun = time.monotonic()
    if command[0] in CONTROLLERS and (silence := _policy.silence(begun)):
        raise UnreachableError(silence)
    try:
        done = _run(command, seconds or QUERY_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _unanswered(command, begun, str(error)) from None
    if done.returncode == 0:
        return done.stdout
    if _NO_SUCH_JOB in done.stderr:
        return None
    said = f"{' '.join(command)}: {done.stderr.strip() or f'exit code {done.returncode}'}"
    raise _unanswered(command, begun, said)


@dataclass
class _QueryPolicy:
    """How this process queries a controller that may not answer."""

    announces: bool = False  # a person waits for its answers
    asks_once: bool = False  # it only looks, so a silent controller is no reason to wait again
    silent: tuple[float, str] | None = None  # when the controller last failed to answer, and what was said

    def silence(self, now: float) -> str | None:
        return self.silent[1] if self.silent and now - self.silent[0] < SILENT_SECONDS else None


_policy = _QueryPolicy()


def announce_silence() -> None:
    """Say on stderr when an answer takes long: a stopped controller takes up to a minute for each question."""
    _policy.announces = True


def ask_once() -> None:
    """Of a process that only looks: after a question without an answer, others aren't asked for a while."""
    _policy.announces = _policy.asks_once = True


def asks_once() -> bool:
    return _policy.asks_once


def _unanswered(command: list[str], begun: float, said: str) -> UnreachableError:
    now = time.monotonic()
    # Fast errors aren't cached: another question may be answered.
    if _policy.asks_once and command[0] in CONTROLLERS and now - begun >= SLOW_SECONDS:
        _policy.silent = now, said
    return UnreachableError(said)


def _run(command: list[str], seconds: float) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run`; without a thread, because none can be started when a dry run shows its screen."""
    early = min(SLOW_SECONDS, seconds) if _policy.announces else seconds
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, env=environment(), **pipes) as process:
        try:
            try:
                output, errors = process.communicate(timeout=early)
            except subprocess.TimeoutExpired:
                if early == seconds:
                    raise
                told = f"SLURM has not answered for {early:g} s ({command[0]}); waiting for it"
                print(told, file=sys.stderr, flush=True)
                output, errors = process.communicate(timeout=seconds - early)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def environment() -> dict[str, str]:
    """Environment for SLURM's commands: without the user's own defaults, and with a time format that we can parse."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_USERS_DEFAULTS)}
    if "SLURM_JOB_ID" in kept:  # inside a job, the cluster is the one that it runs on
        kept.pop("SLURM_CLUSTERS", None)
    return {**kept, "SLURM_TIME_FORMAT": "standard", **_HIDDEN_TOO}


def forget_users_defaults() -> None:
    """Remove the user's defaults for other code in this process that calls SLURM, such as Snakemake's executor."""
    for name in [name for name in os.environ if name.startswith(_USERS_DEFAULTS)]:
        del os.environ[name]


def given(value: str | None) -> str:
    return "" if value in (None, "(null)") else str(value)


def moment(text: str | None) -> float | None:
    try:
        return time.mktime(time.strptime(text or "", "%Y-%m-%dT%H:%M:%S"))
    except ValueError:  # None, Unknown, N/A
        return None


def fields(line: str) -> dict[str, str]:
    return dict(re.findall(r"(?:^|\s)([A-Za-z][\w/:]*)=(\S*)", line))


def _do(command: list[str]) -> bool:
    try:
        done = subprocess.run(command, capture_output=True, timeout=QUERY_SECONDS, check=False, env=environment())
        return done.returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False
