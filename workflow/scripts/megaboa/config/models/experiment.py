"""The experiment: all sections of the file."""

from __future__ import annotations

import os.path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, StringConstraints

from megaboa.config.models.data import Corpus, Data
from megaboa.config.models.export import Evaluate, Export, Generate
from megaboa.config.models.image import Image
from megaboa.config.models.model import Model, Tokenizer
from megaboa.config.models.profile import Profile
from megaboa.config.models.report import Report
from megaboa.config.models.resources import Budget, Launch, Recovery, Resources
from megaboa.config.models.section import Name, Section, key
from megaboa.config.models.sweep import Sweep
from megaboa.config.models.trackers import Trackers
from megaboa.config.models.training import Checkpoint, Load, Optimizer, Parallel, Schedule, Training

Dotted = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z0-9_-]+)+$")]
Parent = Annotated[str, StringConstraints(pattern=r"^[^/@\s]+/[^/@\s]+(@[1-9]\d*)?$")]


class Experiment(Section):
    experiment: Name | None = key(None, "name; results go to results/<name>/; default: the file's name")
    device: Literal["cpu", "cuda"] = key("cuda", "where training runs; `cpu` needs no GPU")
    store: Annotated[str, AfterValidator(os.path.expanduser)] = key(
        "store", "folder of payloads (checkpoints, corpora, models); shared between experiments"
    )
    tokenizers: dict[Name, Tokenizer] = key({}, "tokenizers that are trained on the spot")
    models: dict[Name, Model] = key(description="models by name", min_length=1)
    corpora: dict[Name, Corpus] = key({}, "corpora by name; none: Bridge's mock data")
    model: Name | None = key(None, "model of the runs; default: the only one there is", short="model")
    continue_from: Parent | None = key(
        None,
        "continue from another run's checkpoint: `<experiment>/<run>@<step>`; without `@<step>` from its last",
        short="from",
    )
    load: Load = key(Load(), "what is taken from that checkpoint")
    data: Data = key(Data(), "which corpora a run reads")
    training: Training = key(Training(), "length, batch, precision, evaluation")
    optimizer: Optimizer = key(Optimizer(), "optimizer")
    schedule: Schedule = key(Schedule(), "learning rate schedule")
    parallel: Parallel = key(Parallel(), "layout; data parallel size follows from it and `resources`")
    checkpoint: Checkpoint = key(Checkpoint(), "saving")
    profile: Profile = key(Profile(), "profiling")
    resources: Resources = key(Resources(), "what a run is given")
    launch: Launch = key(Launch(), "how its ranks are started")
    image: Image = key(Image(), "what they run in")
    trackers: Trackers = key(Trackers(), "TensorBoard, W&B and MLflow")
    recovery: Recovery = key(Recovery(), "what is done when they fail")
    budget: Budget = key(Budget(), "what the plan may cost")
    export: Export = key(Export(), "which runs become Hugging Face models")
    generate: Generate = key(Generate(), "what exported runs are asked to say")
    evaluate: Evaluate = key(Evaluate(), "evaluation of the exported models")
    report: Report = key(Report(), "the report")
    overrides: dict[Dotted, Any] = key({}, "fields of Bridge's ConfigContainer in its own dotted form")
    sweep: Sweep | None = key(None, "axes of the experiment; none: one run called `run`")
