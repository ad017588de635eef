"""The experiment file, typed. The JSON schema and the table of keys in config/README.md are made from these models.

A field's description is what a user reads in the table of keys; `short` is how the field is called in the names of a
sweep's runs (`tp2-mbs8`). Fields annotated with `Formula` also take an expression, such as
`20 * params / (gbs * seq_length)`: in an experiment as read they may still be text, in a planned run they are numbers.
"""

from __future__ import annotations

import os.path
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    StringConstraints,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from megaboa.causes import ACTIONS, Cause
from megaboa.config.errors import nearest
from megaboa.config.formula import Formula
from megaboa.conversion import Layout
from megaboa.data.names import file_stems
from megaboa.image import references
from megaboa.launch import networks
from megaboa.secrets import has_credentials, is_secret_name

# Names become file and folder names: letters first, then letters, digits, '.', '_', '-'.
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z][A-Za-z0-9._-]*$", max_length=100)]
Dotted = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z0-9_-]+)+$")]

Parent = Annotated[str, StringConstraints(pattern=r"^[^/@\s]+/[^/@\s]+(@[1-9]\d*)?$")]

Count = Annotated[int, Field(gt=0), Formula()]
Whole = Annotated[int, Field(ge=0), Formula()]
Positive = Annotated[float, Field(gt=0), Formula()]
NonNegative = Annotated[float, Field(ge=0), Formula()]
Share = Annotated[float, Field(ge=0, lt=1), Formula()]
Fraction = Annotated[float, Field(ge=0, le=1)]

Precision = Literal[
    "fp32",
    "bf16_mixed",
    "fp16_mixed",
    "bf16_with_fp8_delayed_scaling_mixed",
    "bf16_with_fp8_current_scaling_mixed",
    "bf16_with_fp8_subchannel_scaling_mixed",
    "bf16_with_mxfp8_mixed",
    "bf16_with_nvfp4_mixed",
]


class Section(BaseModel):
    """No unknown keys, no silent conversion ('yes' is not true, '8' is not 8), immutable once read."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, protected_namespaces=())


def key(default: Any = ..., description: str = "", short: str | None = None, **kwargs: Any) -> Any:
    extra = {"short": short} if short else None
    return Field(default=default, description=description, json_schema_extra=extra, **kwargs)


def _weights(value: Any) -> Any:
    """A single corpus is a blend of one."""
    if isinstance(value, str):
        return {value: 1.0}
    if value is None or isinstance(value, dict):
        return value
    raise ValueError("must be the name of a corpus, or a mapping from corpora to weights")


_BLEND_SCHEMA = [
    {"type": "string"},
    {"type": "object", "additionalProperties": {"type": "number", "exclusiveMinimum": 0}, "minProperties": 1},
]
Blend = Annotated[
    dict[Name, PositiveFloat],
    Field(min_length=1),
    BeforeValidator(_weights),
    WithJsonSchema({"anyOf": _BLEND_SCHEMA}),
]
OptionalBlend = Annotated[
    Annotated[dict[Name, PositiveFloat], Field(min_length=1)] | None,
    BeforeValidator(_weights),
    WithJsonSchema({"anyOf": [*_BLEND_SCHEMA, {"type": "null"}]}),
]


def _patterns(value: Any) -> Any:
    """`all` is the pattern that every run matches."""
    if value == "all":
        return ["*"]
    if isinstance(value, list):
        return value
    raise ValueError("must be a list of names or glob patterns of runs, or `all`")


Runs = Annotated[
    list[str],
    BeforeValidator(_patterns),
    WithJsonSchema({"anyOf": [{"const": "all"}, {"type": "array", "items": {"type": "string"}}]}),
]


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
    list[Any] | dict[str, dict[str, Any]],
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


class Tokenizer(Section):
    train_on: Name = key(description="corpus whose text the tokenizer is trained on")
    vocab_size: Annotated[int, Field(ge=260)] = key(512, "size of the byte-level BPE vocabulary")


class Conversion(Section):
    """By how many ranks a model is imported. The weights are the same, and so is the checkpoint's place."""

    tp: PositiveInt = key(1, "tensor parallel size of the ranks that import the model and prove it")
    pp: PositiveInt = key(1, "pipeline parallel size of these ranks")
    ep: PositiveInt = key(1, "expert parallel size of these ranks; there are pp * max(tp, ep)")
    nodes: PositiveInt = key(1, "nodes that they are spread over")

    @model_validator(mode="after")
    def _fits(self) -> Conversion:
        if max(self.tp, self.ep) % min(self.tp, self.ep):
            raise ValueError(f"tp {self.tp} and ep {self.ep} share the same ranks: make one a multiple of the other")
        if self.layout.ranks % self.nodes:
            raise ValueError(f"{self.layout.ranks} ranks can't be spread evenly over {self.nodes} nodes")
        return self

    @property
    def layout(self) -> Layout:
        return Layout(self.tp, self.pp, self.ep)


class Model(Section):
    """Exactly one of `hf`, `config` and `recipe`."""

    hf: str | None = key(None, "Hugging Face id, or path of a local folder with config.json and weights")
    revision: str | None = key(None, "commit, tag or branch of the Hugging Face id")
    config: dict[str, Any] | None = key(
        None, "a Hugging Face config written out (`model_type: qwen3`, ...): a model made on the spot"
    )
    recipe: str | None = key(
        None, "a Python file with `configure(...)`, or the name of a pretraining recipe of Megatron-Bridge"
    )
    args: dict[str, Any] = key({}, "arguments for the recipe's function")
    tokenizer: str | None = key(None, "name under `tokenizers`, or Hugging Face id or folder; default: the model's own")
    init: Literal["pretrained", "scratch"] = key(
        "scratch", "start from the imported weights, or from random ones drawn by Megatron"
    )
    seed: NonNegativeInt = key(0, "seed of the weights of a model made from `config`")
    conversion: Conversion = key(Conversion(), "by how many ranks it is imported; default: by one process")
    params: PositiveInt | None = key(
        None, "number of parameters, for expressions, where it can't be told from the model's config"
    )

    @model_validator(mode="after")
    def _one_origin(self) -> Model:
        given = [name for name in ("hf", "config", "recipe") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"needs exactly one of hf, config and recipe; given: {', '.join(given) or 'none'}")
        if self.config is not None and not isinstance(self.config.get("model_type"), str):
            raise ValueError("config needs model_type, such as `model_type: qwen3`")
        if self.revision and not self.hf:
            raise ValueError("revision belongs to hf: remove it, or name a model with hf")
        if self.args and not self.recipe:
            raise ValueError("args belong to recipe: remove them, or name a recipe")
        if self.init == "pretrained" and self.recipe:
            raise ValueError("init: pretrained needs hf or config, because a recipe has no weights to import")
        return self


class Corpus(Section):
    source: Annotated[str, Field(min_length=1)] | Annotated[list[str], Field(min_length=1)] = key(
        description="files (.jsonl, .txt, both also .gz and .zst, .parquet, .arrow), a folder that `save_to_disk` "
        "wrote, a glob of them, `hf:owner/name` of the hub, or `python-stdlib`: the sources of Python's own library; "
        "or a list of these"
    )
    text_key: Annotated[str, Field(min_length=1)] | Annotated[list[str], Field(min_length=1)] = key(
        "text", "the field that holds the text, nested ones as `a.b`; several give a dataset each"
    )
    separator: Annotated[str, Field(min_length=1)] | None = key(
        None, "what stands between the documents of a text file; default: a file is one document"
    )
    subset: str | None = key(None, "configuration of a dataset of the hub")
    split: str = key("train", "split of a dataset of the hub, or of a folder with several")
    revision: str | None = key(None, "commit, tag or branch of a dataset of the hub")
    limit: PositiveInt | None = key(None, "take only the first so many records (in one shard)")
    shards: PositiveInt = key(1, "jobs that share the work; changes nothing in the result")
    min_characters: NonNegativeInt = key(0, "leave out shorter documents")
    deduplicate: bool = key(False, "leave out documents whose text is exactly that of an earlier one")
    on_bad_record: Literal["error", "skip"] = key(
        "error", "a record that can't be used ends the job, or is left out, counted and shown"
    )
    max_document_mb: PositiveInt = key(
        128, "a longer record can't be used; 20 times its size is asked for in memory", le=1024
    )
    tokenizer: str | None = key(None, "name under `tokenizers`, or Hugging Face id or folder; default: the model's")
    append_eod: bool = key(True, "end every document with the tokenizer's end-of-text token")
    prepend_bos: bool | None = key(None, "begin every document with the BOS token; default: as the tokenizer does it")
    encoder: Literal["auto", "gigatoken", "tokenizers"] = key(
        "auto", "gigatoken where it takes the tokenizer, and is equal to `tokenizers` on a sample of every shard"
    )

    @model_validator(mode="after")
    def _distinct_keys(self) -> Corpus:
        stems = file_stems("", self.text_key)
        if len(set(stems)) < len(stems):
            raise ValueError(f"the keys of text_key give files of the same name: {', '.join(self.text_key)}")
        return self


class BlendPerSplit(Section):
    """A blend of its own for every split; a split without one has no data."""

    train: Blend = key(description="what is trained on: a corpus, or corpora with weights", short="data")
    valid: OptionalBlend = key(None, "what validation reads; default: nothing", short="valid")
    test: OptionalBlend = key(None, "what the test at the end reads; default: nothing", short="test")


class FimTokens(Section):
    """Tokens that the tokenizer must have; the defaults are Qwen's."""

    prefix: str = key("<|fim_prefix|>", "token before what stands before the gap")
    middle: str = key("<|fim_middle|>", "token before what fills the gap")
    suffix: str = key("<|fim_suffix|>", "token before what stands after the gap")
    pad: str = key("<|fim_pad|>", "token that fills up samples that have become shorter")
    eod: str = key("<|endoftext|>", "token between documents: nothing is moved across it")


class Fim(Section):
    """Fill-in-the-middle: documents are cut in three, and their middle is moved to the end."""

    rate: Fraction = key(0.5, "share of the documents that are rearranged", short="fim")
    spm_rate: Fraction = key(0.5, "share of these in which what stands after the gap comes first", short="spm")
    tokens: FimTokens = key(FimTokens(), "the tokens between the parts")
    split_sample: str | None = key(None, "token at which documents are split into fragments, each rearranged by itself")
    fragment_rate: Fraction | None = key(None, "share of the fragments that are rearranged")
    no_prefix: str | None = key(None, "documents and fragments that begin with this text are left as they are")

    @model_validator(mode="after")
    def _fragments(self) -> Fim:
        if (self.split_sample is None) != (self.fragment_rate is None):
            raise ValueError("split_sample and fragment_rate belong together: set both or none")
        return self


class Data(Section):
    blend: OptionalBlend = key(
        None, "a corpus, or corpora with weights; default: the only corpus there is", short="data"
    )
    blend_per_split: BlendPerSplit | None = key(None, "a blend for each split, in place of blend and split")
    split: str = key(
        "98,1,1",
        "shares of documents for training, validation and test",
        short="split",
        pattern=r"^\d+(\.\d+)?(,\d+(\.\d+)?){2}$",
    )
    validation_sets: dict[Name, Blend] = key(
        {},
        "further validation sets by name, each with its own loss; of corpora that are trained on, what is held out",
    )
    reset_position_ids: bool = key(False, "count positions anew after every end-of-text token", short="resetpos")
    reset_attention_mask: bool = key(False, "let no token see across an end-of-text token", short="resetmask")
    eod_mask_loss: bool = key(False, "leave out the loss of what follows an end-of-text token", short="eodmask")
    fim: Fim | None = key(None, "fill-in-the-middle; off")
    max_epochs: PositiveFloat = key(4.0, "warn where a corpus is read more often than this")
    num_workers: NonNegativeInt = key(2, "data loader processes per rank; on the CPU always 0")

    @model_validator(mode="after")
    def _one_blend(self) -> Data:
        if self.blend_per_split is not None and self.blend is not None:
            raise ValueError("blend and blend_per_split are both set: remove one")
        if self.blend_per_split is not None and "split" in self.model_fields_set:
            raise ValueError("split shares out the documents of blend: remove it, or blend_per_split")
        return self


class Training(Section):
    train_iters: Count | None = key(None, "number of steps (or an expression)", short="iters")
    train_tokens: Count | None = key(
        None, "number of tokens instead of steps (or an expression); rounded up to whole steps", short="tokens"
    )
    global_batch_size: Count = key(8, "sequences per step, over all ranks", short="gbs")
    micro_batch_size: Count = key(1, "sequences per rank and forward pass", short="mbs")
    seq_length: Count = key(2048, "tokens per sequence", short="seq")
    seed: Whole = key(1234, "seed of weights, dropout and data order", short="seed")
    precision: Precision = key("bf16_mixed", "fp32, or one of Bridge's mixed-precision recipes", short="precision")
    eval_interval: Count | None = key(None, "evaluate every so many steps; default: at the end only")
    eval_iters: Whole = key(1, "batches per evaluation; 0: never evaluate")

    @model_validator(mode="after")
    def _one_length(self) -> Training:
        if self.train_iters is not None and self.train_tokens is not None:
            raise ValueError("train_iters and train_tokens are both set: remove one")
        return self


class Optimizer(Section):
    name: Literal["adam", "sgd", "muon"] = key("adam", "optimizer", short="opt")
    lr: Positive = key(3e-4, "peak learning rate", short="lr")
    min_lr: NonNegative = key(0.0, "learning rate at the end of the decay", short="minlr")
    weight_decay: NonNegative = key(0.1, "weight decay", short="wd")
    beta1: Share = key(0.9, "Adam's first moment", short="beta1")
    beta2: Share = key(0.95, "Adam's second moment", short="beta2")
    eps: Positive = key(1e-8, "Adam's epsilon", short="eps")
    clip_grad: NonNegative = key(1.0, "largest gradient norm; 0: no clipping", short="clip")


class Schedule(Section):
    decay: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = key(
        "cosine", "how the learning rate falls", short="decay"
    )
    warmup_iters: Whole = key(0, "steps of linear warm-up (or an expression)", short="warmup")
    decay_iters: Count | None = key(None, "step at which the decay ends; default: the last", short="decayiters")
    wsd_decay_iters: Count | None = key(None, "length of WSD's final decay", short="wsd")


class Parallel(Section):
    tp: Count = key(1, "tensor parallel size", short="tp")
    pp: Count = key(1, "pipeline parallel size", short="pp")
    vpp: Count | None = key(None, "virtual pipeline stages per rank (interleaved schedule)", short="vpp")
    cp: Count = key(1, "context parallel size", short="cp")
    ep: Count = key(1, "expert parallel size", short="ep")
    etp: Count | None = key(None, "tensor parallel size inside experts; default: tp", short="etp")
    sp: bool = key(False, "sequence parallelism (with tp > 1)", short="sp")
    distributed_optimizer: bool = key(True, "shard the optimizer's state over data parallel ranks", short="distopt")
    fsdp: Literal["none", "megatron", "torch"] = key("none", "Megatron-FSDP or PyTorch's FSDP2", short="fsdp")
    fsdp_sharding: Literal["no_shard", "optim", "optim_grads", "optim_grads_params"] = key(
        "optim_grads_params", "what Megatron-FSDP shards", short="shard"
    )


class Checkpoint(Section):
    save_interval: Whole | None = key(None, "save every so many steps; 0: never; default: at the end only")
    keep_last: Count | None = key(None, "keep only the newest so many checkpoints; default: all")
    keep_every: Count | None = key(None, "beside them, keep every checkpoint whose step is a multiple of this")
    async_save: bool | None = key(
        None, "write checkpoints in the background; default: on GPUs that have nvidia-resiliency-ext, else not"
    )
    reshardable: bool = key(True, "save so that another layout can resume (dist_ckpt_optim_fully_reshardable)")
    verify: bool = key(True, "write down a checkpoint's checksums while training goes on, and compare before resuming")

    @model_validator(mode="after")
    def _beside_the_newest(self) -> Checkpoint:
        if self.keep_every is not None and self.keep_last is None:
            raise ValueError("keep_every needs keep_last: without it every checkpoint is kept")
        return self


class Load(Section):
    """What a run that goes on from another's checkpoint takes from it beside the weights."""

    optimizer: bool = key(True, "the optimizer's state; without it the schedule begins anew too", short="loadopt")
    rng: bool = key(True, "the states of the random numbers, where the layout is the same", short="loadrng")


TOOLS = ("none", "pytorch", "nsys", "viztracer", "memory")


def _tool(value: str) -> str:
    """One of those that are known, or a Python file."""
    if value not in TOOLS and not value.endswith(".py"):
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
        [2, 8], "first step, and the step before which capture ends; the first and the last are not analysed"
    )
    ranks: list[NonNegativeInt] = key([0], "ranks that are profiled, on whatever nodes they are", min_length=1)
    domains: list[str] = key(["cuda", "nvtx"], "what nsys traces (its `--trace`)", min_length=1)
    arguments: list[str] = key([], "further arguments of `nsys profile`, such as `--enable=efa_metrics`")

    @model_validator(mode="after")
    def _forward(self) -> Profile:
        if self.steps[0] >= self.steps[1]:
            raise ValueError(f"steps must go forward: {self.steps[0]} is not before {self.steps[1]}")
        return self


class Resources(Section):
    nodes: Count = key(1, "nodes of a run", short="nodes")
    gpus_per_node: Count = key(1, "ranks per node: one per GPU, or one process each on the CPU", short="gpus")
    cpus_per_rank: Count = key(1, "CPU cores per rank")
    mem_mb_per_rank: Count = key(4000, "host memory per rank")
    runtime: str = key(
        "4h", "wall time of one training job; a run that needs longer goes on by itself", pattern=r"^[1-9]\d*(m|h|d)?$"
    )
    peak_tflops: Positive | None = key(
        None,
        "TFLOP/s that a GPU can do at most, for the MFU; default: what its data sheet says for bf16, if it is known",
    )
    step_seconds: Positive | None = key(
        None, "expected seconds per step: the plan then shows how many jobs a run needs"
    )
    gpu: Annotated[str, StringConstraints(pattern=r"^[a-z]+\d+[a-z]*-\d+g$")] | None = key(
        None, "kind of GPU and its memory, such as `h100-80g`: runs that need more by prediction are refused"
    )
    partition: str | None = key(None, "SLURM partition of training jobs; default: the profile's")
    account: str | None = key(None, "SLURM account of training jobs; default: the profile's")
    slurm_extra: str = key("", "further options of sbatch for training jobs, such as `--exclusive`")


def _harmless[Values: Mapping[str, str | None]](values: Values, instead: str) -> Values:
    """Variables that may stand in a file."""
    for name, value in values.items():
        if value and (is_secret_name(name) or has_credentials(value)):
            raise ValueError(
                f"{name} sounds like a secret, which would be written to disk: remove it here, and export it in the "
                f"shell that calls Snakemake; {instead}"
            )
    return values


class Launch(Section):
    """How the ranks are started. Changes no loss, so that nothing is trained again when it changes."""

    starter: Literal["auto", "srun", "local"] = key(
        "auto", "what starts the ranks: srun, or this machine; auto: srun inside a SLURM job"
    )
    tasks: Literal["rank", "node"] = key(
        "rank", "a SLURM task per rank, or one per node that starts the node's ranks, as torchrun would"
    )
    srun: str = key("srun", "the command srun, where it is called otherwise")
    srun_args: list[str] = key([], "further arguments of srun, such as `--mpi=none`")
    cpu_bind: str | None = key(None, "srun's --cpu-bind, such as `cores`; default: the site's")
    python: str | None = key(None, "Python of the ranks; default: the one that runs Snakemake, in an image `python3`")
    network: Literal[networks.names()] | None = key(
        None, "preset of environment variables for the network between nodes"
    )
    environment: dict[str, str | None] = key({}, "environment variables of the ranks; null removes one of the preset")
    health_check: bool = key(False, "check every node before the ranks start, not only after a failure")

    @field_validator("environment")
    @classmethod
    def _without_secrets(cls, environment: dict[str, str | None]) -> dict[str, str | None]:
        return _harmless(environment, "the ranks inherit it")


class WandB(Section):
    project: str | None = key(None, "project; default: the experiment's name")
    entity: str | None = key(None, "team or user that the project belongs to; default: the account's own")


class MLflow(Section):
    experiment: str | None = key(None, "experiment there; default: this one's name")
    tracking_uri: str | None = key(None, "where it is tracked; default: MLFLOW_TRACKING_URI, or MLflow's own default")

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
    """Where the ranks log to beside their own files. Changes no loss. Keys and passwords come from the environment."""

    tensorboard: bool = key(True, "event files in the folder of every attempt")
    wandb: WandB | None = key(None, "Weights & Biases; off. `wandb: {}` takes all defaults")
    mlflow: MLflow | None = key(None, "MLflow; off. `mlflow: {}` takes all defaults")
    offline: bool = key(False, "send nothing: write what they log into the run's store")

    @model_validator(mode="after")
    def _one_place(self) -> Trackers:
        if self.offline and self.mlflow and self.mlflow.tracking_uri:
            raise ValueError("offline writes to the store, and mlflow.tracking_uri names another place: remove one")
        return self


def _full_commit(value: str) -> str:
    if not references.is_commit(value):
        raise ValueError(
            "is no commit: give its full hash of 40 digits (`git rev-parse` prints it), as branches and tags move"
        )
    return value


def _checked_mount(value: str) -> str:
    if problem := references.mount_problem(value):
        raise ValueError(problem)
    return value


def _address_of_repository(value: str) -> str:
    if has_credentials(value):
        raise ValueError("holds a password or token, which would be written to disk: leave that to git's credentials")
    if value.startswith("-"):
        raise ValueError("is an option of git, not a repository")
    return value


class BridgeSource(Section):
    """A checkout of Megatron-Bridge that takes the place of the image's own."""

    repo: Annotated[str, Field(min_length=1), AfterValidator(_address_of_repository)] = key(
        description="git repository of Megatron-Bridge: address or folder"
    )
    commit: Annotated[str, AfterValidator(_full_commit)] = key(
        description="full hash of the commit; part of a run's identity"
    )
    mount_as: Annotated[str, StringConstraints(pattern=r"^/[^:,\s]+$")] = key(
        "/opt/Megatron-Bridge", "where the checkout lies in the image"
    )


class Build(Section):
    file: str = key("containers/Dockerfile", "Dockerfile")
    context: str = key(".", "folder that its COPY lines start from")
    engine: Literal["auto", "docker", "podman", "buildah"] = key(
        "auto", "what builds it; auto: the first of these that works here"
    )
    args: dict[str, str] = key({}, "build arguments; they go before those of containers/versions.toml")

    @field_validator("args")
    @classmethod
    def _without_secrets(cls, args: dict[str, str]) -> dict[str, str]:
        return _harmless(args, "a Dockerfile takes secrets by `RUN --mount=type=secret`")


class Image(Section):
    """What the ranks run in. Without a runtime that is the Python that runs Snakemake."""

    runtime: Literal["none", "pyxis", "apptainer"] = key(
        "none", "what starts the ranks inside an image: pyxis (srun's plugin), apptainer, or nothing"
    )
    path: str | None = key(None, "an image that is there: .sqsh, .sif, or a registry's `name@sha256:...`")
    build: Build | None = key(None, "an image that is built from a Dockerfile")
    mounts: list[Annotated[str, AfterValidator(_checked_mount)]] | None = key(
        None, "`source:target` or `source:target:ro`, beside clone, results and store, which are always there"
    )
    secrets: list[Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]] = key(
        ["HF_TOKEN", "WANDB_API_KEY"], "environment variables that are passed on by name; their values stand nowhere"
    )
    bridge_source: BridgeSource | None = key(None, "Megatron-Bridge from a commit, mounted over the image's own")
    architecture: Literal["x86_64", "aarch64", "ppc64le", "riscv64"] | None = key(
        None, "machine that the image must be for: that of the nodes; default: this one"
    )

    @model_validator(mode="after")
    def _fits_the_runtime(self) -> Image:
        given = [
            name
            for name in ("path", "build", "mounts", "bridge_source", "architecture")
            if getattr(self, name) is not None
        ]
        if self.runtime == "none" and given:
            raise ValueError(f"{given[0]} needs an image: set runtime to pyxis or apptainer, or remove {given[0]}")
        if self.path is not None and self.build is not None:
            raise ValueError("path and build are both set: remove one")
        if self.runtime == "apptainer" and self.path is None and self.build is None:
            raise ValueError("runtime: apptainer needs an image: set path or build")
        return self


class LossSpike(Section):
    factor: Annotated[float, Field(gt=1)] = key(2.0, "a loss so many times the median before it is a spike")
    window: Annotated[int, Field(gt=1)] = key(50, "steps over which the median is taken")
    patience: PositiveInt = key(5, "steps in a row that must lie above")
    limit: PositiveInt = key(3, "spikes skipped in one run; one more stops it")


class Recovery(Section):
    """What is done when ranks fail. Changes no loss, except `loss_spike`: ledger and report say so."""

    budget: NonNegativeInt = key(5, "failures in a row without a new checkpoint after which a run stops")
    backoff_seconds: NonNegative = key(
        10.0, "pause before ranks are started again; doubled with every failure in a row"
    )
    no_progress_minutes: PositiveFloat = key(30.0, "no new step for so long: stacks are written, ranks started again")
    start_minutes: PositiveFloat = key(60.0, "the same before the first step: ranks load, compile and connect")
    stop_seconds: NonNegative = key(60.0, "time that ranks are given to save and end when they are asked to")
    exclude_hours: NonNegative = key(24.0, "how long a run avoids a node that failed under it")
    actions: dict[Cause, Literal[ACTIONS]] = key(
        {}, "what to do instead of the default, by cause (docs/recovery.md lists them)"
    )
    loss_spike: LossSpike | None = key(None, "go back to the checkpoint before a spike and leave out its batches; off")
    notify: str | None = key(
        None, "shell command called at the end or final failure of a run, with MEGABOA_* variables"
    )


class Budget(Section):
    """What the plan may cost by estimate; more stops it before anything is submitted."""

    gpu_hours: PositiveFloat | None = key(None, "GPU-hours of all runs together; default: as many as it takes")
    disk: Annotated[str, StringConstraints(pattern=r"^\d+(\.\d+)?[MGTP]$")] | None = key(
        None, "room for all runs' checkpoints and exports, such as `500G` or `2T`"
    )
    mfu: Annotated[float, Field(gt=0, le=1)] = key(
        0.35, "share of its GPUs' peak that a run is assumed to reach where no earlier one was measured"
    )


class Export(Section):
    runs: Runs = key([], "names or glob patterns of the runs to export to Hugging Face format, or `all`")
    checkpoint: Literal["final", "best"] | PositiveInt = key(
        "final", "the last checkpoint, the one with the lowest validation loss, or an iteration that was kept"
    )
    file_gb: PositiveFloat = key(5.0, "size of the weights' files: a larger model has several")
    license: str | None = key(None, "licence named in the model card, such as `apache-2.0`")
    push: dict[Name, str] = key({}, "where `snakemake push` sends an exported run: run to `owner/name`")
    private: bool = key(True, "whether a repository that `snakemake push` makes is private")


class Generate(Section):
    prompts: list[Annotated[str, Field(min_length=1)]] = key(
        ["import"], "what `snakemake generate` gives to the trained checkpoint and to its export", min_length=1
    )
    tokens: PositiveInt = key(32, "tokens generated for each of them; the likeliest every time")


class Evaluate(Section):
    """A command of the user's, called for the exported model of each run (docs/evaluation.md)."""

    command: str | None = key(
        None,
        "shell command that reads the folder {model} and writes JSON to {out}: a file, or a folder with one JSON file",
    )
    runs: Runs = key(["*"], "which of the exported runs are evaluated")
    runtime: PositiveInt = key(120, "wall time of its job, in minutes")
    slurm_extra: str = key("", "further options of sbatch for its job, such as `--gpus-per-node=4`")

    @field_validator("command")
    @classmethod
    def _placeholders(cls, command: str | None) -> str | None:
        if missing := [name for name in ("{model}", "{out}") if command is not None and name not in command]:
            raise ValueError(f"lacks {' and '.join(missing)}, which stand for the model's folder and the JSON to write")
        return command


class Agreement(Section):
    """Runs whose losses must agree at every step: a check in the report."""

    reference: Name = key(description="run that the others are compared with")
    runs: list[str] = key(description="names or glob patterns of the runs that must agree with it")
    tolerance: PositiveFloat = key(1e-5, "largest allowed absolute difference of the loss at any step")


Scalar = bool | int | float | str
Column = Annotated[str, Field(min_length=1)]


class Figure(Section):
    """One figure of the report: which columns of which table it shows, and how (docs/report.md)."""

    name: Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_-]*$", max_length=60)] = key(
        description="name of its files; that of a figure of the report's own replaces it"
    )
    kind: Literal["line", "bar", "box", "scatter", "heat"] = key(description="how it is drawn")
    data: Literal["runs", "steps", "validation", "time"] = key("runs", "table of which every row is an observation")
    x: Column = key(description="column along the axis; of bars and boxes, the one that each stands for")
    y: Column = key(description="column that is measured; of a heat map, the other axis")
    value: Column | None = key(None, "column that a heat map's colours show")
    hue: Column | None = key(None, "column that the colours tell apart; default: the runs or, of many, the models")
    facet: Column | None = key(None, "column of which every value has axes of its own")
    over: Column | None = key(
        None, "column, such as training.seed, over which the mean is drawn, with its 95% interval"
    )
    filter: dict[str, Scalar | list[Scalar]] = key({}, "values, by column, that rows must have to be shown")
    log: list[Literal["x", "y"]] = key([], "axes that are logarithmic")
    diagonal: bool = key(False, "draw the line on which x and y are equal, in a scatter plot")
    x_label: str | None = key(None, "text of the axis; default: that of the column")
    y_label: str | None = key(None, "text of the axis; default: that of the column")
    caption: str = key("", "text below the figure")

    @model_validator(mode="after")
    def _fitting(self) -> Figure:
        if (self.kind == "heat") != (self.value is not None):
            raise ValueError("value is what a heat map's colours show: give it to a heat map, and to nothing else")
        if self.over is not None and self.kind != "line":
            raise ValueError("over belongs to lines: remove it, or draw a line")
        if self.diagonal and self.kind != "scatter":
            raise ValueError("diagonal belongs to scatter plots: remove it")
        return self


class Report(Section):
    title: str | None = key(None, "heading of the report; default: the experiment's name")
    question: str | None = key(None, "what the experiment is to answer: shown below the heading")
    agreements: list[Agreement] = key([], "groups of runs whose losses must agree")
    figures: list[Figure] = key([], "further figures, each a specification")
    compare_to: str | None = key(
        None, "published table to lay beside what is measured: its name in config/published, or the path of such a file"
    )


class Sweep(Section):
    """Every block given multiplies the number of runs. A value may stand for any key of the file, dotted."""

    grid: dict[str, Axis] = key({}, "axes of which every combination is run", min_length=1)
    zip: dict[str, Axis] = key({}, "axes of equal length that advance together", min_length=1)
    runs: dict[Name, dict[str, Any]] = key({}, "named runs: for each its own values, by dotted key", min_length=1)
    skip_illegal: bool = key(
        False, "leave out runs that could never work, and list them as INVALID; else they stop the plan"
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
        "go on from another run's checkpoint: `<experiment>/<run>@<step>`; without `@<step>` from its last",
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
