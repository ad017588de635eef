"""Where a run runs: what it is given, how its ranks are started and in which image, what is done when they fail, and
what all may cost."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    StringConstraints,
    field_validator,
    model_validator,
)

from megaboa import peaks
from megaboa.causes import ACTIONS, Cause
from megaboa.config.models.section import Count, NonNegative, Positive, Section, Whole, harmless, key
from megaboa.image import references
from megaboa.launch import networks
from megaboa.scheduler.registry import cluster
from megaboa.secrets import has_credentials


def _free_options(value: str) -> str:
    if problem := cluster().options_problem(value):
        raise ValueError(problem)
    return value


SchedulerOptions = Annotated[str, AfterValidator(_free_options)]


class Resources(Section):
    nodes: Count = key(1, "nodes of a run", short="nodes")
    spare_nodes: Whole = key(
        0, "extra nodes of a run's job: when a node fails, its ranks restart on a spare, without queueing"
    )
    gpus_per_node: Count = key(1, "ranks per node: one per GPU, or one process each on the CPU", short="gpus")
    cpus_per_rank: Count = key(1, "CPU cores per rank")
    mem_mb_per_rank: Count = key(4000, "host memory per rank")
    runtime: str = key(
        "4h", "wall time of one training job; a longer run continues automatically", pattern=r"^[1-9]\d*(m|h|d)?$"
    )
    peak_tflops: Positive | None = key(
        None,
        "peak TFLOP/s of a GPU, for the MFU; default: its data sheet's for bf16, if known",
    )
    step_seconds: Positive | None = key(
        None, "expected seconds per step, in place of the prediction: from them the plan says how many jobs a run needs"
    )
    gpu: Annotated[str, StringConstraints(pattern=peaks.NAME)] | None = key(
        None, "GPU type and memory, such as `h100-80g`; runs predicted to need more are refused"
    )
    partition: str | None = key(None, "SLURM partition of training jobs; default: the profile's")
    account: str | None = key(None, "SLURM account of training jobs; default: the profile's")
    constraint: str | None = key(None, "features of the nodes of training jobs, such as `h100`: sbatch's --constraint")
    qos: str | None = key(None, "SLURM quality of service of training jobs; default: the account's")
    slurm_extra: SchedulerOptions = key("", "further options of sbatch for training jobs, such as `--exclusive`")


def _checked_ports(value: str) -> str:
    first, _, last = value.partition("-")
    if not (first.isdigit() and last.isdigit() and 1024 <= int(first) <= int(last) <= 65535):
        raise ValueError(
            f"{value!r} is not a range of ports from 1024 to 65535: write the first and the last, `29500-29600`"
        )
    return value


class PassMarks(Section):
    """What `check_node.py` measures on a good node of the site, less what you allow for."""

    tflops: PositiveFloat | None = key(None, "TFLOP/s that every GPU must reach in the product of matrices")
    sm_mhz: PositiveFloat | None = key(None, "MHz that every GPU's clock must reach meanwhile")
    memory_gb_per_second: PositiveFloat | None = key(None, "GB/s read and written by a copy in every GPU's memory")
    host_gb_per_second: PositiveFloat | None = key(None, "GB/s between every GPU and the host's memory, both ways")
    node_gb_per_second: PositiveFloat | None = key(None, "GB/s of the all-reduce over a node's GPUs")
    node_all_to_all_gb_per_second: PositiveFloat | None = key(None, "GB/s of the all-to-all over a node's GPUs")
    nodes_gb_per_second: PositiveFloat | None = key(
        None, "GB/s of the all-reduce over all nodes; slower ones are reported, but no node is blamed"
    )
    nodes_all_to_all_gb_per_second: PositiveFloat | None = key(None, "the same for the all-to-all, of at most 256 GPUs")


class Launch(Section):
    """How the ranks are started. Changes no loss, so that nothing is trained again when it changes."""

    starter: Literal["auto", "srun", "local"] = key(
        "auto", "start ranks by srun, or on this machine; auto: srun inside a SLURM job"
    )
    tasks: Literal["rank", "node"] | None = key(
        None,
        "a SLURM task per rank, or one per node that starts the node's ranks, as torchrun would; default: `node` on "
        "GPUs, `rank` on the CPU and where `cpu_bind` or `srun_args` say what each task gets (`map_cpu:0,8`, "
        "`--gpus-per-task=1`)",
    )
    srun: str = key("srun", "the site's command for srun")
    srun_args: list[str] = key([], "further arguments of srun, such as `--mpi=none`")
    cpu_bind: str | None = key(
        None,
        "srun's --cpu-bind, such as `cores`; default: the site's. With `tasks: node` each rank is bound to a share of "
        "the task's processors, near its GPU, unless this is `none`",
    )
    python: str | None = key(None, "Python of the ranks; default: the one that runs Snakemake, in an image `python3`")
    network: Literal[networks.names()] | None = key(
        None, "preset of environment variables for the network between nodes"
    )
    network_check: bool = key(
        True, "end a run on several nodes before its first step if NCCL takes another network than the preset's"
    )
    environment: dict[str, str | None] = key({}, "environment variables of the ranks; null removes one of the preset")
    ports: Annotated[str, AfterValidator(_checked_ports)] | None = key(
        None, "range of ports for rank 0 (MASTER_PORT), such as `29500-29600`; default: any free port"
    )
    timeout_minutes: PositiveInt | None = key(
        None, "time-out of a rank that waits for the others; default: Bridge's 10 minutes, or the recipe's"
    )
    health_check: bool = key(False, "check every node before the ranks start, not only after a failure")
    health_check_seconds: Positive = key(
        90.0, "time for nodes to start that check; at least three times what half of them took"
    )
    pass_marks: PassMarks | None = key(
        None, "what nodes must reach in that check; a node far below the others never passes"
    )
    gpu_sampling_seconds: NonNegative = key(
        5.0, "time between samples of each node's GPUs (power, clocks, temperature, errors); 0: no samples"
    )

    @field_validator("environment")
    @classmethod
    def _without_secrets(cls, environment: dict[str, str | None]) -> dict[str, str | None]:
        return harmless(environment, "the ranks inherit it")


def _full_commit(value: str) -> str:
    if not references.is_commit(value):
        raise ValueError(
            "is not a commit: give the full hash of 40 digits (`git rev-parse` prints it); branches and tags move"
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
        "/opt/Megatron-Bridge", "path of the checkout in the image"
    )


class Build(Section):
    file: str = key("containers/Dockerfile", "Dockerfile")
    context: str = key(".", "folder that its COPY lines start from")
    engine: Literal["auto", "docker", "podman", "buildah"] = key(
        "auto", "tool that builds it; auto: the first of these that works here"
    )
    args: dict[str, str] = key({}, "build arguments; they override those of containers/versions.toml")

    @field_validator("args")
    @classmethod
    def _without_secrets(cls, args: dict[str, str]) -> dict[str, str]:
        return harmless(args, "a Dockerfile takes secrets by `RUN --mount=type=secret`")


class Image(Section):
    """What the ranks run in. Without a runtime that is the Python that runs Snakemake."""

    runtime: Literal["none", "pyxis", "apptainer"] = key(
        "none", "container runtime of the ranks: pyxis (srun's plugin), apptainer, or none"
    )
    path: str | None = key(None, "an existing image: .sqsh, .sif, or a registry's `name@sha256:...`")
    build: Build | None = key(None, "an image that is built from a Dockerfile")
    mounts: list[Annotated[str, AfterValidator(_checked_mount)]] | None = key(
        None, "`source:target` or `source:target:ro`, in addition to clone, results and store"
    )
    secrets: list[Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]] = key(
        ["HF_TOKEN", "WANDB_API_KEY"], "environment variables passed by name; their values are never written to a file"
    )
    bridge_source: BridgeSource | None = key(None, "Megatron-Bridge from a commit, mounted over the image's own")
    architecture: Literal["x86_64", "aarch64", "ppc64le", "riscv64"] | None = key(
        None, "CPU architecture of the nodes, which the image must match; default: this machine's"
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
    factor: Annotated[float, Field(gt=1)] = key(2.0, "a loss above this multiple of the preceding median is a spike")
    window: Annotated[int, Field(gt=1)] = key(50, "number of steps for the median")
    patience: PositiveInt = key(5, "number of consecutive steps that must be above")
    limit: PositiveInt = key(3, "spikes skipped per run; one more stops it")


class StragglerSettings(Section):
    measure: bool = key(
        True, "let every rank time a fixed product of matrices after each save, where there are several"
    )
    factor: Annotated[float, Field(gt=1)] = key(1.5, "a rank is slow if it takes this many times as long as the others")
    saves: PositiveInt = key(3, "number of consecutive saves at which it must be slow to be reported")
    replace: bool = key(
        False, "restart from that save without its node: on a spare if there is one, else through the queue"
    )


class Recovery(Section):
    """What is done when ranks fail. Changes no loss, except `loss_spike`: ledger and report say so."""

    budget: NonNegativeInt = key(5, "failures in a row without a new checkpoint after which a run stops")
    backoff_seconds: NonNegative = key(
        20.0, "pause before ranks restart after a second failure in a row; doubled with every further one"
    )
    no_progress_minutes: PositiveFloat = key(
        30.0, "after this time without a new step, write stacks and restart the ranks"
    )
    start_minutes: PositiveFloat = key(60.0, "the same before the first step, while ranks load, compile and connect")
    stop_seconds: NonNegative = key(60.0, "time for ranks to save and end when asked to stop")
    lead_minutes: Positive | None = key(
        None,
        "how long before the end of the wall time ranks save; default: from measured saves",
    )
    exclude_hours: NonNegative = key(24.0, "how long a run avoids a node that failed under it")
    node_memory_days: NonNegative = key(
        7.0,
        "half-life of failures in the store's memory of nodes, by which nodes that keep failing are avoided; 0: off",
    )
    actions: dict[Cause, Literal[ACTIONS]] = key(
        {}, "action instead of the default, by cause (listed in docs/explanation/recovery.md)"
    )
    loss_spike: LossSpike | None = key(None, "return to the checkpoint before a spike and skip its batches; off")
    stragglers: StragglerSettings = key(StragglerSettings(), "ranks that calculate slower than the others")
    notify: str | None = key(
        None, "shell command called at the end or final failure of a run, with MEGABOA_* variables"
    )


class Budget(Section):
    """What the plan may cost by estimate; more stops it before anything is submitted."""

    gpu_hours: PositiveFloat | None = key(
        None, "limit on the GPU-hours of all runs together, or of the job of `snakemake tune`; default: none"
    )
    disk: Annotated[str, StringConstraints(pattern=r"^\d+(\.\d+)?[MGTP]$")] | None = key(
        None, "limit on the disk space of all runs' checkpoints and exports, such as `500G` or `2T`"
    )
    mfu: Annotated[float, Field(gt=0, le=1)] | None = key(
        None,
        "assumed share of the GPUs' peak for runs without an earlier measurement; "
        "default: the step time is predicted (docs/explanation/speed.md)",
    )
