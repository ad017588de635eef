"""A run: where and how it runs, and its results."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from megaboa import files
from megaboa.causes import Action, Cause
from megaboa.records.base import IF_SET, Range, Record, Tree, plain
from megaboa.records.images import BridgeSource

SECTIONS = ("training", "optimizer", "schedule", "parallel")  # of an experiment; each is a field of RunSpec
ADAPTERS = ("lora", "dora")  # tasks that train adapters
NO_TEMPLATE = "none"  # `tuning.template`: examples without a chat template


@dataclass(frozen=True, kw_only=True)
class PassMarks(Record):
    """What a node must reach in the health check to pass."""

    tflops: float | None = None
    sm_mhz: float | None = field(default=None, metadata=IF_SET)
    memory_gb_per_second: float | None = field(default=None, metadata=IF_SET)
    host_gb_per_second: float | None = field(default=None, metadata=IF_SET)
    node_gb_per_second: float | None = None
    node_all_to_all_gb_per_second: float | None = field(default=None, metadata=IF_SET)
    nodes_gb_per_second: float | None = None
    nodes_all_to_all_gb_per_second: float | None = field(default=None, metadata=IF_SET)


@dataclass(frozen=True, kw_only=True)
class Start(Record):
    """How ranks are started."""

    starter: Literal["auto", "srun", "local"]
    tasks: Literal["rank", "node"] | None
    srun: str
    srun_args: tuple[str, ...]
    cpu_bind: str | None
    python: str | None
    network: str | None
    network_check: bool = True
    environment: dict[str, str | None]
    ports: str | None = field(default=None, metadata=IF_SET)
    timeout_minutes: int | None = None
    health_check: bool
    health_check_seconds: float = 90.0
    pass_marks: PassMarks | None = field(default=None, metadata=IF_SET)
    gpu_sampling_seconds: float = 5.0


@dataclass(frozen=True, kw_only=True)
class Inside(Record):
    """How ranks are started in the image that image.json names."""

    runtime: str
    mounts: tuple[str, ...]
    secrets: tuple[str, ...]  # names of variables
    variables: dict[str, str] = field(default_factory=dict)
    workdir: str


@dataclass(frozen=True, kw_only=True)
class LossSpike(Record):
    factor: float
    window: int
    patience: int
    limit: int


@dataclass(frozen=True, kw_only=True)
class StragglerSettings(Record):
    measure: bool
    factor: float
    saves: int
    replace: bool


@dataclass(frozen=True, kw_only=True)
class Recovery(Record):
    """What to do when ranks fail."""

    budget: int
    backoff_seconds: float
    no_progress_minutes: float
    start_minutes: float
    stop_seconds: float
    lead_minutes: float | None = None
    exclude_hours: float
    node_memory_days: float = field(default=7.0, metadata=IF_SET)
    actions: dict[Cause, Action]
    loss_spike: LossSpike | None
    stragglers: StragglerSettings | None = field(default=None, metadata=IF_SET)
    notify: str | None


@dataclass(frozen=True, kw_only=True)
class LaunchSpec(Record):
    """launch.json: where and how a run is executed; nothing in it can change a loss."""

    nodes: int = 1
    spare_nodes: int = field(default=0, metadata=IF_SET)
    gpus_per_node: int = 1
    cpus_per_rank: int = 1
    mem_mb_per_rank: int | None = None
    runtime: str = "4h"
    peak_tflops: float | None = None
    step_seconds: float | None = None
    gpu: str | None = None
    partition: str | None = None
    account: str | None = None
    constraint: str | None = field(default=None, metadata=IF_SET)
    qos: str | None = field(default=None, metadata=IF_SET)
    slurm_extra: str = ""
    start: Start | None = None
    image: Inside | None = None
    recovery: Recovery | None = None
    trackers: Tree = field(default_factory=dict)
    checkpoint: Tree = field(default_factory=dict)  # by our keys; for a recipe only those that are set
    store: str | None = None
    num_workers: int | None = field(default=None, metadata=IF_SET)
    overrides: Tree = field(default_factory=dict)  # Bridge's fields that can't change a loss
    index: str | None = None  # name of the index of the run's data
    routing: bool = field(default=False, metadata=IF_SET)  # whether ranks record which experts their tokens go to
    samples: bool = field(default=False, metadata=IF_SET)  # whether ranks record which samples each step reads
    continues: bool = field(default=False, metadata=IF_SET)  # whether continue_from is `itself`


@dataclass(frozen=True, kw_only=True)
class ProfileSpec(Record):
    """profile.json: what is profiled, and by which tool."""

    tool: str
    steps: Range = (2, 8)
    ranks: tuple[int, ...] = (0,)
    domains: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    tool_code: str | None = field(default=None, metadata=IF_SET)  # digest of a profiler that is the user's own code


@dataclass(frozen=True, kw_only=True)
class Trace(ProfileSpec):
    """trace.json: what was captured, and where the files are."""

    run: str | None = None
    path: str
    step_log: str | None = None
    traces: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Load(Record):
    """What a run loads from its parent's checkpoint in addition to the weights."""

    optimizer: bool
    rng: bool


@dataclass(frozen=True, kw_only=True)
class Parent(Record):
    """The checkpoint of another run that a run starts from.

    `identity`: in train.json the other run's; in run.json only that of an earlier version, which has been continued in
    place since. `held_out`: by corpus the split with which that run, or one of its own parents, kept documents out of
    its training; of the corpora that are validation sets here and no longer trained on.
    """

    experiment: str
    run: str
    iteration: int
    load: Load
    identity: str | None = field(default=None, metadata=IF_SET)
    weights_only: bool = field(default=False, metadata=IF_SET)  # for another task, whose steps count from 0
    held_out: dict[str, str] = field(default_factory=dict, metadata=IF_SET)

    @property
    def steps_done(self) -> int:
        """The number of steps that a run starting from this checkpoint counts as done."""
        return 0 if self.weights_only else self.iteration

    def steps(self, last: int | None) -> str:
        """The steps of a run that starts here: `steps 21 to 40, after mine/base@20`. `last`: None if it isn't known."""
        if self.weights_only:
            return f"from the weights of {self}"
        first = self.iteration + 1
        return f"{f'steps {first} to {last}' if last else f'from step {first}'}, after {self}"

    def is_same_checkpoint(self, other: Parent) -> bool:
        return (str(self), self.identity) == (str(other), other.identity)

    def __str__(self) -> str:
        return f"{self.experiment}/{self.run}@{self.iteration}"


Task = Literal["pretrain", "sft", "lora", "dora"]


@dataclass(frozen=True, kw_only=True)
class RunSpec(Record):
    """run.json: everything that can change a run's losses, and nothing else.

    Sections have the user's keys and values; for a recipe only the keys that are set. A run's identity is a digest of
    this file's text (`RunFolder.document`), never of this record.
    """

    model: Tree = field(default_factory=dict)  # its name, init and tokenizer; config, or hf and revision; recipe
    data: Tree = field(default_factory=dict)
    training: Tree = field(default_factory=dict)
    optimizer: Tree = field(default_factory=dict)
    schedule: Tree = field(default_factory=dict)
    parallel: Tree = field(default_factory=dict)
    world_size: int = 1
    device: str = "cuda"
    overrides: Tree = field(default_factory=dict)  # Bridge's fields
    bridge_source: BridgeSource | None = field(default=None, metadata=IF_SET)
    parent: Parent | None = field(default=None, metadata=IF_SET)
    task: Task = field(default="pretrain", metadata=IF_SET)
    tuning: Tree = field(default_factory=dict, metadata=IF_SET)  # of other tasks; includes the template's text

    @property
    def steps_before(self) -> int:
        """Steps of the parent, after which the run begins; 0 if it has none."""
        return self.parent.steps_done if self.parent else 0

    @property
    def held_out(self) -> dict[str, str]:
        """The splits that decide which documents of corpora its parents have not trained on."""
        return self.parent.held_out if self.parent else {}

    @property
    def is_tuned(self) -> bool:
        """Whether the run is fine-tuned on examples."""
        return self.task != "pretrain"

    @property
    def is_of_chats(self) -> bool:
        """Whether examples become text by a chat template, the run's or the tokenizer's own."""
        return self.is_tuned and self.tuning["template"] != NO_TEMPLATE

    @property
    def has_template_of_model(self) -> bool:
        """Whether examples become text by the chat template in the model's folder."""
        return self.is_tuned and self.has_source and self.tuning.get("template") is None

    @property
    def has_adapters(self) -> bool:
        """Whether only adapters are trained and saved, while the model itself is frozen."""
        return self.task in ADAPTERS

    @property
    def chat_template(self) -> str | None:
        """The text of the run's chat template; None if it has no template, or uses the tokenizer's own."""
        template = self.tuning.get("template")
        return None if template == NO_TEMPLATE else template

    @property
    def own_recipe(self) -> str | None:
        """The user's recipe file; None for recipes of Bridge."""
        recipe = self.model.get("recipe")
        return recipe if recipe and files.is_python(recipe) else None

    @property
    def is_recipe(self) -> bool:
        """Whether model and settings come from a recipe of Bridge, or from the user's own file."""
        return bool(self.model.get("recipe"))

    @property
    def has_source(self) -> bool:
        """Whether the model has a Hugging Face folder: a given one, or one made from an inline config."""
        return not self.is_recipe or any(self.model.get(key) is not None for key in ("hf", "config"))

    @property
    def is_pretrained(self) -> bool:
        """Whether training starts from the weights of a Hugging Face folder."""
        return self.has_source and self.model.get("init") == "pretrained"


@dataclass(frozen=True, kw_only=True)
class Identity(Record):
    """identity.json of a run's store: run.json, and digests of everything that the run reads."""

    run: Tree
    parent: str | None = field(default=None, metadata=IF_SET)
    image: str | None = field(default=None, metadata=IF_SET)
    model: str | None = None
    tokenizer: str | None = None
    # Of a fine-tuned run that has no template of its own. None in those that began before it counted, too.
    chat_template: str | None = field(default=None, metadata=IF_SET)
    corpora: dict[str, str] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        return files.digest(plain(self))


@dataclass(frozen=True, kw_only=True)
class Kept(Record):
    """A complete checkpoint of a trained run."""

    iteration: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class TrainRecord(Record):
    """train.json: a run that trained to its last step."""

    run: str
    identity: str  # digest of the run's identity
    store: str
    train_iters: int
    iteration: int
    checkpoint: str | None = None  # None if the run saves nothing
    checkpoints: tuple[Kept, ...] = ()
    bytes: int = 0  # of all checkpoints
    parent: Parent | None = None
    world_size: int
    skipped: tuple[Range, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Refusal(Record):
    """A run that preflight refused; `identity`: digest of its run.json."""

    identity: str
    reasons: tuple[str, ...]
    image: tuple[str, ...] | None = None  # digests of the image's specification and file; None: not refused in an image


@dataclass(frozen=True, kw_only=True)
class Refusals(Record):
    """refused.json: refused runs by name, under these packages."""

    packages: str
    runs: dict[str, Refusal]
