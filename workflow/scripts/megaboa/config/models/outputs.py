"""What comes out of runs, checkpoints aside: profiles, what trackers log, exported models, the report."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    StringConstraints,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from megaboa.config.models.resources import SchedulerOptions
from megaboa.config.models.section import Name, Runs, Section, key
from megaboa.config.problems import nearest
from megaboa.fields import INTERPOLATED, interpolated
from megaboa.files import is_python
from megaboa.formats import text
from megaboa.metrics import EVALUATION, named
from megaboa.records import Tree
from megaboa.secrets import has_credentials

TOOLS = ("none", "pytorch", "nsys", "viztracer", "memory")


def _tool(value: str) -> str:
    """One of those that are known, or a Python file."""
    if value not in TOOLS and not is_python(value):
        hint = nearest(value, TOOLS)
        meant = f"; did you mean {hint!r}?" if hint else ""
        raise ValueError(f"is not allowed{meant}; allowed: {', '.join(TOOLS)}, or a Python file (.py)")
    return value


Tool = Annotated[
    str,
    AfterValidator(_tool),
    WithJsonSchema({"anyOf": [{"enum": list(TOOLS)}, {"type": "string", "pattern": r"\.py$"}]}),
]


class Profile(Section):
    tool: Tool = key(
        "none",
        f"profiler of the profile stage: {', '.join(TOOLS)} (nsys and memory: on GPUs only), or a Python file with a "
        "class `Profiler` of your own",
    )
    steps: Annotated[list[NonNegativeInt], Field(min_length=2, max_length=2)] = key(
        [2, 8], "first step, and the step before which capture ends; the first and last captured steps are not analysed"
    )
    ranks: list[NonNegativeInt] = key([0], "ranks to profile, on any nodes", min_length=1)
    domains: list[str] = key(["cuda", "nvtx"], "domains that nsys traces (its `--trace`)", min_length=1)
    arguments: list[str] = key([], "further arguments of `nsys profile`, such as `--enable=efa_metrics`")

    @model_validator(mode="after")
    def _forward(self) -> Profile:
        if self.steps[0] >= self.steps[1]:
            raise ValueError(f"steps must go forward: {self.steps[0]} is not before {self.steps[1]}")
        return self


def _literal(value: str) -> str:
    if interpolated(value) is not None:
        raise ValueError(f"{value!r} {INTERPOLATED}")
    return value


Literally = Annotated[str, AfterValidator(_literal)]  # text that Bridge gets


class WandB(Section):
    project: Literally | None = key(None, "project; default: the experiment's name")
    entity: Literally | None = key(None, "team or user that the project belongs to; default: the account's own")


class MLflow(Section):
    experiment: Literally | None = key(None, "MLflow experiment; default: this experiment's name")
    tracking_uri: Literally | None = key(None, "tracking server; default: MLFLOW_TRACKING_URI, or MLflow's own default")

    @field_validator("tracking_uri")
    @classmethod
    def _without_password(cls, uri: str | None) -> str | None:
        if uri and has_credentials(uri):
            raise ValueError(
                "holds a password, which would be written to disk: leave it out, and export MLFLOW_TRACKING_USERNAME "
                "and MLFLOW_TRACKING_PASSWORD"
            )
        return uri


class Trackers(Section):
    """Where ranks log to, apart from their own files. Changes no loss. Keys and passwords come from the environment."""

    tensorboard: bool = key(True, "event files in the folder of every attempt")
    wandb: WandB | None = key(None, "Weights & Biases; off. `wandb: {}` takes all defaults")
    mlflow: MLflow | None = key(None, "MLflow; off. `mlflow: {}` takes all defaults")
    offline: bool = key(False, "send nothing; write the logs into the run's store")

    @model_validator(mode="after")
    def _one_place(self) -> Trackers:
        if self.offline and self.mlflow and self.mlflow.tracking_uri:
            raise ValueError("offline writes to the store, and mlflow.tracking_uri names another place: remove one")
        return self


def _all_or_some(value: Any) -> Any:
    if value in (None, "all") or isinstance(value, dict | Section):
        return value
    raise ValueError(f"{value!r} must be `all`, or `{{every: N}}`")


class Along(Section):
    every: PositiveInt = key(description="export the kept checkpoints at multiples of this number of steps")


class Export(Section):
    runs: Runs = key([], "names or glob patterns of the runs to export to Hugging Face format, or `all`")
    checkpoint: Literal["final", "best"] | PositiveInt = key(
        "final",
        "the last checkpoint, the one with the lowest validation loss, or an iteration that was kept; these two also "
        "of earlier versions of the run (`continue_from: itself`)",
    )
    checkpoints: Annotated[Literal["all"] | Along | None, BeforeValidator(_all_or_some)] = key(
        None,
        "further exports along the training, proved and evaluated: `all` kept checkpoints, or `{every: N}`, those at "
        "multiples of N steps; off",
    )
    file_gb: PositiveFloat = key(5.0, "size of a weights file; larger models have several")
    license: str | None = key(
        None, "licence named in the model card, such as `apache-2.0`; default: that in the card of a local base model"
    )
    push: dict[Name, str] = key({}, "where `snakemake push` sends an exported run: run to `owner/name`")
    private: bool = key(True, "whether a repository that `snakemake push` makes is private")


class Generate(Section):
    prompts: list[Annotated[str, Field(min_length=1)]] = key(
        ["import"], "prompts of `snakemake generate`, for the trained checkpoint and its export", min_length=1
    )
    tokens: PositiveInt = key(32, "tokens generated per prompt, greedily")


class Evaluate(Section):
    """A command of the user's, called for the exported model of each run (docs/how-to/evaluation.md)."""

    command: str | None = key(
        None,
        "shell command that reads the folder {model} and writes JSON to {out}: a file, or a folder with one JSON file",
    )
    runs: Runs = key(["*"], "exported runs to evaluate")
    runtime: PositiveInt = key(120, "wall time of its job on a cluster, in minutes")
    slurm_extra: SchedulerOptions = key("", "further options of sbatch for its job, such as `--gpus-per-node=4`")

    @field_validator("command")
    @classmethod
    def _placeholders(cls, command: str | None) -> str | None:
        if missing := [name for name in ("{model}", "{out}") if command is not None and name not in command]:
            raise ValueError(f"lacks {' and '.join(missing)}, which stand for the model's folder and the JSON to write")
        return command


class Agreement(Section):
    """Runs whose losses must agree at every step: a check in the report."""

    reference: Name = key(description="reference run")
    runs: list[str] = key(description="names or glob patterns of the runs that must agree with the reference")
    tolerance: PositiveFloat = key(
        1e-5,
        "largest allowed absolute difference of the loss at any step; a hundred times this after a tie of two experts",
    )
    grad_norm_tolerance: PositiveFloat | None = key(
        None,
        "largest allowed relative difference of the gradient norm at the first ten steps; later a hundred times this, "
        "after a tie a thousand times; default: not compared",
    )
    twins: Annotated[int, Field(ge=0, le=9)] = key(
        0,
        "further runs of the reference, named `<reference>-twin1` and so on, whose initial weights are moved by at "
        "most one unit in the last place: limits are then taken from them, not from the tolerances",
    )
    seeds: Annotated[int, Field(ge=0, le=9)] = key(
        0,
        "further runs of the reference with the next seeds, named `<reference>-seed1` and so on: they tell whether a "
        "difference beyond rounding is one that a seed makes too",
    )
    within: Literal["rounding", "seed"] = key(
        "rounding", "what passes: differences within rounding only, or those within a seed too"
    )
    tensors: bool = key(
        False,
        "compare every tensor of weights and optimizer in the runs' last checkpoints too, and which samples each step "
        "read; `snakemake prove` sets it",
    )


class Prove(Section):
    """What `snakemake prove` trains: N + M steps in one go, and N steps, a stop, and M more."""

    run: Name | None = key(None, "run to prove; default: the first")
    steps: Annotated[int, Field(ge=2)] = key(6, "N: steps before the stop")
    more: PositiveInt = key(5, "M: steps after it; fewer than `steps`")
    layouts: dict[Name, Tree] | None = key(
        None,
        "further layouts to resume in: for each name its values, by dotted key; `{}`: none; default: the first that is "
        "legal of tp, pp and dp with two ranks or, where the run has several ranks, another tp or pp",
    )

    @model_validator(mode="after")
    def _one_stop(self) -> Prove:
        if self.more >= self.steps:
            raise ValueError(f"more must be less than steps ({self.steps}), or the run would stop a second time")
        if taken := {"whole", "resumed"} & {*(self.layouts or {})}:
            raise ValueError(f"layouts: {taken.pop()!r} is the name of another run of the proof: choose another")
        return self


class PredictedSetting(Section):
    seconds: float | None = key(None, "set by `snakemake tune`: predicted step time of this setting")
    gib: float | None = key(None, "set by `snakemake tune`: predicted memory of a rank")


class Tune(Section):
    """What `snakemake tune` tries: settings of one run, in short trials, until the fastest is known."""

    run: Name | None = key(None, "run to tune; default: the first")
    settings: PositiveInt = key(24, "number of settings that are tried: the fastest by prediction")
    steps: Annotated[int, Field(ge=5)] = key(10, "measured steps of a trial")
    tolerance: Annotated[float, Field(gt=0, lt=1)] = key(
        0.03, "settings that are faster than the winner by no more than this share don't matter"
    )
    confidence: Annotated[float, Field(ge=0.5, lt=1)] = key(
        0.95, "the search ends when it is this sure that none of the settings is faster by more than `tolerance`"
    )
    minutes: PositiveFloat = key(
        10.0, "no trial begins later than this, however sure the search is; a call with more minutes resumes"
    )
    trial_minutes: PositiveFloat = key(5.0, "a trial that takes longer is ended, and its setting given up")
    also: dict[str, list[Any]] = key(
        {},
        "further keys and the values to try, as in `training.precision: [bf16_mixed, "
        "bf16_with_fp8_current_scaling_mixed]`; every layout is tried with each",
    )
    trials_of: Name | None = key(None, "set by `snakemake tune`: the run whose settings are tried")
    swept: Literal["no", "runs", "grid"] = key("no", "set by `snakemake tune`: the part of the sweep with that run")
    predicted: dict[Name, PredictedSetting] = key({}, "set by `snakemake tune`: predictions of the settings")


Scalar = bool | int | float | str
Column = Annotated[str, Field(min_length=1)]


LAWS = ("params", "trained_tokens", "train_flops")  # axes of x that a scaling law is drawn over


class Figure(Section):
    """One figure of the report: its table, its columns, its type (docs/how-to/report.md)."""

    name: Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_-]*$", max_length=60)] = key(
        description="name of its files; the name of a built-in figure replaces that figure"
    )
    kind: Literal["line", "bar", "box", "scatter", "heat"] = key(description="type of plot")
    data: Literal["runs", "steps", "validation", "time", "exports"] = key(
        "runs", "source table, one observation per row"
    )
    x: Column = key(description="column of the x axis; for bars and boxes, one per value")
    y: Column = key(description="column of the y axis")
    value: Column | None = key(None, "column for a heat map's colours")
    hue: Column | None = key(
        None,
        "column for the colours; default: the runs or, if there are many, the models; with `over`, the settings, apart "
        "from what is on the x axis",
    )
    facet: Column | None = key(None, "column with a separate panel per value")
    dash: Column | None = key(
        None, "column for the lines' dashes, or for the shapes of points, in addition to `hue`; at most six values"
    )
    direct: bool = key(False, "write the names of the colours next to the curves, and not into the legend")
    over: Column | None = key(None, "column, such as training.seed, to average over, with a 95% interval")
    filter: dict[str, Scalar | list[Scalar]] = key({}, "show only rows with these values, by column")
    log: list[Literal["x", "y"]] = key([], "logarithmic axes")
    diagonal: bool = key(False, "draw the line x = y in a scatter plot")
    fit: Literal["scaling-law", "optimum"] | None = key(
        None,
        "in a scatter plot of runs: Chinchilla's law, with x `params`, `trained_tokens` or `train_flops`; or the "
        "optimum of a sweep over x, for each value of `hue`",
    )
    best: Literal["lowest", "highest"] | None = key(
        None,
        "which values of `y`, or of a heat map's `value`, are best: for `fit: optimum` (required for `evaluation.*`), "
        "a heat map's colours, and which bars are shown of more than 40; default: the lowest of losses and times, else "
        "the highest",
    )
    format: Literal["page", "one-column", "two-columns"] = key(
        "page", "size of the figure and its text: of the page, or of a column or the whole width of a two-column paper"
    )
    x_label: str | None = key(None, "label of the axis; default: the column's")
    y_label: str | None = key(None, "label of the axis; default: the column's")
    caption: str = key("", "text below the figure")

    @model_validator(mode="after")
    def _fitting(self) -> Figure:
        if (self.kind == "heat") != (self.value is not None):
            raise ValueError("value is the column for a heat map's colours: set it for heat maps only")
        if self.over is not None and self.kind != "line":
            raise ValueError("over belongs to lines: remove it, or draw a line")
        if self.diagonal and self.kind != "scatter":
            raise ValueError("diagonal belongs to scatter plots: remove it")
        if self.dash is not None and (self.hue is None or self.kind not in ("line", "scatter")):
            raise ValueError("dash tells apart lines or points of one colour: set hue too, and draw lines or points")
        if self.direct and self.kind != "line":
            raise ValueError("direct belongs to lines: remove it, or draw a line")
        if self.fit is not None and (self.kind != "scatter" or self.data != "runs" or self.facet is not None):
            raise ValueError("fit belongs to one scatter plot of runs: set `kind: scatter`, no `data` and no `facet`")
        if self.fit == "scaling-law" and self.x not in LAWS:
            raise ValueError(f"fit: scaling-law has x: {', '.join(LAWS)}; x is {self.x!r}")
        if self.best is not None and self.fit != "optimum" and self.kind not in ("bar", "heat"):
            raise ValueError("best belongs to `fit: optimum`, bars and heat maps: remove it")
        if self.best is None and self.fit == "optimum" and self.y.startswith(EVALUATION):
            raise ValueError(f"fit: optimum can't know which {self.y} is best: set `best: lowest` or `best: highest`")
        return self

    def wanted(self, column: str) -> list[str]:
        """The values that the filter allows in a column."""
        given = self.filter[column]
        return [text(value) for value in (given if isinstance(given, list) else [given])]

    @property
    def lowest_is_best(self) -> bool:
        """Of the values of `y`, or of a heat map's `value`."""
        return self.best == "lowest" if self.best else named(self.value or self.y).less_is_better


class Baseline(Section):
    """Earlier runs to compare with, by their names: a check in the report for each quantity."""

    path: Annotated[str, Field(min_length=1)] | Annotated[list[str], Field(min_length=1)] = key(
        description="results folder of an earlier experiment, or a bundle; or several of them, which count together"
    )
    slower: PositiveFloat = key(0.02, "how much longer a step may take, as a share")
    more_memory: PositiveFloat = key(0.02, "how much more memory of a GPU a run may need, as a share")
    higher_loss: PositiveFloat = key(0.005, "how much higher the loss at the end may be, as a share")
    spread: PositiveFloat | None = key(
        None,
        "known standard deviation between runs of one setting, as a share; used if there is one run on each side",
    )

    @property
    def paths(self) -> tuple[str, ...]:
        return (self.path,) if isinstance(self.path, str) else tuple(self.path)


class Report(Section):
    title: str | None = key(None, "heading of the report; default: the experiment's name")
    question: str | None = key(None, "question that the experiment answers, shown below the heading")
    agreements: list[Agreement] = key([], "groups of runs whose losses must agree")
    figures: list[Figure] = key([], "additional figures")
    compare_to: str | None = key(
        None,
        "published table to compare with the measurements: its name in config/published, or a path",
    )
    baseline: Baseline | None = key(None, "earlier runs that these must not be worse than")
