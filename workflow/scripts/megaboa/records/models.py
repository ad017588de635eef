"""Models: their sources, imports, exports, the proofs of these, and evaluations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from megaboa.records.base import IF_SET, Record, Tree
from megaboa.records.runs import Inside, Start

# --- what the plan asks for, below specs/ -----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ModelSpec(Record):
    """Where a model's architecture and weights come from: the hub, a folder, or a config and a seed."""

    name: str
    store: str
    hf: str | None
    revision: str | None
    config: Tree | None
    seed: int
    tokenizer: dict[str, str] | None  # as in CorpusSpec
    weights: bool  # whether weights are needed
    device: str


@dataclass(frozen=True, kw_only=True)
class ConversionSpec(Record):
    """How many ranks import a model, and how they are started."""

    layout: dict[str, int]
    nodes: int
    gpus_per_node: int
    cpus_per_rank: int
    device: str
    start: Start | None
    image: Inside | None


@dataclass(frozen=True, kw_only=True)
class ExportSpec(Record):
    """Which checkpoint of a run is exported, and how."""

    run: str
    checkpoint: str | int
    file_gb: float
    license: str | None


@dataclass(frozen=True, kw_only=True)
class AlongSpec(Record):
    """specs/along/<run>.json: which checkpoints are exported while a run trains, and how."""

    run: str
    every: int | None  # interval in steps; None: all checkpoints that are kept
    file_gb: float
    license: str | None
    command: str | None  # the user's `evaluate` command, if the run is evaluated
    files: dict[str, str] = field(default_factory=dict, metadata=IF_SET)  # as in EvaluateSpec


@dataclass(frozen=True, kw_only=True)
class EvaluateSpec(Record):
    """specs/evaluate.json: the user's command, called for every export."""

    command: str | None
    # SHA-256 of the experiment's files that it names. Empty also if the evaluations are from before it was recorded.
    files: dict[str, str] = field(default_factory=dict, metadata=IF_SET)


@dataclass(frozen=True, kw_only=True)
class GenerateSpec(Record):
    """specs/generate.json: prompts for every export, and how many tokens to add to each."""

    prompts: tuple[str, ...]
    tokens: int


# --- results ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Origin(Record):
    """The run of which a model is an export."""

    experiment: str
    run: str
    iteration: int
    export: str  # its digest
    tokens: str | None  # seen up to this iteration, as in its card


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
    # Digest of its tokenizer's template files, which only fine-tuned runs read; one in tokenizer_config.json is in
    # `tokenizer_digest`.
    chat_template: str | None = field(default=None, metadata=IF_SET)
    folder: str | None = field(default=None, metadata=IF_SET)  # to which `path` led, if it goes through links
    origin: Origin | None = field(default=None, metadata=IF_SET)


@dataclass(frozen=True, kw_only=True)
class ImportRecord(Record):
    """models/<model>/import.json: a Megatron checkpoint converted from a Hugging Face folder."""

    name: str
    checkpoint: str
    digest: str
    source_digest: str
    files: dict[str, int] = field(default_factory=dict)  # sizes; none in manifests of older versions
    tensors: int
    params: int
    dtype: str
    device: str
    image: tuple[str, ...] | None = field(default=None, metadata=IF_SET)  # `Image.marks` of the image that made it


@dataclass(frozen=True, kw_only=True)
class Best(Record):
    """Why a checkpoint is the best one of its run."""

    loss: float  # validation loss
    evaluated: int  # checkpoints that it was chosen from: kept, and with a validation loss of their step
    kept: int


@dataclass(frozen=True, kw_only=True)
class ExportRecord(Record):
    """runs/<run>/export.json: a Hugging Face folder converted from a run's checkpoint."""

    run: str
    path: str
    checkpoint: str
    iteration: int
    file_bytes: int
    digest: str
    files: dict[str, str]  # checksums
    best: Best | None = field(default=None, metadata=IF_SET)  # if export.checkpoint is
    image: tuple[str, ...] | None = field(default=None, metadata=IF_SET)


@dataclass(frozen=True, kw_only=True)
class Check(Record):
    """One check of a proof; `difference`: a measured deviation, ideally 0."""

    name: str
    state: Literal["PASS", "FAIL"]
    detail: str
    difference: float | None = field(default=None, metadata=IF_SET)

    @property
    def passed(self) -> bool:
        return self.state == "PASS"


@dataclass(frozen=True, kw_only=True)
class Proof(Record):
    """proof.json of an import or an export, written only if all checks passed; otherwise failed-proof.json."""

    state: Literal["PASS", "FAIL"]
    checks: tuple[Check, ...]
    digest: str | None = field(default=None, metadata=IF_SET)  # of the files that are proved
    left_out: dict[str, str] | None = field(default=None, metadata=IF_SET)  # checks that weren't possible, and why
    image: tuple[str, ...] | None = field(default=None, metadata=IF_SET)


@dataclass(frozen=True, kw_only=True)
class Scores(Record):
    values: dict[str, float]  # results of `evaluate`
    not_finite: dict[str, str] = field(default_factory=dict, metadata=IF_SET)  # those that are NaN or infinite

    @property
    def numbers(self) -> dict[str, float]:
        """All values, also those that are NaN or infinite."""
        return {**self.values, **{name: float(text) for name, text in self.not_finite.items()}}


@dataclass(frozen=True, kw_only=True)
class Evaluation(Scores):
    """runs/<run>/evaluation.json: the results of the user's command for an export."""

    run: str
    command: str
    export: str  # digest of the export
    iteration: int
    path: str
    # SHA-256 of the files that the command names, when it was called; empty in records of older versions.
    files: dict[str, str] = field(default_factory=dict, metadata=IF_SET)
    written: tuple[str, ...] = field(default=(), metadata=IF_SET)  # files that it names and writes, such as a log

    def is_by(self, command: str | None, files: Mapping[str, str]) -> bool:
        """Whether this command made it, with these files as they are now."""
        read = {name: sha256 for name, sha256 in files.items() if name not in self.written}
        return self.command == command and all(self.files.get(name) == sha256 for name, sha256 in read.items())


@dataclass(frozen=True, kw_only=True)
class ExportedStep(Scores):
    """An export of a checkpoint whose proof passed."""

    iteration: int
    path: str
    digest: str
    loss: float | None  # validation loss from the run's log


@dataclass(frozen=True, kw_only=True)
class Along(Record):
    """runs/<run>/along.json: the exports made during a run's training."""

    run: str
    identity: str
    exports: tuple[ExportedStep, ...]


@dataclass(frozen=True, kw_only=True)
class Generation(Record):
    """The likeliest continuations of a prompt, by Megatron's model and by that of transformers."""

    prompt: str
    megatron: str
    transformers: str
    same: bool  # whether all tokens are equal


@dataclass(frozen=True, kw_only=True)
class Generations(Record):
    """runs/<run>/generations.json"""

    export: str  # digest of the export
    iteration: int
    generations: tuple[Generation, ...]
    image: tuple[str, ...] | None = field(default=None, metadata=IF_SET)
