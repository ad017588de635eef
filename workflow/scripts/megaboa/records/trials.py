"""Settings and trials of `snakemake tune`, and its result."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from megaboa.records.base import Event, Record, Tree


@dataclass(frozen=True, kw_only=True)
class Setting(Record):
    """A setting to try. `values`: the keys in which it differs from the user's run."""

    name: str
    values: Tree
    seconds: float | None = None  # predicted step time; None if there is no prediction for this device
    gib: float | None = None  # predicted memory of a rank


@dataclass(frozen=True, kw_only=True)
class TuneSpec(Record):
    """specs/tune.json: the settings, most promising first, and when the search ends."""

    run: str = ""  # the user's run
    swept: Literal["no", "runs", "grid"] = "no"  # what of the user's sweep makes it
    paths: dict[str, tuple[str, ...]] = field(default_factory=dict)  # places of the settings' keys in a file
    own: str  # its setting
    settings: tuple[Setting, ...]
    steps: int
    warmup: int
    tolerance: float
    confidence: float
    minutes: float
    trial_minutes: float


@dataclass(frozen=True, kw_only=True)
class Trial(Event):
    """One start of the ranks with a setting. `identity`: digest of what was run, and on what."""

    event: ClassVar[str] = "trial"
    setting: str
    identity: str
    round: int
    state: Literal["measured", "out_of_memory", "failed", "too_slow"]
    why: str | None = None
    steps: tuple[float, ...] = ()  # seconds of each step, without warm-up
    took: float = 0.0  # seconds from the start of the ranks to their end
    gib: float | None = None  # reserved memory on the GPU with the most
    tensors_gib: float | None = None  # peak of allocated tensors there
    losses: tuple[float, ...] = ()  # of every step, warm-up included
    log: str | None = None  # of a failed trial


@dataclass(frozen=True, kw_only=True)
class Tried(Record):
    """A row of the table: a setting, and the conclusion from all its trials."""

    setting: Setting
    state: str
    why: str | None = None
    trials: int = 0
    seconds: float | None = None  # median of its trials
    gib: float | None = None
    slower: float | None = None  # relative to the winner in the same rounds: 0.1 for 10%
    error: float | None = None  # standard error of `slower`
    chance: float | None = None  # chance that it is faster than the winner by more than the tolerance


@dataclass(frozen=True, kw_only=True)
class Worth(Record):
    """The effect of one key of the winner: how much slower the fastest setting with another value is."""

    key: str
    value: str
    instead: str  # the setting with another value
    slower: float
    error: float | None = None


@dataclass(frozen=True, kw_only=True)
class Tuning(Record):
    """tune.json: the winner, and every setting that was tried."""

    winner: str | None
    confidence: float  # chance that no setting is faster than the winner by more than `tolerance`; 0 if one is untried
    tolerance: float
    ended: Literal["confident", "out_of_time", "round_unfinished", "nothing_works"]
    noise: float | None = None  # standard deviation of a trial's step time, as a share of it
    rounds: int
    trials: int
    minutes: float  # spent on trials
    settings: tuple[Tried, ...]
    worth: tuple[Worth, ...] = ()
