"""Specifications of reports and bundles, and the results of a report's checks."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from megaboa.records.base import IF_SET, Record, Tree

State = Literal["PASS", "FAIL", "INVALID", "NOT_RUN"]
Verdict = Literal["equal", "within rounding", "within a seed", "different"]
# The limit for a run's distance from the reference, in units of the largest difference between the reference and its
# twins: docs/benchmarks/agreement.md has the measurements behind it.
TIMES_TWINS = 20


@dataclass(frozen=True, kw_only=True)
class AgreementSpec(Record):
    """Runs whose losses must agree with a reference's."""

    reference: str
    runs: tuple[str, ...]
    tolerance: float
    grad_norm_tolerance: float | None = None
    twins: tuple[str, ...] = field(default=(), metadata=IF_SET)  # runs that differ from the reference by rounding alone
    seeds: tuple[str, ...] = field(default=(), metadata=IF_SET)  # runs that differ by the seed alone
    within: Literal["rounding", "seed"] = field(default="rounding", metadata=IF_SET)  # the worst verdict that passes
    tensors: bool = field(default=False, metadata=IF_SET)  # whether checkpoints and samples are compared too


@dataclass(frozen=True, kw_only=True)
class TensorsSpec(Record):
    """specs/tensors.json: the agreements whose runs are compared by their checkpoints and samples."""

    agreements: tuple[AgreementSpec, ...]


@dataclass(frozen=True, kw_only=True)
class BaselineSpec(Record):
    """Earlier runs, and by how much, relative to them, runs of the same names may be worse."""

    paths: tuple[str, ...]  # results folders or bundles
    slower: float
    more_memory: float
    higher_loss: float
    spread: float | None = None  # how much runs of one setting differ; used if no runs show it


@dataclass(frozen=True, kw_only=True)
class SweepAxis(Record):
    """An axis of the sweep whose values have labels, in their order. `runs`: the label of each run."""

    name: str
    labels: tuple[str, ...]
    runs: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class ReportSpec(Record):
    """specs/report.json"""

    title: str | None
    agreements: tuple[AgreementSpec, ...]
    proofs: tuple[str, ...]
    runs: tuple[str, ...] = ()
    invalid: tuple[str, ...] = ()  # runs left out of the plan, and why
    excluded: tuple[str, ...] = field(default=(), metadata=IF_SET)  # runs that `sweep.exclude` leaves out
    question: str | None = None
    published: Tree | None = None  # the table of report.compare_to
    figures: tuple[Tree, ...] = ()
    values: dict[str, Tree] | None = None  # by run: what it sets of the swept keys
    # by run: what it has of the swept keys that only other runs set; null if that is unknown
    unset: dict[str, Tree] = field(default_factory=dict, metadata=IF_SET)
    axes: tuple[SweepAxis, ...] = field(default=(), metadata=IF_SET)
    profiles: tuple[str, ...] = ()
    evaluated: tuple[str, ...] = ()
    along: tuple[str, ...] = field(default=(), metadata=IF_SET)  # runs that are exported during their training
    baseline: BaselineSpec | None = field(default=None, metadata=IF_SET)


@dataclass(frozen=True, kw_only=True)
class ReportCheck(Record):
    kind: str  # agreement, baseline, import, export, evaluation, profile, figure
    name: str
    state: State
    detail: str

    @property
    def anchor(self) -> str:
        return f"check-{self.name}".replace(" ", "-")


@dataclass(frozen=True, kw_only=True)
class Flip(Record):
    """The first step at which tokens of two runs went to different experts, in the first layer where they did.

    `choices` out of `of` fell on another expert. `margin`: an upper bound of their distance from a tie.
    """

    step: int
    layer: int
    choices: int
    of: int
    margin: float
    is_known: bool = True  # whether the router's choice depends on the logits alone, whose distances were recorded

    def __str__(self) -> str:
        near = f"two were {self.margin:.1e} apart" if math.isfinite(self.margin) else "no two were near a tie"
        if not self.is_known:
            near = "distances from a tie aren't recorded for this kind of router"
        what = f"{self.choices:,} of {self.of:,} choices fell on another expert"
        return f"at step {self.step} {what} in layer {self.layer}, where {near}"


@dataclass(frozen=True, kw_only=True)
class AgreementCheck(ReportCheck):
    run: str
    reference: str
    tolerance: float
    max_difference: float | None = None
    step: int | None = None  # of max_difference, if that is above 0
    steps: int = 0
    max_grad_norm: float | None = None
    exact_steps: int = 0  # steps before tokens went to different experts
    flip: Flip | None = None
    verdict: Verdict | None = None  # None: not compared, or written by an older version
    twins: int = 0  # number of twins that measured rounding; 0: the tolerances were the limits
    parts_at: int | None = None  # the first step at which losses or gradient norms differ at all
    beyond_at: int | None = None  # the first step at which they differ by more than rounding
    flipped: int = 0  # choices that fell on another expert, over all steps
    flipped_steps: int = 0


@dataclass(frozen=True, kw_only=True)
class TensorCheck(ReportCheck):
    """Comparison of a part of a run's checkpoint, or of its samples, with the reference's."""

    run: str
    reference: str
    part: str  # weights, optimizer, counters, random numbers, data order
    verdict: Verdict | None = None  # None: not compared
    step: int | None = None  # of the checkpoints
    difference: float | None = None  # largest difference of any tensor, relative to the tensor's norm
    limit: float | None = None  # for that tensor; None: it must be equal


@dataclass(frozen=True, kw_only=True)
class ComparedTensors(Record):
    """tensors.json: results of comparing checkpoints and samples."""

    identities: dict[str, str]  # by run: its identity when it was compared
    checks: tuple[TensorCheck, ...]


@dataclass(frozen=True, kw_only=True)
class BaselineCheck(ReportCheck):
    """One quantity of the runs of one setting, compared with the baseline's.

    NOT_RUN if more runs are needed to tell.
    """

    run: str  # the setting's first run
    quantity: str
    limit: float  # how much worse it may be, relative
    runs: tuple[int, ...] = (0, 0)  # number of our runs, and of the baseline's
    measured: float | None = None  # geometric means over the runs
    baseline: float | None = None
    ratio: float | None = None
    low: float | None = None  # 95% interval
    high: float | None = None
    interval_by: str = "nothing"  # runs, stated (the spread), blocks (of one run's steps)
    verdict: Literal["PASS", "FAIL", "can't be told"] | None = None
    runs_needed: int | None = None  # on each side
    differs: tuple[str, ...] = ()  # how the baseline's runs differ


@dataclass(frozen=True, kw_only=True)
class StageCheck(ReportCheck):
    """A check of a proof, or of a stage's result."""

    subject: str  # model or run
    check: str
    difference: float | None = field(default=None, metadata=IF_SET)


@dataclass(frozen=True, kw_only=True)
class FigureCheck(ReportCheck):
    """A figure of the experiment that can't be drawn; its name is `figure mine`."""

    @property
    def anchor(self) -> str:
        return self.name.replace(" ", "-")  # the figure's own place on the page says why


@dataclass(frozen=True, kw_only=True)
class Fault(Record):
    """A failure that ends the call with an error, and its place on the page."""

    name: str
    detail: str
    anchor: str = ""


@dataclass(frozen=True, kw_only=True)
class Counts(Record):
    """Runs and checks by state."""

    runs: dict[str, int] = field(default_factory=dict)
    checks: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Checks(Record):
    """report/checks.json: PASS only if every run and every check passed, except runs left out on purpose."""

    state: State
    counts: Counts
    failed: tuple[Fault, ...] | None = None  # None in older reports
    checks: tuple[ReportCheck, ...] = ()
    # warnings, such as of a figure with nothing to show
    notes: tuple[str, ...] = field(default=(), metadata=IF_SET)


@dataclass(frozen=True, kw_only=True)
class BundleEnvironment(Record):
    packages: dict[str, str]
    of: str | None = None  # the runs, or the process that made the bundle
    python: str | None = None
    system: str | None = None
    libc: str | None = None


@dataclass(frozen=True, kw_only=True)
class NeededFile(Record):
    """A file, folder or pattern that the runs need and the bundle lacks; its size and digest, where known."""

    key: str = field(metadata={"key": "for"})  # of the configuration
    path: str
    bytes: int | None = field(default=None, metadata=IF_SET)
    sha256: str | None = field(default=None, metadata=IF_SET)
    digest: str | None = field(default=None, metadata=IF_SET)  # of a model


@dataclass(frozen=True, kw_only=True)
class BundleManifest(Record):
    """bundle.json: what was run, and with what."""

    # Its SHA-256 was the metadata's, so another copy would be the same.
    REMEDY: ClassVar[str] = "it was made so, and is not used; ask its author for another one"

    experiment: str
    config: tuple[str, ...]
    device: tuple[str, ...]
    environment: BundleEnvironment
    seeds: dict[str, int | None] = field(default_factory=dict)  # by run, as the next two
    identities: dict[str, str | None] = field(default_factory=dict)
    ran_on: dict[str, tuple[Tree, ...]] = field(default_factory=dict)
    environments: dict[str, Tree] = field(default_factory=dict)  # by digest: Python and packages
    image: Tree | None = None
    commit: str | None = None
    changed_files: tuple[str, ...] = ()
    needed: tuple[NeededFile, ...] = ()
