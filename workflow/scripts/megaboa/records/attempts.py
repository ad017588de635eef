"""The history of a run: lines of attempts.jsonl and steps.jsonl, and records that ranks leave for their supervisor."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from megaboa import files
from megaboa.causes import Action, Cause
from megaboa.records.base import IF_SET, NOT_WRITTEN, Event, Range, Record, events


@dataclass(frozen=True, kw_only=True)
class Code(Record):
    """The library's code as an attempt found it; `commit` and `changed` are None if git doesn't know."""

    commit: str | None = None
    changed: bool | None = None
    digest: str


@dataclass(frozen=True, kw_only=True)
class RanOn(Record):
    """Environment and code that an attempt ran with."""

    environment: str | None = None  # digest of Python's version and of all packages
    bridge: str | None = None
    code: Code | None = None
    attempts: tuple[int, ...] = field(default=(), metadata=IF_SET)  # in summaries: the attempts with this software


@dataclass(frozen=True, kw_only=True)
class Called(Event):
    """A user's call, as opposed to a restart by the scheduler."""

    event = "call"
    job: str | None = None
    restarts: int | None = None
    excluded: tuple[str, ...] | None = None  # nodes that the user excluded


@dataclass(frozen=True, kw_only=True)
class AttemptStart(Event):
    event = "start"
    attempt: int
    host: str = ""
    pid: int = 0
    job: str | None = None
    restarts: int | None = None  # of the job
    nodes: tuple[str, ...] = ()
    spares: tuple[str, ...] = field(default=(), metadata=IF_SET)  # the job's other nodes, on standby
    unused: tuple[str, ...] = field(default=(), metadata=IF_SET)  # nodes replaced by spares, still held by the job
    world_size: int = 1
    resumed_from: int = 0
    parent: str | None = None  # `<experiment>/<run>@<step>`, if it starts from another run's checkpoint
    skipped: tuple[Range, ...] = ()
    image: str | None = None
    ran_on: RanOn | None = None
    before: dict[str, float] = field(default_factory=dict, metadata=IF_SET)  # seconds by part of `BEFORE`


Outcome = Literal["completed", "failed", "interrupted"]


@dataclass(frozen=True, kw_only=True)
class AttemptEnd(Event):
    event = "end"
    attempt: int
    outcome: Outcome = "failed"
    iteration: int = 0  # of the newest complete checkpoint
    cause: Cause | None = None
    action: Action | None = None
    detail: str | None = None
    rank: int | None = None  # the rank to blame, if known
    bad_nodes: tuple[str, ...] = ()
    first_step: int | None = None  # first step done in this attempt; None if it did none
    last_step: int | None = None
    # The step of the copies on the nodes that the ranks started from, if these were newer than `resumed_from`.
    local: int | None = field(default=None, metadata=IF_SET)
    repeated: int = field(default=0, metadata=IF_SET)  # number of steps of earlier attempts that this one had to repeat


@dataclass(frozen=True, kw_only=True)
class Left(Event):
    """The job was given nodes that the run avoids, and went back into the queue."""

    event = "left"
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Cancelled(Event):
    """The job was cancelled while no ranks ran."""

    event = "cancelled"
    detail: str | None = None


@dataclass(frozen=True, kw_only=True)
class GaveUp(Event):
    """The run has failed while no ranks ran, for example because the file system didn't come back."""

    event = "gave_up"
    cause: Cause | None = None
    detail: str | None = None


@dataclass(frozen=True, kw_only=True)
class Unhealthy(Event):
    """The health check refused nodes."""

    event = "unhealthy"
    bad_nodes: tuple[str, ...] = ()
    detail: str | None = None


@dataclass(frozen=True, kw_only=True)
class Distrusted(Event):
    """A checkpoint was set aside; `unread`: only because ranks failed to load it, not because its files changed."""

    event = "distrust"
    iteration: int
    detail: str | None = None
    aside: str | None = None  # its new path
    unread: bool = field(default=False, metadata=IF_SET)


@dataclass(frozen=True, kw_only=True)
class Trusted(Event):
    """A checkpoint that was set aside was put back."""

    event = "trust"
    iteration: int


@dataclass(frozen=True, kw_only=True)
class LeftOut(Event):
    """The batches of a loss spike are skipped from now on."""

    event = "skip"
    steps: Range


@dataclass(frozen=True, kw_only=True)
class NodeTrouble(Event):
    """A line of <store>/nodes/<cluster>/<node>.jsonl: a trouble that a run had with a node."""

    event = "trouble"
    what: str  # a key of WEIGHTS in run/node_memory.py, or FORGOTTEN
    detail: str = ""
    run: str | None = None  # `<experiment>/<run>`
    attempt: int | None = None


BEFORE = ("health_check", "checkpoint", "environment")  # done by the supervisor before it starts the ranks

# --- attempts/NN/steps.jsonl: events seen by the last rank ------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class StepEvent(Event):
    attempt: int = field(default=0, metadata=NOT_WRITTEN)  # not in the file, because its folder says it


# `keeper`: the process that ranks are forked from, if there is one, has imported Bridge, perhaps before the attempt
# started. `built`: the checkpoint is loaded too. `train_start` follows, when the data's index is there.
PHASES = ("keeper", "started", "imported", "verified", "configured", "connected", "model", "built")


@dataclass(frozen=True, kw_only=True)
class Phase(StepEvent):
    """The ranks' start has reached one of `PHASES`."""

    event = "phase"
    phase: str


@dataclass(frozen=True, kw_only=True)
class TrainStart(StepEvent):
    event = "train_start"
    step: int | None = None
    world_size: int | None = None
    gpu: str | None = None
    flops_per_token: float | None = None


@dataclass(frozen=True, kw_only=True)
class Step(StepEvent):
    """`loss` is None if it wasn't recorded, NaN if it was NaN."""

    event = "step"
    step: int
    seconds: float | None = None
    loss: float | None = None
    grad_norm: float | None = None
    lr: float | None = None
    tokens: int | None = None  # of this step
    skipped: bool = False  # its update was skipped by fp16's loss scaling
    losses: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Evaluated(StepEvent):
    event = "eval"
    step: int
    seconds: float | None = None
    losses: dict[str, float] = field(default_factory=dict)
    samples: Range | None = field(default=None, metadata=IF_SET)


@dataclass(frozen=True, kw_only=True)
class Tested(StepEvent):
    event = "test"
    step: int
    seconds: float | None = None
    losses: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Saved(StepEvent):
    event = "save"
    step: int
    seconds: float | None = None
    local: bool = field(default=False, metadata=IF_SET)  # to copies on the nodes, not to a checkpoint


@dataclass(frozen=True, kw_only=True)
class TrainEnd(StepEvent):
    event = "end"
    step: int


# --- what ranks leave for their supervisor ----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RankEnd(Record):
    """attempts/NN/end/<rank>.json: the step at which a rank's training ended, and its peak GPU memory in bytes."""

    step: int
    peak_allocated: int | None = field(default=None, metadata=IF_SET)
    peak_reserved: int | None = field(default=None, metadata=IF_SET)


@dataclass(frozen=True, kw_only=True)
class Found(Record):
    """found.json: facts that only the ranks know: a recipe's own settings, and what installed versions support."""

    train_iters: int | None = None
    saves: bool = True
    async_save: bool = False


@dataclass(frozen=True, kw_only=True)
class BetweenNodes(Record):
    """A node's connections to the others in the health check."""

    reached: bool  # whether it reached the first node, where all nodes meet
    missing: tuple[int, ...] = ()  # numbers of the nodes that didn't arrive
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class NodeHealth(Record):
    """attempts/NN/health/<node>.json: the result of a node's health check."""

    node: str
    number: int
    ok: bool
    problems: tuple[str, ...]
    stage: Literal["local", "done"]
    collective: BetweenNodes
    measured: dict[str, Any]  # by test


@dataclass(frozen=True, kw_only=True)
class StandbyOrder(Record):
    """attempts/NN/standby/go: the order for a standby step to start the ranks of the next attempt."""

    command: tuple[str, ...]
    logs: str
    environment: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class CheckpointShare(Record):
    """attempts/NN/verified/<node>.json: checksums of the share of a checkpoint's files that this node has read."""

    digests: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class CheckpointMark(Record):
    """complete.json of a checkpoint: its save is finished. Markers of older versions have neither sizes nor time."""

    iteration: int | None = None
    files: dict[str, int] = field(default_factory=dict)  # sizes in bytes
    time: float | None = field(default=None, metadata=IF_SET)


@dataclass(frozen=True, kw_only=True)
class LocalName(Record):
    """local-copies.json: the name under which nodes keep their copies of the run.

    Copies under another name, or of attempts before `since`, no longer count.
    """

    name: str
    since: int = 1


@dataclass(frozen=True, kw_only=True)
class LocalPart(Record):
    """<rank>.json next to <rank>.pt on a node: marks a rank's copy there as complete."""

    iteration: int
    rank: int
    attempt: int  # parts of different attempts can't be combined
    world_size: int
    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class LocalBeginning(Record):
    """attempts/NN/local.json: the ranks start from the copies of this step on their nodes."""

    iteration: int


@dataclass(frozen=True, kw_only=True)
class Holder(Record):
    """claims/<number>.json: the process that trains a run. Older claims name neither user, cluster nor machine."""

    host: str
    machine: str | None = None  # identifies the machine's boot and PID namespace
    pid: int
    user: str | None = None
    job: str | None = None
    restarts: int | None = None
    cluster: str | None = None
    time: float | None = None


PACES_BYTES = 32_768  # of the tail of paces.jsonl that is read at first


@dataclass(frozen=True, kw_only=True)
class Pace(Event):
    """A line of attempts/NN/paces.jsonl, written after a save: each rank's seconds for the same matrix product.

    NaN: it could not be measured, for example because a GPU had no memory left.
    """

    event = "pace"
    step: int
    seconds: tuple[float, ...]


LEDGER = {
    kind.event: kind
    for kind in (Called, AttemptStart, AttemptEnd, Left, Cancelled, GaveUp, Unhealthy, Distrusted, Trusted, LeftOut)
}
LM_LOSS = "lm loss"  # Megatron's name of the loss
STEPS = {kind.event: kind for kind in (Phase, TrainStart, Step, Evaluated, Tested, Saved, TrainEnd)}


def read_ledger(path: str | Path) -> list[Event]:
    """The events of a run's ledger, oldest first, without incomplete lines and unknown kinds."""
    return events(LEDGER, files.read_jsonl(path), path)


def read_paces(path: str | Path, last: int | None = None) -> list[Pace]:
    """The lines of a paces.jsonl, oldest first: all, or the `last` ones; empty if there is no file.

    Only the tail is read for the `last` ones, because lines of many ranks are long.
    """
    if last is None:
        return events({Pace.event: Pace}, files.read_jsonl(path), path)
    size, there = PACES_BYTES, Path(path).stat().st_size if Path(path).exists() else 0
    while len(found := files.read_jsonl_tail(path, size)) < last and size < there:
        size *= 4
    return events({Pace.event: Pace}, found[-last:], path)


def read_node_troubles(path: str | Path) -> list[NodeTrouble]:
    return events({NodeTrouble.event: NodeTrouble}, files.read_jsonl(path), path)


def read_steps(path: str | Path, attempt: int = 0) -> list[StepEvent]:
    """The events of an attempt's steps.jsonl, oldest first, without incomplete lines and unknown kinds."""
    return events(STEPS, ({**line, "attempt": attempt} for line in files.read_jsonl(path)), path)
