"""The experiment: all sections of the file, and the axes of its sweep."""

from __future__ import annotations

import os.path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, StringConstraints, WithJsonSchema, model_validator

from megaboa.config.models.data import Corpus, Data
from megaboa.config.models.model import Model, Tokenizer
from megaboa.config.models.outputs import Evaluate, Export, Generate, Profile, Prove, Report, Trackers, Tune
from megaboa.config.models.resources import Budget, Image, Launch, Recovery, Resources
from megaboa.config.models.section import Name, Section, key
from megaboa.config.models.training import Checkpoint, Load, Optimizer, Parallel, Schedule, Training
from megaboa.config.models.tuning import Tuning
from megaboa.records import Task, Tree

Dotted = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z0-9_-]+)+$")]
Parent = Annotated[str, StringConstraints(pattern=r"^(itself|[^/@\s]+/[^/@\s]+)(@[1-9]\d*)?$")]


def _axis(value: Any) -> Any:
    """A list of values, or a mapping from labels to the keys that each of them sets."""
    if not value:
        raise ValueError("is empty: give it values or remove it")
    if isinstance(value, dict):
        for label, keys in value.items():
            if not isinstance(keys, dict) or not keys:
                raise ValueError(
                    f"{label!r} must be a mapping from dotted keys to values (or give the axis a list of values)"
                )
    elif not isinstance(value, list):
        raise ValueError("must be a list of values, or a mapping from labels to dotted keys with values")
    return value


Axis = Annotated[
    list[Any] | dict[str, Tree],
    BeforeValidator(_axis),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "array", "minItems": 1},
                {"type": "object", "minProperties": 1, "additionalProperties": {"type": "object", "minProperties": 1}},
            ]
        }
    ),
]


class Sweep(Section):
    """Every block given multiplies the number of runs. A value may stand for any key of the file, dotted."""

    grid: dict[str, Axis] = key({}, "axes; every combination is a run", min_length=1)
    zip: dict[str, Axis] = key({}, "axes of equal length that advance together", min_length=1)
    runs: dict[Name, Tree] = key({}, "named runs: for each its own values, by dotted key", min_length=1)
    exclude: list[str] = key([], "names or glob patterns of runs to leave out, such as one that diverges")
    skip_illegal: bool = key(
        False, "skip runs that could never work and list them as INVALID; otherwise they stop the plan"
    )

    @model_validator(mode="after")
    def _something(self) -> Sweep:
        if not (self.grid or self.zip or self.runs):
            raise ValueError("is empty: give it grid, zip or runs, or remove it")
        lengths = {name: len(axis) for name, axis in self.zip.items()}
        if len(set(lengths.values())) > 1:
            listed = ", ".join(f"{name} has {length}" for name, length in lengths.items())
            raise ValueError(f"the axes of zip must be of equal length: {listed}")
        return self


class Experiment(Section):
    experiment: Name | None = key(None, "name; results go to results/<name>/; default: the file's name")
    device: Literal["cpu", "cuda", "auto"] = key(
        "cuda",
        "where training runs; `auto`: `cuda` where there are GPUs and Transformer Engine, else `cpu`",
    )
    task: Task = key(
        "pretrain",
        "`pretrain` on text; `sft`: train the whole model on examples; `lora`, `dora`: freeze it, and train adapters",
        short="task",
    )
    store: Annotated[str, AfterValidator(os.path.expanduser)] = key(
        "store", "folder of payloads (checkpoints, corpora, models); shared between experiments"
    )
    tokenizers: dict[Name, Tokenizer] = key({}, "tokenizers to train")
    models: dict[Name, Model] = key(description="models by name", min_length=1)
    corpora: dict[Name, Corpus] = key({}, "corpora by name; none: Bridge's mock data")
    model: Name | None = key(None, "model of the runs; default: the only one there is", short="model")
    continue_from: Parent | None = key(
        None,
        "continue from another run's checkpoint: `<experiment>/<run>@<step>`; without `@<step>`: its last; `itself`: "
        "from the run's own, under its name, with other settings",
        short="from",
    )
    load: Load = key(Load(), "what is loaded from that checkpoint")
    data: Data = key(Data(), "which corpora a run reads")
    tuning: Tuning = key(Tuning(), "fine-tuning: which tokens count, and the adapters")
    training: Training = key(Training(), "length, batch, precision, evaluation")
    optimizer: Optimizer = key(Optimizer(), "optimizer")
    schedule: Schedule = key(Schedule(), "learning rate schedule")
    parallel: Parallel = key(Parallel(), "layout; data parallel size follows from it and `resources`")
    checkpoint: Checkpoint = key(Checkpoint(), "saving")
    profile: Profile = key(Profile(), "profiling")
    resources: Resources = key(Resources(), "resources of a run")
    launch: Launch = key(Launch(), "how the ranks are started")
    image: Image = key(Image(), "image for the ranks")
    trackers: Trackers = key(Trackers(), "TensorBoard, W&B and MLflow")
    recovery: Recovery = key(Recovery(), "what to do when ranks fail")
    budget: Budget = key(Budget(), "limits on the plan's cost")
    export: Export = key(Export(), "runs to export as Hugging Face models")
    generate: Generate = key(Generate(), "text generation with exported runs")
    evaluate: Evaluate = key(Evaluate(), "evaluation of the exported models")
    report: Report = key(Report(), "the report")
    prove: Prove = key(Prove(), "what `snakemake prove` trains: does stopping and resuming change anything?")
    tune: Tune = key(Tune(), "what `snakemake tune` tries: which settings of a run are the fastest?")
    overrides: dict[Dotted, Any] = key({}, "fields of Bridge's ConfigContainer by dotted name; `${...}` is refused")
    sweep: Sweep | None = key(None, "axes of the experiment; none: one run called `run`")
