"""What `snakemake tune` measures: settings, short trials of them, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from megaboa.records.base import Event, Record, Tree


@dataclass(frozen=True, kw_only=True)
class Setting(Record):
    """A run to try. `values`: the keys in which it differs from the user's own run."""

    name: str
    values: Tree
    seconds: float | None = None  # of a step, by prediction; None: nothing predicts it here
    gib: float | None = None  # of a rank's memory, by prediction


@dataclass(frozen=True, kw_only=True)
class TuneSpec(Record):
    """specs/tune.json: the settings, most promising first, and when the search ends."""

    own: str  # the setting that the user's run has
    settings: tuple[Setting, ...]
    steps: int
    warmup: int
    tolerance: float
    confidence: float
    minutes: float
    trial_minutes: float


@dataclass(frozen=True, kw_only=True)
class Trial(Event):
    """One start of the ranks with a setting. `identity`: what was run, and on what."""

    event: ClassVar[str] = "trial"
    setting: str
    identity: str
    round: int
    state: Literal["measured", "out_of_memory", "failed", "too_slow"]
    why: str | None = None
    steps: tuple[float, ...] = ()  # seconds of each, without those that warm up
    took: float = 0.0  # seconds, from the start of the ranks to their end
    gib: float | None = None  # reserved on the GPU that had most
    tensors_gib: float | None = None  # the most that tensors took there
    losses: tuple[float, ...] = ()  # of every step, those that warm up included
    log: str | None = None  # of a trial that failed


@dataclass(frozen=True, kw_only=True)
class Tried(Record):
    """A row of the table: a setting, and what all its trials say."""

    setting: Setting
    state: str
    why: str | None = None
    trials: int = 0
    seconds: float | None = None
    gib: float | None = None
    slower: float | None = None  # than the winner: 0.1 for 10%
    error: float | None = None  # standard error of that
    chance: float | None = None  # that it is faster than the winner by more than the tolerance


@dataclass(frozen=True, kw_only=True)
class Worth(Record):
    """What one key of the winner is worth: how much slower the fastest setting with another value is."""

    key: str
    value: str
    instead: str  # the setting with another value
    slower: float
    error: float | None = None


@dataclass(frozen=True, kw_only=True)
class Tuning(Record):
    """tune.json: the winner, and every setting that was tried."""

    winner: str | None
    confidence: float  # that nothing tried is faster than the winner by more than `tolerance`
    tolerance: float
    ended: Literal["confident", "out_of_time", "nothing_works"]
    noise: float | None = None  # standard deviation of a trial's step time, as a share of it
    rounds: int
    trials: int
    minutes: float  # in trials
    settings: tuple[Tried, ...]
    worth: tuple[Worth, ...] = ()
