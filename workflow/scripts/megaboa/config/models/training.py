"""How a run is trained: length, batch, optimizer, layout, checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, create_model, model_validator

from megaboa.config.models.section import Count, NonNegative, Positive, Section, Share, Whole, key
from megaboa.layout import AXES, NAMES

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


class Training(Section):
    train_iters: Count | None = key(None, "number of steps (or an expression)", short="iters")
    train_tokens: Count | None = key(
        None, "number of tokens instead of steps (or an expression); rounded up to whole steps", short="tokens"
    )
    global_batch_size: Count = key(8, "sequences per step, over all ranks", short="gbs")
    micro_batch_size: Count = key(1, "sequences per rank and forward pass", short="mbs")
    seq_length: Count = key(2048, "tokens per sequence", short="seq")
    seed: Whole = key(1234, "seed of weights, dropout and data order", short="seed")
    nudge: Whole = key(
        0,
        "move every initial weight by at most one unit in the last place: the number of the noise; 0: none. `twins` of "
        "an agreement sets it",
        short="nudge",
    )
    precision: Precision = key("bf16_mixed", "fp32, or one of Bridge's mixed-precision recipes", short="precision")
    eval_interval: Count | None = key(None, "evaluate every N steps; default: at the end only")
    eval_iters: Whole = key(1, "batches per evaluation; 0: never evaluate")

    @model_validator(mode="after")
    def _one_length(self) -> Training:
        if self.train_iters is not None and self.train_tokens is not None:
            raise ValueError("train_iters and train_tokens are both set: remove one")
        return self


class Optimizer(Section):
    name: Literal["adam", "sgd", "muon"] = key(
        "adam",
        "optimizer; `muon`: Muon for the matrices of layers, Adam for embeddings, output layer, norms and biases, with "
        "`parallel.distributed_optimizer: false`. At the same `lr` its steps are several times Adam's: "
        "`overrides: {optimizer.muon_extra_scale_factor: 0.2}` is for Adam's rates",
        short="opt",
    )
    lr: Positive = key(3e-4, "peak learning rate", short="lr")
    min_lr: NonNegative = key(0.0, "learning rate at the end of the decay", short="minlr")
    weight_decay: NonNegative = key(0.1, "weight decay", short="wd")
    beta1: Share = key(0.9, "Adam's first moment", short="beta1")
    beta2: Share = key(0.95, "Adam's second moment", short="beta2")
    eps: Positive = key(1e-8, "Adam's epsilon", short="eps")
    clip_grad: NonNegative = key(1.0, "largest gradient norm; 0: no clipping", short="clip")


class Schedule(Section):
    decay: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = key(
        "cosine",
        "shape of the learning rate decay; `WSD`: constant from the end of warm-up to the last `wsd_decay_iters` steps",
        short="decay",
    )
    warmup_iters: Whole = key(0, "steps of linear warm-up (or an expression)", short="warmup")
    decay_iters: Count | None = key(None, "step at which the decay ends; default: the last", short="decayiters")
    wsd_decay_iters: Count | None = key(
        None,
        "steps of WSD's final decay (or an expression); null: all of the run. After a share t of them the rate is lr - "
        "(lr - min_lr) * sqrt(t); `overrides: {scheduler.lr_wsd_decay_style: linear}` (`cosine`, `exponential`) has "
        "another shape",
        short="wsd",
    )


_SIZES: dict[str, Any] = {
    axis.name: (Count if axis.default else Count | None, key(axis.default, axis.text, short=axis.name)) for axis in AXES
}


class Parallel(create_model("Sizes", __base__=Section, **_SIZES)):  # type: ignore[misc]
    sp: bool = key(False, "sequence parallelism (with tp > 1)", short="sp")
    distributed_optimizer: bool = key(True, "shard the optimizer's state over data parallel ranks", short="distopt")
    fsdp: Literal["none", "megatron", "torch"] = key("none", "Megatron-FSDP or PyTorch's FSDP2", short="fsdp")
    fsdp_sharding: Literal["no_shard", "optim", "optim_grads", "optim_grads_params"] = key(
        "optim_grads_params", "what Megatron-FSDP shards", short="shard"
    )
    overlap_grad_reduce: bool | None = key(
        None,
        "reduce gradients during the backward pass; default: Bridge's (true) on GPUs, false on the CPU",
        short="gradoverlap",
    )
    overlap_param_gather: bool | None = key(
        None,
        "gather updated weights during the forward pass; default: as overlap_grad_reduce, if the optimizer is "
        "distributed",
        short="gatheroverlap",
    )


def _absolute(folder: str) -> str:
    if not Path(folder).is_absolute():
        raise ValueError(f"{folder!r} is not an absolute path: nodes have no common working folder")
    return folder


class LocalCopies(Section):
    every: Count = key(description="copy the state every N steps")
    folder: Annotated[str, AfterValidator(_absolute)] = key(
        "/tmp", "an existing folder of every node, best on its own fast disk or in its memory (`/dev/shm`)"
    )
    partner: bool | None = key(None, "keep each node's copies on the next node, too; default: with several nodes")


class Checkpoint(Section):
    save_interval: Whole | None = key(None, "save every N steps; 0: never; default: at the end only")
    keep_last: Count | None = key(None, "keep only the newest N checkpoints; default: all")
    keep_every: Count | None = key(None, "in addition, keep every checkpoint whose step is a multiple of this")
    async_save: bool | None = key(
        None, "write checkpoints in the background; default: on GPUs with nvidia-resiliency-ext"
    )
    reshardable: bool | None = key(
        None,
        f"save so that another {', '.join(NAMES[:-1])} or {NAMES[-1]} can load the optimizer's state; every rank then "
        "gathers its stage's in host memory (dist_ckpt_optim_fully_reshardable); default: true where another run of "
        "the experiment needs it, else a recipe's own, else true up to 150M parameters per rank of tp x pp",
    )
    verify: bool = key(True, "record a checkpoint's checksums during training, and compare them before resuming")
    local: LocalCopies | None = key(None, "copies on the nodes, between checkpoints, to resume from")

    @model_validator(mode="after")
    def _keep_every_needs_keep_last(self) -> Checkpoint:
        if self.keep_every is not None and self.keep_last is None:
            raise ValueError("keep_every needs keep_last: without it every checkpoint is kept")
        return self


class Load(Section):
    """What a run loads from another run's checkpoint in addition to the weights."""

    optimizer: bool = key(True, "load the optimizer's state; without it the schedule starts over too", short="loadopt")
    rng: bool = key(True, "load the random number states, if the layout is the same", short="loadrng")
