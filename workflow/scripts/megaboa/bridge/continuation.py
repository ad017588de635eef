"""Continuing from another run's checkpoint, with this run's own settings.

Bridge treats a checkpoint as an earlier state of the same run. So it finds no parameter group if the learning rate
differs (the rate is part of a group's name), uses the other run's betas, expects its optimizers (experts on one rank
have no separate one), and counts the schedule in samples of its batch. This module keeps this run's settings and loads
only the state.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megaboa import layout
from megaboa.records import Identity, Parent, Tree, read
from megaboa.run.checkpoints import has_shards
from megaboa.store_paths import RunStore

# Fields that must be equal, so that the same tensors mean the same model.
ARCHITECTURE = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"),
    *("normalization", "layernorm_epsilon", "gated_linear_unit", "qk_layernorm", "add_bias_linear", "add_qkv_bias"),
    *("position_embedding_type", "rotary_base", "rotary_percent", "share_embeddings_and_output_weights"),
    *("num_moe_experts", "moe_router_topk", "moe_ffn_hidden_size", "moe_layer_freq", "multi_latent_attention"),
    *("vocab_size", "window_size"),
)
ROUNDS = "yarn_correction_range_round_to_int"
# These settings are part of a parameter group's name, besides its structure, but may differ between the runs.
_SETTINGS_IN_NAMES = ("max_lr", "min_lr", "start_wd", "end_wd")
_STATE_OF_A_GROUP = ("params", "step")


def configure(config: Any, theirs: Tree, parent: Parent, checkpoints: Path, iteration: int) -> None:
    """Let Bridge load the parent's checkpoint, which was trained with `theirs`, into this run."""
    refuse(config, theirs, iteration)
    if parent.load.optimizer:
        refuse_optimizer(config, theirs)
        refuse_other_layout(config, theirs)
    config.checkpoint.load_optim = parent.load.optimizer
    config.checkpoint.load_rng = parent.load.rng and _same_ranks(config, theirs, checkpoints)
    config.scheduler.override_opt_param_scheduler = True
    config.scheduler.use_checkpoint_opt_param_scheduler = False


def saved_with(checkpoint: str) -> Tree:
    """The configuration that a checkpoint was trained with."""
    from megatron.bridge.training.utils.checkpoint_utils import get_checkpoint_run_config_filename, read_run_config

    return read_run_config(get_checkpoint_run_config_filename(checkpoint))


def refuse_other_rows(config: Any, theirs: Tree) -> None:
    """Refuse a checkpoint with another vocabulary: megatron-core silently fills an embedding with the rows that fit."""
    if config.model.vocab_size is None or config.tokenizer.use_tokenizer_vocab_size:
        return  # Bridge determines it from the tokenizer, as it did for the checkpoint
    rows = _rows(theirs["model"])
    if rows is not None and rows != config.model.vocab_size:
        raise ValueError(
            f"the checkpoint {config.checkpoint.load} has {rows} rows of vocabulary, and the model "
            f"{config.model.vocab_size}: move it away, and the run begins again"
        )


def _rows(model: Tree) -> int | None:
    if model.get("vocab_size") is None or not model.get("should_pad_vocab"):
        return model.get("vocab_size")
    unit = model["make_vocab_size_divisible_by"] * model["tensor_model_parallel_size"]
    return -(-model["vocab_size"] // unit) * unit


def refuse(config: Any, theirs: Tree, iteration: int) -> None:
    """Checks that are only possible here, because recipes and overrides affect the configuration."""
    for field in ARCHITECTURE:
        own, other = _plain(getattr(config.model, field, None)), theirs["model"].get(field)
        if own is not None and other is not None and own != other:  # None if Bridge derives it later
            raise ValueError(f"continue_from: the checkpoint has model.{field} {other!r}, and this run {own!r}")
    if config.train.train_iters is not None and config.train.train_iters <= iteration:
        raise ValueError(
            f"continue_from: the run begins after step {iteration} and ends at {config.train.train_iters}: "
            f"raise training.train_iters"
        )
    batch, before = config.train.global_batch_size, theirs["train"]["global_batch_size"]
    if batch < before:
        raise ValueError(
            f"continue_from: the checkpoint was trained with a batch of {before}, and has read samples that this run "
            f"doesn't have: set training.global_batch_size to {before} or more, not {batch}"
        )


def refuse_optimizer(config: Any, theirs: Tree) -> None:
    """Refuse states of different forms: only the distributed optimizer's is the same in every precision."""
    names = config.optimizer.optimizer, theirs["optimizer"].get("optimizer", "adam")
    if names[0] != names[1]:
        raise ValueError(
            f"continue_from: {names[0]} can't take the state of {names[1]}, which the checkpoint has: set "
            f"load.optimizer: false"
        )
    spread = [_of(model, "expert_model_parallel_size") > 1 for model in (config.model, theirs["model"])]
    if names[0] not in ("adam", "sgd") and spread[0] != spread[1]:
        raise ValueError(
            f"continue_from: {names[0]} keeps experts that are spread over ranks apart, and only one of the checkpoint "
            f"and this run has any: set parallel.ep above 1 in both or in neither, or load.optimizer: false"
        )
    own, other = _is_distributed(config), bool(theirs["optimizer"].get("use_distributed_optimizer"))
    if own != other:
        raise ValueError(
            f"continue_from: the checkpoint's optimizer has use_distributed_optimizer {other}, and this run {own}: set "
            f"parallel.distributed_optimizer as there, or load.optimizer: false"
        )
    low = config.mixed_precision is not None or config.model.bf16 or config.model.fp16
    if not own and bool(low) != bool(theirs["model"].get("bf16") or theirs["model"].get("fp16")):
        raise ValueError(
            "continue_from: without the distributed optimizer fp32 and 16 bits have states of another form: set "
            "training.precision as there, or load.optimizer: false"
        )


def refuse_other_layout(config: Any, theirs: Tree) -> None:
    """Refuse optimizer shards that were saved in another layout."""
    if not (has_shards(theirs) and _is_distributed(config)):
        return
    own = _layout(lambda field: getattr(config.model, field, None))
    other = _layout(theirs["model"].get)
    if own != other:
        raise ValueError(
            f"continue_from: the optimizer's state was saved by ranks of another layout (checkpoint.reshardable: "
            f"false, the default for large models), {_differing(other, own)}, here {_differing(own, other)}: save it "
            f"with true, take that layout, or set load.optimizer: false"
        )


def _layout(size_of: Callable[[str], int | None]) -> dict[str, int]:
    found = {axis.name: size_of(axis.argument) for axis in layout.AXES}
    return {name: size or (found["tp"] if name == "etp" else None) or 1 for name, size in found.items()}


def _differing(one: dict[str, int], other: dict[str, int]) -> str:
    return " ".join(f"{name}{size}" for name, size in one.items() if size != other[name])


def keep_positions(config: Any, theirs: Tree) -> list[str]:
    """Keep the range of YaRN that a checkpoint was trained with. Earlier versions left it unrounded where the model's
    config doesn't say. Returns what was changed."""
    if not getattr(config.model, ROUNDS, None) or theirs["model"].get(ROUNDS, True) is not None:
        return []
    setattr(config.model, ROUNDS, None)
    return ["YaRN's range is not rounded, as in the checkpoint: set truncate: false in the model's config to export it"]


def keep_buckets(config: Any, theirs: Tree) -> list[str]:
    """Keep the gradient buckets of the checkpoint, because optimizer shards only fit those. Returns what was changed.

    Without early reduction of gradients there is just one bucket.
    """
    if not (has_shards(theirs) and _is_distributed(config) and "overlap_grad_reduce" in theirs.get("ddp", {})):
        return []
    was, size = theirs["ddp"]["overlap_grad_reduce"], theirs["ddp"].get("bucket_size")
    changed = {
        name: value
        for name, value in {"overlap_grad_reduce": was, "bucket_size": size}.items()
        if getattr(config.ddp, name) not in (None, value)
    }
    for part in filter(None, (config.ddp, config.comm_overlap)):  # comm_overlap overwrites ddp
        part.overlap_grad_reduce, part.bucket_size = was, size
    for part in filter(None, (config.ddp, config.comm_overlap, config.optimizer)):  # one that is true sets all
        part.overlap_param_gather = part.overlap_param_gather and was
    if getattr(config.ddp, "num_buckets", None):  # excludes bucket_size
        config.ddp.num_buckets = None
    return [
        f"{name} is {value}, as the optimizer's shards were saved in these buckets (checkpoint.reshardable: false)"
        for name, value in changed.items()
    ]


def _is_distributed(config: Any) -> bool:
    """Bridge sets both fields if either is set."""
    return bool(config.optimizer.use_distributed_optimizer or config.ddp.use_distributed_optimizer)


def keep_own_settings(checkpointing: Any, theirs: Tree) -> None:
    """Wrap `load_checkpoint` of `megatron.bridge.training.checkpointing`, so that this run's settings survive it."""
    from megatron.core.optimizer import distrib_optimizer, optimizer

    # A group only gets its number of steps from the checkpoint, which is the same in every group.
    distrib_optimizer.param_group_identifier_keys = ()
    # Other optimizers must find their own group, because they modify what they find.
    names = optimizer.param_group_identifier_keys
    optimizer.param_group_identifier_keys = tuple(name for name in names if name not in _SETTINGS_IN_NAMES)
    load, load_chained = checkpointing.load_checkpoint, optimizer.ChainedOptimizer.load_state_dict

    def load_parts(self: Any, state_dict: dict[Any, Any]) -> None:
        load_chained(self, in_parts(state_dict, len(self.chained_optimizers)))

    def load_state(state: Any, model: Any, optimizer: Any, opt_param_scheduler: Any, **more: Any) -> Any:
        own = [settings_of(group) for group in optimizer.param_groups]
        loaded = load(state=state, model=model, optimizer=optimizer, opt_param_scheduler=opt_param_scheduler, **more)
        for group, settings in zip(optimizer.param_groups, own, strict=True):
            group.update(settings)
        batch, before = state.cfg.train.global_batch_size, theirs["train"]["global_batch_size"]
        opt_param_scheduler.num_steps = opt_param_scheduler.num_steps * batch // before
        opt_param_scheduler.step(0)
        return loaded

    checkpointing.load_checkpoint = load_state
    optimizer.ChainedOptimizer.load_state_dict = load_parts


def in_parts(state_dict: dict[Any, Any], count: int) -> dict[Any, Any]:
    """The state for `count` optimizers: one for all parameters or, if experts are spread over ranks, two.

    Tensors are in this layout's form; everything else (numbers of steps) is in that of the checkpoint's layout.
    """
    parts = {key: value for key, value in state_dict.items() if isinstance(key, int)}
    whole = {key: value for key, value in state_dict.items() if not isinstance(key, int)}
    if not parts or not whole:
        return state_dict
    if count > 1:
        return {number: {**whole, **parts.get(number, {})} for number in range(count)}
    groups = [group for part in parts.values() for group in part["optimizer"]["param_groups"]]
    return {**parts[0], **whole, "optimizer": {**parts[0]["optimizer"], "param_groups": groups}}


def settings_of(group: Tree) -> Tree:
    """The entries of a parameter group that come from the configuration."""
    return {name: value for name, value in group.items() if name not in _STATE_OF_A_GROUP}


def _same_ranks(config: Any, theirs: Tree, checkpoints: Path) -> bool:
    """Whether every rank has its own random number state in the checkpoint: it is kept by rank with experts, else by tp
    and pp."""
    fields = ["tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size"]
    own, other = ([_of(model, field) for field in fields] for model in (config.model, theirs["model"]))
    if own != other:
        return False
    identity = read(Identity, RunStore(checkpoints.parent).identity)
    return own[-1] == 1 or identity.run["world_size"] == int(os.environ["WORLD_SIZE"])


def _of(model: Any, field: str) -> int:
    return (model.get(field) if isinstance(model, dict) else getattr(model, field, None)) or 1


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
