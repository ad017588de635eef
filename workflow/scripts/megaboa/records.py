"""What stages hand to each other: every record by its type, and the one place that reads and writes them.

A record is a JSON file or a line of one. Its class says which keys it has; a key with a default may be missing, as it
is in files of older versions. A file without `version` has version 0; a version that a class doesn't know is refused.
Keys that a class doesn't know are kept in `more`, and written again with the rest. Standard library only.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import time
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from megaboa import files
from megaboa.causes import Action, Cause
from megaboa.errors import InputError

Tree = dict[str, Any]  # keys and values as the user's YAML, Hugging Face or Bridge has them: not ours to list
Range = tuple[int, int]  # first and last step


class RecordError(InputError, ValueError):
    """A file that isn't the record that it should be; the message names the file and what to do."""


IF_SET = {"only_if_set": True}  # of a field: written only where it isn't the default
NOT_WRITTEN = {"key": None}


@dataclass(frozen=True, kw_only=True)
class Record:
    VERSION: ClassVar[int] = 0  # raised with every change that readers of the version before would misread
    more: Tree = field(default_factory=dict, repr=False)


@dataclass(frozen=True, kw_only=True)
class Event(Record):
    """A line that says what happened, and when (unix seconds)."""

    event: ClassVar[str]
    time: float = field(default_factory=time.time)


# --- attempts.jsonl: the ledger of a run --------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Code(Record):
    """The library as an attempt found it; `commit` and `changed` where git knows."""

    commit: str | None = None
    changed: bool | None = None
    digest: str


@dataclass(frozen=True, kw_only=True)
class RanOn(Record):
    """What the ranks of an attempt find on the disk."""

    environment: str | None = None  # digest of Python's version and of all packages
    bridge: str | None = None
    code: Code | None = None
    attempts: tuple[int, ...] = field(default=(), metadata=IF_SET)  # in summaries: those that ran on the same


@dataclass(frozen=True, kw_only=True)
class Called(Event):
    """Somebody called; not: the scheduler started the job again."""

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
    world_size: int = 1
    resumed_from: int = 0
    parent: str | None = None  # `<experiment>/<run>@<step>`, where it begins with another run's checkpoint
    skipped: tuple[Range, ...] = ()
    image: str | None = None
    ran_on: RanOn | None = None


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


@dataclass(frozen=True, kw_only=True)
class Left(Event):
    """The job was given nodes that the run avoids, and went back into the queue."""

    event = "left"
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Cancelled(Event):
    """Somebody cancelled while no ranks ran."""

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
    """A checkpoint was set aside; `unread`: for no other reason than that ranks failed to load it."""

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


# --- attempts/NN/steps.jsonl: what the last rank saw ------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class StepEvent(Event):
    attempt: int = field(default=0, metadata=NOT_WRITTEN)  # not in the file: its folder says so


@dataclass(frozen=True, kw_only=True)
class Phase(StepEvent):
    """How far the start of the ranks has come: `configured`, `built`."""

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
    """A loss that was not recorded is None, one that was no number NaN."""

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


@dataclass(frozen=True, kw_only=True)
class TrainEnd(StepEvent):
    event = "end"
    step: int


# --- what ranks leave for their supervisor ----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RankEnd(Record):
    """attempts/NN/end/<rank>.json: the step at which a rank's training ended, and the most of its GPU in use, in
    bytes."""

    step: int
    peak_allocated: int | None = field(default=None, metadata=IF_SET)
    peak_reserved: int | None = field(default=None, metadata=IF_SET)


@dataclass(frozen=True, kw_only=True)
class Found(Record):
    """found.json: what only the ranks can tell of a recipe, and of what is installed where they run."""

    train_iters: int | None = None
    saves: bool = True
    async_save: bool = False


# --- models, imports, exports and their proofs ------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Tokenizer(Record):
    """tokenizers/<tokenizer>.json: one that the experiment trained."""

    name: str
    path: str
    digest: str
    vocab_size: int


@dataclass(frozen=True, kw_only=True)
class ModelSource(Record):
    """models/<model>/source.json: a Hugging Face folder."""

    name: str
    path: str
    revision: str | None = None  # commit on the hub
    digest: str
    tokenizer: str | None = None
    tokenizer_digest: str | None = None
    vocab_size: int
    params: int
    dtype: str
    device: str
    weights: bool | None = field(default=None, metadata=IF_SET)  # None: older manifests don't say


@dataclass(frozen=True, kw_only=True)
class ImportRecord(Record):
    """models/<model>/import.json: a Megatron checkpoint made of a Hugging Face folder."""

    name: str
    checkpoint: str
    digest: str
    source_digest: str
    files: dict[str, int] = field(default_factory=dict)  # sizes; none in manifests of older versions
    tensors: int
    params: int
    dtype: str
    device: str
    image: tuple[str, ...] | None = field(default=None, metadata=IF_SET)  # what of the image it was made in counts


@dataclass(frozen=True, kw_only=True)
class ExportRecord(Record):
    """runs/<run>/export.json: a Hugging Face folder made of a run's checkpoint."""

    run: str
    path: str
    checkpoint: str
    iteration: int
    file_bytes: int
    digest: str
    files: dict[str, str]  # checksums
    image: tuple[str, ...] | None = field(default=None, metadata=IF_SET)


@dataclass(frozen=True, kw_only=True)
class Check(Record):
    """One check of a proof; `difference` where it is one of a number that is to be 0."""

    name: str
    state: Literal["PASS", "FAIL"]
    detail: str
    difference: float | None = field(default=None, metadata=IF_SET)

    @property
    def passed(self) -> bool:
        return self.state == "PASS"


@dataclass(frozen=True, kw_only=True)
class Proof(Record):
    """proof.json of an import or an export, there only if all checks passed; failed-proof.json if one didn't."""

    state: Literal["PASS", "FAIL"]
    checks: tuple[Check, ...]
    digest: str | None = field(default=None, metadata=IF_SET)  # of what it proves
    left_out: dict[str, str] | None = field(default=None, metadata=IF_SET)  # checks that couldn't be made, and why
    image: tuple[str, ...] | None = field(default=None, metadata=IF_SET)


@dataclass(frozen=True, kw_only=True)
class Evaluation(Record):
    """runs/<run>/evaluation.json: what the user's command found of an export."""

    run: str
    command: str
    export: str  # digest
    iteration: int
    path: str
    values: dict[str, float]


# --- data/indexes/<id>.json -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class CorpusRead(Record):
    """What runs read of a corpus of their blend."""

    name: str
    weight: float
    tokens_asked: int
    tokens: int  # that there are for it
    epochs: float


@dataclass(frozen=True, kw_only=True)
class DataIndex(Record):
    """data/indexes/<id>.json: Megatron's index of the data that some runs share."""

    name: str
    cache: str
    samples: dict[str, int]  # by split
    corpora: tuple[CorpusRead, ...]
    max_epochs: float
    warnings: tuple[str, ...] = ()


# --- image.json -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Image(Record):
    """image.json: what ranks run in. Where they run in this Python (`runtime` none), the rest of it is None."""

    runtime: str
    digest: str
    python: str | None = None
    packages: dict[str, str] = field(default_factory=dict)
    path: str | None = None
    bytes: int | None = None
    sha256: str | None = None
    mtime_ns: int | None = None  # manifests of older versions have none
    made_from: Tree | None = field(default=None, metadata={"key": "from"})
    bridge_source: Tree | None = None  # repository and commit of another Megatron-Bridge
    contract: Tree | None = None  # what the test of the image found

    @property
    def marks(self) -> tuple[str, ...]:
        """What a conversion may depend on: its digest, and the commit of a Bridge that goes before its own."""
        return (self.digest, *([self.bridge_source["commit"]] if self.bridge_source else []))


# --- launch.json and profile.json -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Start(Record):
    """How ranks are started."""

    starter: Literal["auto", "srun", "local"]
    tasks: Literal["rank", "node"]
    srun: str
    srun_args: tuple[str, ...]
    cpu_bind: str | None
    python: str | None
    network: str | None
    environment: dict[str, str | None]
    timeout_minutes: int | None = None
    health_check: bool
    health_check_seconds: float = 90.0


@dataclass(frozen=True, kw_only=True)
class Inside(Record):
    """How ranks are started in the image; which one it is says image.json."""

    runtime: str
    mounts: tuple[str, ...]
    secrets: tuple[str, ...]  # names of variables
    variables: dict[str, str] = field(default_factory=dict)
    workdir: str


@dataclass(frozen=True, kw_only=True)
class LossSpike(Record):
    factor: float
    window: int
    patience: int
    limit: int


@dataclass(frozen=True, kw_only=True)
class Recovery(Record):
    """What is done when ranks fail."""

    budget: int
    backoff_seconds: float
    no_progress_minutes: float
    start_minutes: float
    stop_seconds: float
    lead_minutes: float | None = None
    exclude_hours: float
    actions: dict[Cause, Action]
    loss_spike: LossSpike | None
    notify: str | None


@dataclass(frozen=True, kw_only=True)
class LaunchSpec(Record):
    """launch.json: where and how a run runs; nothing of it can change a loss."""

    nodes: int = 1
    gpus_per_node: int = 1
    cpus_per_rank: int = 1
    mem_mb_per_rank: int | None = None
    runtime: str = "4h"
    peak_tflops: float | None = None
    step_seconds: float | None = None
    gpu: str | None = None
    partition: str | None = None
    account: str | None = None
    slurm_extra: str = ""
    start: Start | None = None
    image: Inside | None = None
    recovery: Recovery | None = None
    trackers: Tree = field(default_factory=dict)
    checkpoint: Tree = field(default_factory=dict)  # by our keys; of a recipe's run those that are set
    store: str | None = None
    num_workers: int | None = field(default=None, metadata=IF_SET)
    overrides: Tree = field(default_factory=dict)  # Bridge's fields that change no loss
    index: str | None = None  # name of the index of its data
    routing: bool = field(default=False, metadata=IF_SET)  # whether ranks write down which experts tokens went to


@dataclass(frozen=True, kw_only=True)
class ProfileSpec(Record):
    """profile.json: what of a run is profiled, and by what."""

    tool: str
    steps: Range = (2, 8)
    ranks: tuple[int, ...] = (0,)
    domains: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    tool_code: str | None = field(default=None, metadata=IF_SET)  # digest of a profiler of the user's own


# --- train.json and metrics/summary.json ------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Load(Record):
    """What a run takes from its parent's checkpoint in addition to the weights."""

    optimizer: bool
    rng: bool


@dataclass(frozen=True, kw_only=True)
class Parent(Record):
    """The checkpoint of another run that a run begins with; `identity`: what that run was, in train.json."""

    experiment: str
    run: str
    iteration: int
    load: Load
    identity: str | None = field(default=None, metadata=IF_SET)

    def __str__(self) -> str:
        return f"{self.experiment}/{self.run}@{self.iteration}"


@dataclass(frozen=True, kw_only=True)
class Kept(Record):
    """A complete checkpoint of a trained run."""

    iteration: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class TrainRecord(Record):
    """train.json: a run that came to its end."""

    run: str
    identity: str  # digest of what the run is
    store: str
    train_iters: int
    iteration: int
    checkpoint: str | None = None  # None: nothing is saved
    checkpoints: tuple[Kept, ...] = ()
    bytes: int = 0  # of all checkpoints
    parent: Parent | None = None
    world_size: int
    skipped: tuple[Range, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Spread(Record):
    """Many numbers in a few."""

    median: float
    p5: float
    p95: float
    n: int


@dataclass(frozen=True, kw_only=True)
class Loss(Record):
    """Of the steps that count; None where none was recorded, or it was no number."""

    first: float | None = None
    last: float | None = None
    min: float | None = None
    min_step: int | None = None
    tail_mean: float | None = None
    tail_steps: int | None = None


@dataclass(frozen=True, kw_only=True)
class GradNorm(Record):
    last: float | None = None
    max: float | None = None


@dataclass(frozen=True, kw_only=True)
class Mfu(Record):
    median: float
    peak_tflops: float
    peak_from: str
    gpu: str | None = None


@dataclass(frozen=True, kw_only=True)
class Memory(Record):
    """The most that GPUs had in use in an attempt, in bytes: `allocated` by tensors, `reserved` for them."""

    attempt: int = 0
    peak_bytes: dict[str, int]
    by_rank: dict[str, dict[str, int]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Energy(Record):
    joules_per_gpu_and_step: Spread | None = None
    watts_per_gpu: Spread | None = None


@dataclass(frozen=True, kw_only=True)
class Stragglers(Record):
    slowest_over_fastest: Spread
    slowest: dict[str, int] = field(default_factory=dict)  # by rank: how often it was the slowest


@dataclass(frozen=True, kw_only=True)
class Validation(Record):
    step: int
    losses: dict[str, float | None]


@dataclass(frozen=True, kw_only=True)
class Summary(Record):
    """metrics/summary.json: a run in numbers, and whether it may be believed."""

    run: str
    identity: str | None = None
    state: Literal["PASS", "INVALID"]
    reasons: tuple[str, ...] = ()
    world_size: int = 1
    train_iters: int | None = None
    parent: Parent | None = None
    steps: int = 0
    tokens: int = 0
    skipped_steps: int = 0
    nan_steps: int = 0
    attempts: int = 0
    ran_on: tuple[RanOn, ...] = ()  # more than one: packages or code were changed between attempts
    lost_steps: int = 0
    left_out: tuple[Range, ...] = ()  # steps whose batches were left out after a loss spike
    warmup_steps_dropped: int = 0
    window: Range | None = None  # of the steps that count for the speed
    step_seconds: Spread | None = None
    tokens_per_second: Spread | None = None
    tokens_per_second_per_rank: float | None = None
    tflops_per_rank: Spread | None = None
    gpu: str | None = None
    mfu: Mfu | None = None
    memory: Memory | None = None
    energy: Energy | None = None
    stragglers: Stragglers | None = None
    loss: Loss | None = None
    grad_norm: GradNorm | None = None
    validation: tuple[Validation, ...] = ()
    not_finite: dict[str, str] = field(default_factory=dict)  # which of the values that are null were NaN or infinite


LEDGER = {
    kind.event: kind
    for kind in (Called, AttemptStart, AttemptEnd, Left, Cancelled, Unhealthy, Distrusted, Trusted, LeftOut)
}
STEPS = {kind.event: kind for kind in (Phase, TrainStart, Step, Evaluated, Tested, Saved, TrainEnd)}


# --- reading and writing ------------------------------------------------------------------------------------------


def read[R: Record](kind: type[R], path: str | Path) -> R:
    return parse(kind, files.read_json(path), path)


def read_if_there[R: Record](kind: type[R], path: str | Path) -> R | None:
    """None where there is no such file."""
    return read(kind, path) if Path(path).exists() else None


def write(path: str | Path, record: Record) -> None:
    files.write_json(path, plain(record))


def parse[R: Record](kind: type[R], values: Any, source: str | Path) -> R:
    """A record from what JSON gave; `source` is named where it is none."""
    if not isinstance(values, dict):
        raise _no_record(kind, source, "it holds something else")
    version = values.get("version", 0)
    if version not in range(kind.VERSION + 1):
        raise RecordError(
            f"{source}: has version {version}, and this Megaboa reads {kind.__name__} up to version {kind.VERSION}: "
            "use the Megaboa that wrote it, or a newer one"
        )
    required = [name for name, key in _required(kind) if key not in values]
    if required:
        raise _no_record(kind, source, f"it lacks {' and '.join(required)}")
    try:
        return _build(kind, {key: value for key, value in values.items() if key != "version"})
    except (TypeError, ValueError, AttributeError) as error:
        raise _no_record(kind, source, str(error)) from None


def _no_record(kind: type[Record], source: str | Path, why: str) -> RecordError:
    if issubclass(kind, Event):  # nobody makes a ledger again
        return RecordError(
            f"{source}: has a line {kind.event!r} that can't be read ({why}): repair or remove that line"
        )
    return RecordError(f"{source}: can't be read as {kind.__name__} ({why}): remove it, and call again to have it made")


def plain(record: Record) -> Tree:
    """As JSON has it."""
    found = {} if not isinstance(record, Event) else {"event": record.event}
    for name, key, default in _written(type(record)):
        value = getattr(record, name)
        if default is _ALWAYS or value != default:
            found[key] = _plain(value)
    return {**found, **record.more, **({"version": record.VERSION} if record.VERSION else {})}


def line(event: Event) -> str:
    return json.dumps(plain(event), sort_keys=True)


def read_ledger(path: str | Path) -> list[Event]:
    """What happened to a run, oldest first. Lines that were torn, and events of a kind that isn't known, are left
    out."""
    return events(LEDGER, files.read_jsonl(path), path)


def read_steps(path: str | Path, attempt: int = 0) -> list[StepEvent]:
    """What happened in an attempt, likewise."""
    return events(STEPS, ({**line, "attempt": attempt} for line in files.read_jsonl(path)), path)


def events(kinds: Mapping[str, type[Event]], lines: Iterable[Tree], source: str | Path = "a ledger") -> list[Any]:
    """Lines of a file as events."""
    return [parse(kinds[line["event"]], line, source) for line in lines if line.get("event") in kinds]


_ALWAYS = object()


@functools.cache
def _written(kind: type[Record]) -> list[tuple[str, str, Any]]:
    """Name, key in the file, and the default that isn't written, of every field that is."""
    keys = [(one, one.metadata.get("key", one.name)) for one in dataclasses.fields(kind) if one.name != "more"]
    return [(one.name, key, one.default if one.metadata.get("only_if_set") else _ALWAYS) for one, key in keys if key]


@functools.cache
def _required(kind: type[Record]) -> list[tuple[str, str]]:
    found = [one for one in dataclasses.fields(kind) if one.default is one.default_factory is dataclasses.MISSING]
    return [(one.name, one.metadata.get("key") or one.name) for one in found]


@functools.cache
def _readers(kind: type[Record]) -> dict[str, tuple[str, Callable[[Any], Any] | None]]:
    """By key in the file: the field, and what makes its value of JSON's."""
    hints = typing.get_type_hints(kind)
    named = [one for one in dataclasses.fields(kind) if one.name != "more"]
    return {one.metadata.get("key") or one.name: (one.name, _reader(hints[one.name])) for one in named}


def _build[R: Record](kind: type[R], values: Tree) -> R:
    readers, found, more = _readers(kind), {}, {}
    for key, value in values.items():
        if key in readers:
            name, reader = readers[key]
            found[name] = reader(value) if reader and value is not None else value
        elif key != "event" or not issubclass(kind, Event):
            more[key] = value
    return kind(**found, more=more)


def _reader(hint: Any) -> Callable[[Any], Any] | None:
    """None where JSON's value is the field's."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(hint, type) and issubclass(hint, Record):
        return functools.partial(_build, hint)
    if origin in (types.UnionType, typing.Union):
        return next((reader for one in inner if (reader := _reader(one))), None)
    if origin is tuple:
        each = _reader(inner[0])
        return (lambda values: tuple(map(each, values))) if each else tuple
    if origin is dict and (each := _reader(inner[1])):
        return lambda values: {key: each(value) for key, value in values.items()}
    return None


def _plain(value: Any) -> Any:
    if isinstance(value, Record):
        return plain(value)
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value
