"""Maps our keys to the fields of Bridge's ConfigContainer that they set."""

from __future__ import annotations

from typing import Any

from megaboa.blends import SPLITS
from megaboa.layout import AXES

# Keys of `data` that act where a document's end-of-text token is.
AT_ENDS_OF_TEXT = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
BRIDGE_FIELDS: dict[str, tuple[str, ...]] = {
    "data.blend": ("dataset.blend",),
    "data.split": ("dataset.split",),
    "data.blend_per_split.train": ("dataset.blend_per_split",),
    "data.blend_per_split.valid": ("dataset.blend_per_split",),
    "data.blend_per_split.test": ("dataset.blend_per_split",),
    "data.reset_position_ids": ("dataset.reset_position_ids",),
    "data.reset_attention_mask": ("dataset.reset_attention_mask", "dataset.create_attention_mask"),
    "data.eod_mask_loss": ("dataset.eod_mask_loss",),
    "data.num_workers": ("dataset.num_workers",),
    "training.train_iters": ("train.train_iters",),
    "training.train_tokens": ("train.train_iters",),
    "training.global_batch_size": ("train.global_batch_size",),
    "training.micro_batch_size": ("train.micro_batch_size",),
    "training.seq_length": ("model.seq_length", "dataset.seq_length"),
    "training.seed": ("rng.seed", "dataset.random_seed"),
    "training.precision": ("mixed_precision",),
    "training.eval_interval": ("validation.eval_interval",),
    "training.eval_iters": ("validation.eval_iters",),
    "optimizer.name": ("optimizer.optimizer",),
    "optimizer.lr": ("optimizer.lr",),
    "optimizer.min_lr": ("optimizer.min_lr",),
    "optimizer.weight_decay": ("optimizer.weight_decay", "scheduler.start_weight_decay", "scheduler.end_weight_decay"),
    "optimizer.beta1": ("optimizer.adam_beta1",),
    "optimizer.beta2": ("optimizer.adam_beta2",),
    "optimizer.eps": ("optimizer.adam_eps",),
    "optimizer.clip_grad": ("optimizer.clip_grad",),
    "schedule.decay": ("scheduler.lr_decay_style",),
    "schedule.warmup_iters": ("scheduler.lr_warmup_iters",),
    "schedule.decay_iters": ("scheduler.lr_decay_iters",),
    "schedule.wsd_decay_iters": ("scheduler.lr_wsd_decay_iters",),
    **{axis.key: (axis.field,) for axis in AXES},
    "parallel.sp": ("model.sequence_parallel",),
    "parallel.distributed_optimizer": ("ddp.use_distributed_optimizer", "optimizer.use_distributed_optimizer"),
    "parallel.fsdp": ("dist.use_megatron_fsdp", "ddp.use_megatron_fsdp", "dist.use_torch_fsdp2"),
    "parallel.fsdp_sharding": ("ddp.data_parallel_sharding_strategy",),
    "parallel.overlap_grad_reduce": ("ddp.overlap_grad_reduce",),
    "parallel.overlap_param_gather": ("ddp.overlap_param_gather", "optimizer.overlap_param_gather"),
    "checkpoint.save_interval": ("checkpoint.save_interval",),
    "checkpoint.keep_last": ("checkpoint.most_recent_k",),
    "checkpoint.async_save": ("checkpoint.async_save",),
    "load.optimizer": ("checkpoint.load_optim",),
    "load.rng": ("checkpoint.load_rng",),
    "checkpoint.reshardable": ("checkpoint.dist_ckpt_optim_fully_reshardable",),
    "launch.timeout_minutes": ("dist.distributed_timeout_minutes",),
    "profile.tool": ("profiling.use_pytorch_profiler", "profiling.use_nsys_profiler"),
    "profile.steps": ("profiling.profile_step_start", "profiling.profile_step_end"),
    "profile.ranks": ("profiling.profile_ranks",),
}

# Bridge's second tier of checkpoints. It would save them but never resume from one; our second tier is
# `checkpoint.local`.
NON_PERSISTENT = (
    "non_persistent_ckpt_type",
    "non_persistent_save_interval",
    "non_persistent_global_ckpt_dir",
    "non_persistent_local_ckpt_dir",
    "non_persistent_local_ckpt_algo",
    "replication",
    "replication_jump",
    "replication_factor",
)
# Fields that say where a run writes, what it resumes from, and by which signal it ends: Megaboa sets them itself, after
# everything else.
OWN_FIELDS = (
    "checkpoint.save",
    "checkpoint.load",
    *(f"checkpoint.{name}" for name in NON_PERSISTENT),
    "scheduler.override_opt_param_scheduler",
    "scheduler.use_checkpoint_opt_param_scheduler",
    "dataset.path_to_cache",
    "train.exit_signal",
    "train.exit_signal_handler",
    "train.exit_signal_handler_for_dataloader",
)

# Keys with the same meaning as Bridge's field: an override of the field is just another spelling of the key.
_OTHER_MEANING = {
    "data.blend",
    *(f"data.blend_per_split.{split}" for split in SPLITS),
    "training.train_tokens",
    "training.precision",
}
# The keys whose fields were never free to be set by `overrides`. Don't add to them: experiments may set the fields of
# newer keys there, and such overrides stay in a run's identity, so that it doesn't train again. So `parallel` isn't
# derived from the table of axes.
_OF_THE_START = {
    "data": "blend split blend_per_split.train blend_per_split.valid blend_per_split.test num_workers "
    "reset_position_ids reset_attention_mask eod_mask_loss",
    "training": "train_iters train_tokens global_batch_size micro_batch_size seq_length seed precision eval_interval "
    "eval_iters",
    "optimizer": "name lr min_lr weight_decay beta1 beta2 eps clip_grad",
    "schedule": "decay warmup_iters decay_iters wsd_decay_iters",
    "parallel": "tp pp vpp cp ep etp sp distributed_optimizer fsdp fsdp_sharding",
    "checkpoint": "save_interval keep_last async_save reshardable",
    "load": "optimizer rng",
    "launch": "timeout_minutes",
    "profile": "tool steps ranks",
}
INSTEAD_OF_OVERRIDES = frozenset(
    f"{section}.{name}" for section, names in _OF_THE_START.items() for name in names.split()
)
SAME_AS: dict[str, str] = {
    fields[0]: key
    for key, fields in BRIDGE_FIELDS.items()
    if len(fields) == 1 and key in INSTEAD_OF_OVERRIDES - _OTHER_MEANING
}

# Fields of a key with several, which may also have a value of their own: the key sets the rest.
FINER = ("scheduler.start_weight_decay", "scheduler.end_weight_decay", "dataset.random_seed")


INTERPOLATED = (
    "holds `${`, with which Bridge would put another value in its place, such as a secret of the environment: write "
    "the value itself"
)


def interpolated(value: Any) -> str | None:
    """The first text in a value that OmegaConf, with which Bridge reads its configuration, would replace: all of
    `${...}`, as our keys need none. Before it, Hydra may take backslashes out."""
    if isinstance(value, str):
        return value if "${" in value.replace("\\", "") else None
    parts = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return next((found for found in map(interpolated, parts) if found is not None), None)


def keys_of(field: str) -> list[str]:
    """The keys of ours that set a field of Bridge."""
    return [key for key, fields in BRIDGE_FIELDS.items() if field in fields]


def key_of(field: str) -> str | None:
    """The first of these keys."""
    return next(iter(keys_of(field)), None)
