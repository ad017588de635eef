"""What a report and a bundle are made of, and what the report's checks come to."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from megaboa.records.base import IF_SET, Record, Tree

State = Literal["PASS", "FAIL", "INVALID", "NOT_RUN"]


@dataclass(frozen=True, kw_only=True)
class AgreementSpec(Record):
    """Runs whose losses must be those of a reference."""

    reference: str
    runs: tuple[str, ...]
    tolerance: float
    grad_norm_tolerance: float | None = None


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


@dataclass(frozen=True, kw_only=True)
class ReportCheck(Record):
    kind: str  # agreement, import, export, evaluation, profile
    name: str
    state: State
    detail: str

    @property
    def anchor(self) -> str:
        return f"check-{self.name}".replace(" ", "-")


@dataclass(frozen=True, kw_only=True)
class Flip(Record):
    """The first step at which tokens of two runs went to different experts, in the first layer where they did.

    `choices` of `of` fell on another expert; `margin`: how far from a tie the farthest of them can have been.
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


@dataclass(frozen=True, kw_only=True)
class StageCheck(ReportCheck):
    """One of a proof's, or what a stage left or failed to leave."""

    subject: str  # model or run
    check: str
    difference: float | None = field(default=None, metadata=IF_SET)


@dataclass(frozen=True, kw_only=True)
class Fault(Record):
    """What ends a call with an error, and where the page shows it."""

    name: str
    detail: str
    anchor: str = ""


@dataclass(frozen=True, kw_only=True)
class Counts(Record):
    """How many there are by state."""

    runs: dict[str, int] = field(default_factory=dict)
    checks: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Checks(Record):
    """report/checks.json: PASS only where every run and every check passed."""

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
