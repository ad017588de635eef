"""What a report and a bundle are made of, and what the report's checks come to."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from megaboa.records.base import IF_SET, Record, Tree

State = Literal["PASS", "FAIL", "INVALID", "NOT_RUN"]
Verdict = Literal["equal", "within rounding", "within a seed", "different"]
# How many times the largest difference among a reference and its twins a run may be away from the reference:
# docs/benchmarks/agreement.md has the measurements behind it.
TIMES_TWINS = 20


@dataclass(frozen=True, kw_only=True)
class AgreementSpec(Record):
    """Runs whose losses must be those of a reference."""

    reference: str
    runs: tuple[str, ...]
    tolerance: float
    grad_norm_tolerance: float | None = None
    twins: tuple[str, ...] = field(default=(), metadata=IF_SET)  # runs that differ from the reference by rounding alone
    seeds: tuple[str, ...] = field(default=(), metadata=IF_SET)  # by their seed alone
    within: Literal["rounding", "seed"] = field(default="rounding", metadata=IF_SET)  # what passes
    tensors: bool = field(default=False, metadata=IF_SET)  # whether checkpoints and samples are compared too


@dataclass(frozen=True, kw_only=True)
class TensorsSpec(Record):
    """specs/tensors.json: the agreements whose runs are compared by their checkpoints and samples."""

    agreements: tuple[AgreementSpec, ...]


@dataclass(frozen=True, kw_only=True)
class BaselineSpec(Record):
    """Earlier runs, and by how much runs of the same names may be worse, relative."""

    paths: tuple[str, ...]  # results folders or bundles
    slower: float
    more_memory: float
    higher_loss: float
    spread: float | None = None  # by how much runs of one setting differ, where no runs show it


@dataclass(frozen=True, kw_only=True)
class ReportSpec(Record):
    """specs/report.json"""

    title: str | None
    agreements: tuple[AgreementSpec, ...]
    proofs: tuple[str, ...]
    runs: tuple[str, ...] = ()
    invalid: tuple[str, ...] = ()  # left out of the plan, and why
    question: str | None = None
    published: Tree | None = None  # the table of report.compare_to
    figures: tuple[Tree, ...] = ()
    values: dict[str, Tree] | None = None  # by run: the keys of the sweep
    profiles: tuple[str, ...] = ()
    evaluated: tuple[str, ...] = ()
    along: tuple[str, ...] = field(default=(), metadata=IF_SET)  # runs that are exported along their training
    baseline: BaselineSpec | None = field(default=None, metadata=IF_SET)


@dataclass(frozen=True, kw_only=True)
class ReportCheck(Record):
    kind: str  # agreement, baseline, import, export, evaluation, profile
    name: str
    state: State
    detail: str

    @property
    def anchor(self) -> str:
        return f"check-{self.name}".replace(" ", "-")


@dataclass(frozen=True, kw_only=True)
class Flip(Record):
    """The first step at which tokens of two runs went to different experts, in the first layer where they did.

    `choices` of `of` fell on another expert; `margin`: an upper bound of their distance from a tie.
    """

    step: int
    layer: int
    choices: int
    of: int
    margin: float

    def __str__(self) -> str:
        near = f"two were {self.margin:.1e} apart" if math.isfinite(self.margin) else "no two were near a tie"
        what = f"{self.choices:,} of {self.of:,} choices fell on another expert"
        return f"at step {self.step} {what} in layer {self.layer}, where {near}"


@dataclass(frozen=True, kw_only=True)
class AgreementCheck(ReportCheck):
    run: str
    reference: str
    tolerance: float
    max_difference: float | None = None
    step: int | None = None  # of the largest difference
    steps: int = 0
    max_grad_norm: float | None = None
    exact_steps: int = 0  # before tokens went to other experts
    flip: Flip | None = None
    verdict: Verdict | None = None  # None: not compared, or by an older version
    twins: int = 0  # by which rounding was measured; 0: the tolerances were the limits
    parts_at: int | None = None  # the first step at which the losses, or the norms, differ at all
    beyond_at: int | None = None  # the first at which they differ by more than rounding
    flipped: int = 0  # choices that fell on another expert, over all steps
    flipped_steps: int = 0


@dataclass(frozen=True, kw_only=True)
class TensorCheck(ReportCheck):
    """What of a run's checkpoint, or of its samples, is compared with the reference's."""

    run: str
    reference: str
    part: str  # weights, optimizer, counters, random numbers, data order
    verdict: Verdict | None = None  # None: not compared
    step: int | None = None  # of the checkpoints
    difference: float | None = None  # the largest of any tensor, relative to the tensor's norm
    limit: float | None = None  # of that tensor; None: it must be equal


@dataclass(frozen=True, kw_only=True)
class ComparedTensors(Record):
    """tensors.json: what came of comparing checkpoints and samples."""

    identities: dict[str, str]  # by run: what each of them was
    checks: tuple[TensorCheck, ...]


@dataclass(frozen=True, kw_only=True)
class BaselineCheck(ReportCheck):
    """One quantity of the runs of one setting, compared with the baseline's. Its state is NOT_RUN where it takes more
    runs to tell."""

    run: str  # the setting's first
    quantity: str
    limit: float  # how much worse it may be, relative
    runs: tuple[int, ...] = (0, 0)  # how many, ours and the baseline's
    measured: float | None = None  # geometric means over the runs
    baseline: float | None = None
    ratio: float | None = None
    low: float | None = None  # an interval of 95%
    high: float | None = None
    interval_by: str = "nothing"  # runs, stated (the spread), blocks (of one run's steps)
    verdict: Literal["PASS", "FAIL", "can't be told"] | None = None
    runs_needed: int | None = None  # on each side
    differs: tuple[str, ...] = ()  # in what the baseline's runs are others


@dataclass(frozen=True, kw_only=True)
class StageCheck(ReportCheck):
    """A check of a proof, or of a stage's result."""

    subject: str  # model or run
    check: str
    difference: float | None = field(default=None, metadata=IF_SET)


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
    """report/checks.json: PASS only where every run and every check passed, but for runs left out on purpose."""

    state: State
    counts: Counts
    failed: tuple[Fault, ...] | None = None  # older reports don't say
    checks: tuple[ReportCheck, ...] = ()


@dataclass(frozen=True, kw_only=True)
class BundleEnvironment(Record):
    packages: dict[str, str]
    of: str | None = None  # the runs, or the bundle's making
    python: str | None = None
    system: str | None = None
    libc: str | None = None


@dataclass(frozen=True, kw_only=True)
class BundleManifest(Record):
    """bundle.json: what was run, with what."""

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
    needed: tuple[dict[str, str], ...] = ()  # what the bundle lacks: `path`, and what it is `for`
