"""What a run is given, how its ranks are started, what is done when they fail, and what all may cost."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, StringConstraints, field_validator

from megaboa.causes import ACTIONS, Cause
from megaboa.config.models.section import Count, NonNegative, Positive, Section, harmless, key
from megaboa.launch import networks


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
    timeout_minutes: PositiveInt | None = key(
        None, "how long a rank waits for the others before it gives up; default: Bridge's 10 minutes, or the recipe's"
    )
    health_check: bool = key(False, "check every node before the ranks start, not only after a failure")
    health_check_seconds: Positive = key(
        90.0, "how long nodes may take to start that check; three times what half of them took, where that is longer"
    )

    @field_validator("environment")
    @classmethod
    def _without_secrets(cls, environment: dict[str, str | None]) -> dict[str, str | None]:
        return harmless(environment, "the ranks inherit it")


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
    lead_minutes: Positive | None = key(
        None,
        "how long before the end of the wall time ranks are asked to save; default: by the saves that were measured",
    )
    exclude_hours: NonNegative = key(24.0, "how long a run avoids a node that failed under it")
    actions: dict[Cause, Literal[ACTIONS]] = key(
        {}, "what to do instead of the default, by cause (docs/explanation/recovery.md lists them)"
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
    mfu: Annotated[float, Field(gt=0, le=1)] | None = key(
        None,
        "share of its GPUs' peak that a run is assumed to reach where no earlier one was measured; "
        "default: by its layout (docs/how-to/layouts.md)",
    )
