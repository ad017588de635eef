"""The summary of a run, from its own records or from its log."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from megaboa.records.attempts import RanOn
from megaboa.records.base import IF_SET, Range, Record, Tree
from megaboa.records.runs import Parent


@dataclass(frozen=True, kw_only=True)
class Spread(Record):
    """Median and percentiles."""

    median: float
    p5: float
    p95: float
    n: int


@dataclass(frozen=True, kw_only=True)
class Loss(Record):
    """Loss over the steps that count; None if not recorded, or not finite."""

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
    """Peak GPU memory of an attempt in bytes: `allocated` by tensors, `reserved` by the allocator."""

    attempt: int = 0
    peak_bytes: dict[str, int]
    by_rank: dict[str, dict[str, int]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Energy(Record):
    """Energy and power as printed by Bridge; otherwise watts from GPU samples (`sampled`)."""

    joules_per_gpu_and_step: Spread | None = None
    watts_per_gpu: Spread | None = None
    sampled: bool = field(default=False, metadata=IF_SET)


@dataclass(frozen=True, kw_only=True)
class GpuUse(Record):
    """A GPU's use over the samples that count; errors are those that occurred during sampling."""

    host: str
    index: int
    uuid: str | None = None
    name: str | None = None
    samples: int = 0
    watts: Spread | None = None
    celsius: float | None = None  # maximum of the GPU or its memory
    sm_mhz: Spread | None = None  # while a kernel ran
    utilisation: float | None = None  # median, percent
    used_mib: float | None = None  # maximum
    throttled: dict[str, float] = field(default_factory=dict)  # share of the samples, by reason
    limit_watts: float | None = None
    default_limit_watts: float | None = None
    ecc_corrected: float | None = None
    ecc_uncorrected: float | None = None
    nvlink_errors: float | None = None
    lost: str | None = None  # the error with which it stopped answering


@dataclass(frozen=True, kw_only=True)
class Moment(Record):
    """All GPUs at one moment: minimum, median and maximum of each quantity."""

    seconds: float  # since the first sample
    attempt: int
    values: dict[str, tuple[float, ...]]
    throttled: float  # share of GPUs slowed down by heat or the power supply


@dataclass(frozen=True, kw_only=True)
class GpuTotals(Record):
    """Totals over all GPUs; shares are relative to the samples of all GPUs."""

    watts_peak: float | None = None
    celsius_most: float | None = None
    utilisation: float | None = None
    power_capped: float | None = None
    too_hot: float | None = None
    power_braked: float | None = None
    ecc_corrected: float | None = None
    ecc_uncorrected: float | None = None
    nvlink_errors: float | None = None


@dataclass(frozen=True, kw_only=True)
class Unsampled(Record):
    host: str
    why: str


@dataclass(frozen=True, kw_only=True)
class Gpus(Record):
    """GPU use during a run's training, from the driver's readings every few seconds."""

    total: GpuTotals
    each: tuple[GpuUse, ...] = ()
    course: tuple[Moment, ...] = ()
    missing: tuple[Unsampled, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Stragglers(Record):
    slowest_over_fastest: Spread
    slowest: dict[str, int] = field(default_factory=dict)  # how often each rank was the slowest


@dataclass(frozen=True, kw_only=True)
class Validation(Record):
    step: int
    losses: dict[str, float | None]


@dataclass(frozen=True, kw_only=True)
class Summary(Record):
    """metrics/summary.json: a run in numbers, and whether they are valid."""

    run: str
    identity: str | None = None
    state: Literal["PASS", "INVALID"]
    reasons: tuple[str, ...] = ()
    world_size: int = 1
    train_iters: int | None = None
    parent: Parent | None = None
    steps: int = 0
    tokens: int = 0
    tokens_before: int | None = None  # of its parents' steps, up to the checkpoint that it started from; None: unknown
    skipped_steps: int = 0
    nan_steps: int = 0
    attempts: int = 0
    ran_on: tuple[RanOn, ...] = ()  # more than one if packages or code changed between attempts
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
    gpus: Gpus | None = None
    stragglers: Stragglers | None = None
    loss: Loss | None = None
    grad_norm: GradNorm | None = None
    validation: tuple[Validation, ...] = ()
    not_finite: dict[str, str] = field(default_factory=dict)  # which null values were NaN or infinite


@dataclass(frozen=True, kw_only=True)
class AttemptTime(Record):
    attempt: int
    outcome: str | None = None
    cause: str | None = None
    seconds: dict[str, float]  # by kind
    phases: dict[str, float] = field(default_factory=dict)  # seconds until its ranks reached each phase
    startup: dict[str, float] = field(default_factory=dict, metadata=IF_SET)  # seconds of each part of its start


@dataclass(frozen=True, kw_only=True)
class Goodput(Record):
    """metrics/goodput.json: a run's time over all its attempts, by kind."""

    wall_seconds: float
    allocated_seconds: float
    seconds: dict[str, float]
    goodput: float | None
    accounting: str = "ledger"  # or the name of a scheduler's accounting
    attempts: tuple[AttemptTime, ...]


@dataclass(frozen=True, kw_only=True)
class SentAlerts(Record):
    """<store>/fleet/sent-<uid>.json: which alerts were sent, and when."""

    alerts: dict[str, float]


# --- what `megaboa read-log` prints -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LogLines(Record):
    all: int
    understood: int
    torn: int
    unknown: int


@dataclass(frozen=True, kw_only=True)
class LogSteps(Record):
    first: int
    last: int
    total: int | None
    printed: int
    interval: int  # steps between two lines
    replayed: int
    copies: int  # lines of steps that another rank had printed already


@dataclass(frozen=True, kw_only=True)
class LogStepTime(Spread):
    window: Range  # of the steps that count
    source: str = field(metadata={"key": "from"})


@dataclass(frozen=True, kw_only=True)
class LogMfu(Record):
    median: float
    peak_tflops: float | None  # None if the log has the MFU itself


@dataclass(frozen=True, kw_only=True)
class LogMemory(Record):
    """Peak memory in bytes: the maximum over ranks, and each rank's."""

    peak_bytes: dict[str, float]
    by_rank: dict[str, dict[str, float]]


@dataclass(frozen=True, kw_only=True)
class LogField(Record):
    """A number in step lines that the summary has no key for."""

    n: int
    last: float
    min: float
    max: float


@dataclass(frozen=True, kw_only=True)
class LogNumbers(Record):
    """Summary of a training log, or of the logs of several ranks and attempts."""

    bytes: int
    lines: LogLines
    dialects: tuple[str, ...]
    ranks: tuple[str, ...]
    attempts: int
    steps: LogSteps | None
    step_seconds: LogStepTime | None
    tflops_per_gpu: Spread | None
    mfu: LogMfu | None
    samples_per_second: Spread | None
    tokens_per_second: Spread | None
    tokens_per_second_per_gpu: Spread | None
    seq_length: int | None
    loss: Loss | None
    grad_norm: GradNorm | None
    skipped_iterations: int | None
    nan_iterations: int | None
    not_finite_losses: int
    energy: Energy | None
    stragglers: Stragglers | None
    memory: LogMemory | None
    parameters: tuple[Tree, ...]  # under the log's own names
    validation: tuple[Tree, ...]
    saved: tuple[int, ...]
    settings: Tree
    further: dict[str, LogField]
    not_finite: dict[str, str]  # which null values were NaN or infinite
