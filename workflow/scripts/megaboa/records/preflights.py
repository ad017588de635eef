"""Specifications and results of preflight, here and in the image."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from megaboa.records.base import IF_SET, Record, Tree

# --- what the plan asks for: specs/runs.json, specs/costs.json --------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RunsSpec(Record):
    """All runs of a plan in order, each with a prefix of its run.json's digest."""

    runs: tuple[str, ...]
    identities: dict[str, str] = field(default_factory=dict)
    skip_illegal: bool = False


@dataclass(frozen=True, kw_only=True)
class UnusedSpecs(Record):
    """specs/unused.json: specifications of earlier plans, so that what was made by them is valid when it is asked for
    again."""

    names: tuple[str, ...]  # such as models/dense.json


@dataclass(frozen=True, kw_only=True)
class Budget(Record):
    gpu_hours: float | None = None
    disk: int | None = None
    mfu: float | None = None  # expected MFU, used if no speed is known


@dataclass(frozen=True, kw_only=True)
class CostsSpec(Record):
    """Inputs of preflight's sum of costs."""

    exports: tuple[str, ...]
    budget: Budget


# --- preflight.json, preflight-in-image.json --------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class StageParameters(Record):
    """Parameters of a pipeline stage, as built by Bridge."""

    stage: int
    dense: int
    expert: int


@dataclass(frozen=True, kw_only=True)
class RunCheck(Record):
    """Facts from Bridge's configuration of a run, or why the run can't work.

    NOT_RUN: something that the recipe reads was not available, which is no verdict on the run.
    """

    state: Literal["PASS", "FAIL", "NOT_RUN"] = "PASS"
    reasons: tuple[str, ...] | None = field(default=None, metadata=IF_SET)
    data_parallel_size: int | None = None
    train_iters: int | None = None
    global_batch_size: int | None = None
    micro_batch_size: int | None = None
    seq_length: int | None = None
    split: str | None = None
    memory_gib: dict[str, float] | None = None
    facts: Tree | None = None  # fields of `check.facts.Facts`
    warnings: tuple[str, ...] = ()
    needs_image: tuple[str, ...] | None = field(default=None, metadata=IF_SET)  # checks that need the image
    needs_gpu: tuple[str, ...] | None = field(default=None, metadata=IF_SET)  # in the image: checks that need a GPU
    stopped_at: str | None = None
    parameters: tuple[StageParameters, ...] | None = field(default=None, metadata=IF_SET)
    environment: dict[str, str] | None = field(default=None, metadata=IF_SET)  # the recipe's, for the run's ranks
    export: str | None = field(default=None, metadata=IF_SET)  # why an export would not be the config's model
    export_unknown: str | None = field(default=None, metadata=IF_SET)  # why that could not be found out


@dataclass(frozen=True, kw_only=True)
class Preflight(Record):
    """preflight.json, written if all runs passed. `identities`: digests of the runs as they were then."""

    runs: dict[str, RunCheck]
    identities: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class InsideCheck(Record):
    """The result of a run's preflight in the image."""

    state: Literal["PASS", "FAIL", "NOT_RUN"]
    reasons: tuple[str, ...] | None = field(default=None, metadata=IF_SET)
    needs_gpu: tuple[str, ...] | None = field(default=None, metadata=IF_SET)
    stopped_at: str | None = field(default=None, metadata=IF_SET)


@dataclass(frozen=True, kw_only=True)
class PreflightInImage(Record):
    """preflight-in-image.json; NOT_RUN with a reason if nothing here can start the image."""

    state: Literal["PASS", "NOT_RUN"]
    image: str | None = field(default=None, metadata=IF_SET)  # the image's digest
    why: str | None = field(default=None, metadata=IF_SET)
    how: str | None = field(default=None, metadata=IF_SET)  # how the image was started
    packages: dict[str, str | None] | None = field(default=None, metadata=IF_SET)
    runs: dict[str, InsideCheck] | None = field(default=None, metadata=IF_SET)
