"""What happened to a run: the lines of attempts.jsonl and steps.jsonl, and what ranks leave for their supervisor."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from megaboa import files
from megaboa.causes import Action, Cause
from megaboa.records.base import IF_SET, NOT_WRITTEN, Event, Range, Record, events


@dataclass(frozen=True, kw_only=True)
class Code(Record):
    """The library as an attempt found it; `commit` and `changed` where git knows."""

    commit: str | None = None
    changed: bool | None = None
    digest: str


@dataclass(frozen=True, kw_only=True)
class RanOn(Record):
    """Environment and code that an attempt ran with."""

    environment: str | None = None  # digest of Python's version and of all packages
    bridge: str | None = None
    code: Code | None = None
    attempts: tuple[int, ...] = field(default=(), metadata=IF_SET)  # in summaries: the attempts that ran with these


@dataclass(frozen=True, kw_only=True)
class Called(Event):
    """A user's call, as opposed to a restart by the scheduler."""

    event = "call"
    job: str | None = None
    restarts: int | None = None
    excluded: tuple[str, ...] | None = None  # nodes that the user keeps the job away from


@dataclass(frozen=True, kw_only=True)
class AttemptStart(Event):
    event = "start"
    attempt: int
    host: str = ""
    pid: int = 0
    job: str | None = None
    restarts: int | None = None  # of the job
    nodes: tuple[str, ...] = ()
    spares: tuple[str, ...] = field(default=(), metadata=IF_SET)  # the job's other nodes, which wait
    unused: tuple[str, ...] = field(default=(), metadata=IF_SET)  # and those that spares have replaced: it holds them
    world_size: int = 1
    resumed_from: int = 0
    parent: str | None = None  # `<experiment>/<run>@<step>`, where it begins with another run's checkpoint
    skipped: tuple[Range, ...] = ()
    image: str | None = None
    ran_on: RanOn | None = None
    before: dict[str, float] = field(default_factory=dict, metadata=IF_SET)  # what came first, in seconds: `BEFORE`


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
    rank: int | None = None  # the one to blame, where it is known
    bad_nodes: tuple[str, ...] = ()
    first_step: int | None = None  # done in this attempt; None: none
    last_step: int | None = None
    # Its ranks began with the copies of this step on their nodes, which are newer than the checkpoint of its start.
    local: int | None = field(default=None, metadata=IF_SET)
    repeated: int = field(default=0, metadata=IF_SET)  # steps that an earlier attempt had done, and this one began with


@dataclass(frozen=True, kw_only=True)
class Left(Event):
    """The job was given nodes that the run avoids, and went back into the queue."""

    event = "left"
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Cancelled(Event):
    """Cancelled while no ranks ran."""

    event = "cancelled"
    detail: str | None = None


@dataclass(frozen=True, kw_only=True)
class Unhealthy(Event):
    """The health check refused nodes."""

    event = "unhealthy"
    bad_nodes: tuple[str, ...] = ()
    detail: str | None = None


@dataclass(frozen=True, kw_only=True)
class Distrusted(Event):
    """A checkpoint was set aside; `unread`: only because ranks failed to load it."""

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
    """A loss spike's batches are left out from now on."""

    event = "skip"
    steps: Range


@dataclass(frozen=True, kw_only=True)
class NodeTrouble(Event):
    """<store>/nodes/<cluster>/<node>.jsonl: what a run met on a node."""

    event = "trouble"
    what: str  # run/node_memory.py has them, with their weights
    detail: str = ""
    run: str | None = None  # `<experiment>/<run>`
    attempt: int | None = None


BEFORE = ("health_check", "checkpoint", "environment")  # looked at by the supervisor, before it starts ranks

# --- attempts/NN/steps.jsonl: what the last rank saw ------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class StepEvent(Event):
    attempt: int = field(default=0, metadata=NOT_WRITTEN)  # not in the file: its folder says so


# `keeper`: the process that ranks are forked from has imported Bridge, if there is one, maybe before the attempt began;
# `built`: a checkpoint is read, too. After these comes `train_start`: the data's index is there.
PHASES = ("keeper", "started", "imported", "verified", "configured", "connected", "model", "built")


@dataclass(frozen=True, kw_only=True)
class Phase(StepEvent):
    """How far the start of the ranks has come: `PHASES`."""

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
    skipped: bool = False  # by fp16's loss scaling
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
    local: bool = field(default=False, metadata=IF_SET)  # a copy on the nodes


@dataclass(frozen=True, kw_only=True)
class TrainEnd(StepEvent):
    event = "end"
    step: int


# --- what ranks leave for their supervisor ----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RankEnd(Record):
    """attempts/NN/end/<rank>.json: the step at which a rank's training ended, and its peak GPU memory, in
    bytes."""

    step: int
    peak_allocated: int | None = field(default=None, metadata=IF_SET)
    peak_reserved: int | None = field(default=None, metadata=IF_SET)


@dataclass(frozen=True, kw_only=True)
class Found(Record):
    """found.json: what only ranks can know: a recipe's own settings, and versions installed where they run."""

    train_iters: int | None = None
    saves: bool = True
    async_save: bool = False


@dataclass(frozen=True, kw_only=True)
class BetweenNodes(Record):
    """A node's connections to the others in the health check."""

    reached: bool  # the first node, where all meet
    missing: tuple[int, ...] = ()  # numbers of the nodes that didn't come
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class NodeHealth(Record):
    """attempts/NN/health/<node>.json: what a node's check has found."""

    node: str
    number: int
    ok: bool
    problems: tuple[str, ...]
    stage: Literal["local", "done"]
    collective: BetweenNodes
    measured: dict[str, Any]  # by what was tested


@dataclass(frozen=True, kw_only=True)
class StandbyOrder(Record):
    """attempts/NN/standby/go: what the ranks that wait there are to run, for the next attempt."""

    command: tuple[str, ...]
    logs: str
    environment: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class CheckpointShare(Record):
    """attempts/NN/verified/<node>.json: checksums of those files of a checkpoint that this node has read."""

    digests: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class CheckpointMark(Record):
    """complete.json of a checkpoint: its save is finished. Markers of older versions have neither sizes nor time."""

    iteration: int | None = None
    files: dict[str, int] = field(default_factory=dict)  # sizes
    time: float | None = field(default=None, metadata=IF_SET)


@dataclass(frozen=True, kw_only=True)
class LocalName(Record):
    """local-copies.json: the name under which nodes keep their copies of the run. Those of another name count no more,
    nor do those of attempts before `since`."""

    name: str
    since: int = 1


@dataclass(frozen=True, kw_only=True)
class LocalPart(Record):
    """<rank>.json next to <rank>.pt on a node: what a rank has saved there is complete."""

    iteration: int
    rank: int
    attempt: int  # parts of different attempts don't fit together
    world_size: int
    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class LocalBeginning(Record):
    """attempts/NN/local.json: the ranks begin with the copies of this step on their nodes."""

    iteration: int


@dataclass(frozen=True, kw_only=True)
class Holder(Record):
    """claims/<number>.json: who trains a run. Older claims name neither user, cluster nor machine."""

    host: str
    machine: str | None = None  # this boot of it, and the set of process numbers
    pid: int
    user: str | None = None
    job: str | None = None
    restarts: int | None = None
    cluster: str | None = None
    time: float | None = None


PACES_BYTES = 32_768  # of paces.jsonl, at first


@dataclass(frozen=True, kw_only=True)
class Pace(Event):
    """A line of attempts/NN/paces.jsonl, after a save: the seconds of each rank for the same product of matrices; NaN:
    it could not be measured, as where a GPU has no memory left."""

    event = "pace"
    step: int
    seconds: tuple[float, ...]


LEDGER = {
    kind.event: kind
    for kind in (Called, AttemptStart, AttemptEnd, Left, Cancelled, Unhealthy, Distrusted, Trusted, LeftOut)
}
STEPS = {kind.event: kind for kind in (Phase, TrainStart, Step, Evaluated, Tested, Saved, TrainEnd)}


def read_ledger(path: str | Path) -> list[Event]:
    """What happened to a run, oldest first. Incomplete lines, and events of unknown kinds, are left
    out."""
    return events(LEDGER, files.read_jsonl(path), path)


def read_paces(path: str | Path, last: int | None = None) -> list[Pace]:
    """Oldest first, all or the last so many; none where there is no file. A line of many ranks is long."""
    if last is None:
        return events({Pace.event: Pace}, files.read_jsonl(path), path)
    size, there = PACES_BYTES, Path(path).stat().st_size if Path(path).exists() else 0
    while len(found := files.read_jsonl_tail(path, size)) < last and size < there:
        size *= 4
    return events({Pace.event: Pace}, found[-last:], path)


def read_node_troubles(path: str | Path) -> list[NodeTrouble]:
    return events({NodeTrouble.event: NodeTrouble}, files.read_jsonl(path), path)


def read_steps(path: str | Path, attempt: int = 0) -> list[StepEvent]:
    """What happened in an attempt, likewise."""
    return events(STEPS, ({**line, "attempt": attempt} for line in files.read_jsonl(path)), path)
