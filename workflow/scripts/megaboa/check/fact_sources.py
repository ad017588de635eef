"""Where facts come from: each one's key in the experiment file and field in Bridge's ConfigContainer, and how values
are read."""

from __future__ import annotations

import dataclasses
import functools
import re
import typing
from collections.abc import Callable
from typing import Any

from megaboa.check.facts import Facts
from megaboa.fields import BRIDGE_FIELDS
from megaboa.layout import AXES
from megaboa.records import Tree

# The key of the experiment file for each fact that has one.
KEYS: dict[str, str] = {
    **{f"layout.{axis.name}": axis.key for axis in AXES},
    "layout.sp": "parallel.sp",
    "layout.distributed_optimizer": "parallel.distributed_optimizer",
    "layout.fsdp": "parallel.fsdp",
    "layout.fsdp_sharding": "parallel.fsdp_sharding",
    "training.iters": "training.train_iters",
    "training.gbs": "training.global_batch_size",
    "training.mbs": "training.micro_batch_size",
    "training.seq_length": "training.seq_length",
    "training.precision": "training.precision",
    "training.decay": "schedule.decay",
    "training.warmup_iters": "schedule.warmup_iters",
    "training.decay_iters": "schedule.decay_iters",
    "training.wsd_decay_iters": "schedule.wsd_decay_iters",
    "training.optimizer": "optimizer.name",
    "training.save_interval": "checkpoint.save_interval",
    "training.keep_last": "checkpoint.keep_last",
    "training.document_mask": "data.reset_attention_mask",
    "training.nudge": "training.nudge",
    "kernels.grad_overlap": "parallel.overlap_grad_reduce",
    "kernels.gather_overlap": "parallel.overlap_param_gather",
}
# Facts that no single field tells.
_WITHOUT_FIELD = {
    *("layout.fsdp", "training.precision", "training.save_interval", "training.keep_last"),
    *("training.document_mask", "training.nudge"),
}
# The field of Bridge's ConfigContainer for each fact, in the real configuration or in an experiment's overrides.
FIELDS: dict[str, str] = {
    **{fact: BRIDGE_FIELDS[key][0] for fact, key in KEYS.items() if fact not in _WITHOUT_FIELD},
    "layout.group": "model.microbatch_group_size_per_vp_stage",
    "layout.cp_comm": "model.cp_comm_type",
    "layout.optimizer_instances": "ddp.num_distributed_optimizer_instances",
    "layout.first_stage_layers": "model.num_layers_in_first_pipeline_stage",
    "layout.last_stage_layers": "model.num_layers_in_last_pipeline_stage",
    "layout.embedding_counts": "model.account_for_embedding_in_pipeline_split",
    "layout.loss_counts": "model.account_for_loss_in_pipeline_split",
    "layout.stages": "model.pipeline_model_parallel_layout",
    "model.layers": "model.num_layers",
    "model.hidden": "model.hidden_size",
    "model.ffn": "model.ffn_hidden_size",
    "model.heads": "model.num_attention_heads",
    "model.kv_groups": "model.num_query_groups",
    "model.head_dim": "model.kv_channels",
    "model.vocab_size": "model.vocab_size",
    "model.vocab_multiple": "model.make_vocab_size_divisible_by",
    "model.tied": "model.share_embeddings_and_output_weights",
    "model.gated": "model.gated_linear_unit",
    "model.bias": "model.add_bias_linear",
    "model.qkv_bias": "model.add_qkv_bias",
    "model.norm_bias": "model.normalization",
    "model.qk_norm": "model.qk_layernorm",
    "model.dropout": "model.hidden_dropout",
    "model.experts": "model.num_moe_experts",
    "model.topk": "model.moe_router_topk",
    "model.moe_ffn": "model.moe_ffn_hidden_size",
    "model.shared_ffn": "model.moe_shared_expert_intermediate_size",
    "model.moe_layers": "model.moe_layer_freq",
    "model.latent": "model.multi_latent_attention",
    "model.q_rank": "model.q_lora_rank",
    "model.kv_rank": "model.kv_lora_rank",
    "model.qk_head_dim": "model.qk_head_dim",
    "model.qk_position_dim": "model.qk_pos_emb_head_dim",
    "model.v_head_dim": "model.v_head_dim",
    "model.mtp_layers": "model.mtp_num_layers",
    "training.rampup": "train.rampup_batch_size",
    "training.eval_gbs": "validation.eval_global_batch_size",
    "training.eval_mbs": "validation.eval_micro_batch_size",
    "training.fp8_weights": "mixed_precision.fp8_param_gather",
    "training.fp8_recipe": "mixed_precision.fp8_recipe",
    "training.bf16_ends": "mixed_precision.first_last_layers_bf16",
    "training.bf16": "model.bf16",
    "training.fp16": "model.fp16",
    "training.precision_aware": "optimizer.use_precision_aware_optimizer",
    "training.remainders": "optimizer.store_param_remainders",
    "training.offloaded": "optimizer.optimizer_cpu_offload",
    "training.muon_tp_mode": "optimizer.muon_tp_mode",
    "training.muon_split_qkv": "optimizer.muon_split_qkv",
    "training.first_weight_decay": "scheduler.start_weight_decay",
    "training.last_weight_decay": "scheduler.end_weight_decay",
    "training.weight_decay_style": "scheduler.weight_decay_incr_style",
    "training.checkpoint_format": "checkpoint.ckpt_format",
    "training.fault_tolerance": "ft.enable_ft_package",
    "training.packed": "dataset.enable_offline_packing",
    "profiling.nsys": "profiling.use_nsys_profiler",
    "profiling.pytorch": "profiling.use_pytorch_profiler",
    "profiling.viztracer": "profiling.use_viztracer",
    "profiling.memory": "profiling.record_memory_history",
    "profiling.start": "profiling.profile_step_start",
    "profiling.end": "profiling.profile_step_end",
    "profiling.ranks": "profiling.profile_ranks",
    "kernels.recompute": "model.recompute_granularity",
    "kernels.recompute_method": "model.recompute_method",
    "kernels.recompute_layers": "model.recompute_num_layers",
    "kernels.recompute_modules": "model.recompute_modules",
    "kernels.graphs": "model.cuda_graph_impl",
    "kernels.graph_modules": "model.cuda_graph_modules",
    "kernels.waits_for_messages": "model.batch_p2p_sync",
    "kernels.stragglers": "straggler.log_straggler",
    "kernels.cpu_offloading": "model.cpu_offloading",
    "kernels.offloaded_layers": "model.cpu_offloading_num_layers",
    "kernels.expert_overlap": "model.overlap_moe_expert_parallel_comm",
    "kernels.dispatcher": "model.moe_token_dispatcher_type",
    "kernels.flex_backend": "model.moe_flex_dispatcher_backend",
    "kernels.grouped_gemm": "model.moe_grouped_gemm",
    "kernels.router_dtype": "model.moe_router_dtype",
    "kernels.shared_expert_overlap": "model.moe_shared_expert_overlap",
    "kernels.expert_capacity": "model.moe_expert_capacity_factor",
    "kernels.pad_to_capacity": "model.moe_pad_expert_input_to_capacity",
    "kernels.forced_balance": "model.moe_router_force_load_balancing",
    "kernels.tp_comm_overlap": "comm_overlap.tp_comm_overlap",
    "kernels.nan_check": "rerun_state_machine.check_for_nan_in_loss",
    "kernels.fused_loss": "model.cross_entropy_loss_fusion",
    "kernels.loss_kernel": "model.cross_entropy_fusion_impl",
    "kernels.fused_activation": "model.bias_activation_fusion",
    "kernels.te_activation": "model.use_te_activation_func",
    "kernels.te_operations": "model.use_transformer_engine_op_fuser",
    "kernels.attention_dropout": "model.attention_dropout",
    "kernels.attention": "model.attention_backend",
    "kernels.fp8_attention": "mixed_precision.fp8_dot_product_attention",
    "kernels.fp32_gradients": "mixed_precision.grad_reduce_in_fp32",
    "kernels.gradient_fusion": "model.gradient_accumulation_fusion",
}
# The fact that a key of the experiment file is, overrides among them.
FACTS: dict[str, str] = {
    **{key: fact for fact, key in KEYS.items()},
    **{f"overrides.{field}": fact for fact, field in FIELDS.items()},
}
# Facts whose field is overwritten by a section of Bridge's before training, even if the section has None (its default).
OVERWRITTEN = {"kernels.expert_overlap": "comm_overlap.overlap_moe_expert_parallel_comm"}
# The same, with a distributed optimizer only.
OVERWRITTEN_IN_SHARDS = {
    "kernels.grad_overlap": "comm_overlap.overlap_grad_reduce",
    "kernels.gather_overlap": "comm_overlap.overlap_param_gather",
}


def overlay(facts: Facts, value_of: Callable[[str], Any], known: Callable[[str], bool]) -> Facts:
    """Facts updated with all fields that are known."""
    switch = FIELDS["layout.distributed_optimizer"]
    in_shards = value_of(switch) if known(switch) else facts.layout.distributed_optimizer
    overwritten = OVERWRITTEN | (OVERWRITTEN_IN_SHARDS if in_shards else {})
    fields = [(fact, where) for fact, where in (*FIELDS.items(), *overwritten.items()) if known(where)]
    return _replaced(facts, {fact: _plain(fact.split(".")[1], value_of(where), facts) for fact, where in fields})


def with_keys(facts: Facts, values: Tree) -> Facts:
    """Facts with these keys of the experiment file changed, whose values are as facts have them."""
    return _replaced(facts, {FACTS[key]: value for key, value in values.items()})


def of_key(facts: Facts, key: str) -> Any:
    section, name = FACTS[key].split(".")
    return getattr(getattr(facts, section), name)


def _replaced(facts: Facts, values: Tree) -> Facts:
    sections: dict[str, Tree] = {}
    for fact, value in values.items():
        section, name = fact.split(".")
        sections.setdefault(section, {})[name] = value
    changed = {name: dataclasses.replace(getattr(facts, name), **own) for name, own in sections.items()}
    return dataclasses.replace(facts, **changed)


def with_overrides(facts: Facts, overrides: Tree) -> Facts:
    """Facts updated with an experiment's overrides. An override of `comm_overlap` creates that whole section."""
    if any(name.startswith("comm_overlap.") for name in overrides):
        overrides = {**dict.fromkeys(OVERWRITTEN.values()), **overrides}
    return overlay(facts, overrides.__getitem__, overrides.__contains__)


def not_a(field: str, value: Any) -> str | None:
    """What an override's value would have to be, such as `a number`; None if it is that, or if no fact has the field.

    Facts of other types would break the rules' arithmetic.
    """
    fact = _FACT_OF.get(field)
    if fact is None:
        return None
    section, name = fact.split(".")
    declared = _declared(section)[name]
    kinds = set(typing.get_args(declared) or (declared,)) - {type(None)}
    if value is None and (type(None) in typing.get_args(declared) or _plain(name, None, Facts()) is not None):
        return None
    words, is_right = _FORMS.get(name) or next(_KINDS[kind] for kind in _KINDS if kind in kinds)
    return None if is_right(value) else words


@functools.cache
def _declared(section: str) -> dict[str, Any]:
    return typing.get_type_hints(type(getattr(Facts(), section)))


def _is_whole(value: Any) -> bool:
    return type(value) is int  # True is an int too


def _is_list(value: Any, of: Callable[[Any], bool]) -> bool:
    return isinstance(value, list | tuple) and all(map(of, value))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


Form = tuple[str, Callable[[Any], bool]]  # what a value must be, in words and as a test
_FACT_OF = {field: fact for fact, field in (*FIELDS.items(), *OVERWRITTEN.items(), *OVERWRITTEN_IN_SHARDS.items())}
_KINDS: dict[type, Form] = {
    bool: ("true or false", lambda value: isinstance(value, bool)),
    float: ("a number", lambda value: _is_whole(value) or isinstance(value, float)),
    int: ("a whole number", _is_whole),
    str: ("text", _is_text),
}
_NAMES: Form = ("a list of text", lambda value: _is_text(value) or _is_list(value, _is_text))
_NUMBERS: Form = ("a list of whole numbers", lambda value: _is_list(value, _is_whole))
# Facts whose field has another type, or that are lists.
_FORMS: dict[str, Form] = {
    "norm_bias": _KINDS[str],
    "cp_comm": ("text or a list of text", _NAMES[1]),
    "recompute_modules": _NAMES,
    "graph_modules": _NAMES,
    "ranks": _NUMBERS,
    "rampup": _NUMBERS,
    "moe_layers": ("a whole number, or a list of 0 and 1", lambda value: _is_whole(value) or _NUMBERS[1](value)),
    "stages": (
        "text, or a list with a list for each stage",
        lambda value: _is_text(value) or _is_list(value, lambda stage: _is_list(stage, _is_text)),
    ),
}


def _plain(name: str, value: Any, facts: Facts) -> Any:
    """A field's value in the form of facts: tuples of text, 0 for nothing."""
    match name:
        case "stages":
            return _stages(value)
        case "moe_layers":
            return _sparse_layers(value, facts.model.layers)
        case "recompute_modules" | "graph_modules":
            return _names(value)
        case "mtp_layers" | "offloaded_layers" | "warmup_iters" | "dropout" | "attention_dropout":
            return value or 0
        case "ranks":
            return tuple(value or ())
        case "expert_overlap":
            return bool(value)
        case "norm_bias":
            return value == "LayerNorm"
        case "optimizer_instances":
            return value or 1
        case "graphs":
            return value or "none"
        case "cp_comm":
            return tuple(value) if isinstance(value, list | tuple) else value
        case "attention":
            return getattr(value, "name", value) or "auto"
        case _:
            return value


def _names(value: Any) -> tuple[str, ...]:
    """Names of modules, from text, a list of text, or a list of enum members. Empty for `full`, which means whole
    layers."""
    if not value or value == "full":
        return ()
    values = value.split(",") if isinstance(value, str) else value
    return tuple(str(getattr(one, "name", one)).strip() for one in values)


PARTS = {"E": "embedding", "t": "decoder", "m": "mtp", "L": "loss"}  # of a pipeline layout's short form


def _stages(value: Any) -> tuple[tuple[str, ...], ...] | None:
    """A pipeline layout from lists, or from megatron-core's short form: `Ettt|(tt|)*29,m|L`. None if it has other
    letters, which Megatron refuses."""
    if isinstance(value, str):
        text = re.sub(r"\(([^)]+)\)\*(\d+)", lambda many: many[1] * int(many[2]), value.replace(",", ""))
        text = re.sub(r"(.)\*(\d+)", lambda many: many[1] * int(many[2]), text)
        is_known = set(text) <= {*PARTS, "|"}
        return tuple(tuple(map(PARTS.__getitem__, stage)) for stage in text.split("|")) if is_known else None
    if not isinstance(value, list | tuple):
        return None
    return tuple(tuple(str(getattr(part, "name", part)) for part in stage) for stage in value)


def _sparse_layers(value: Any, layers: int | None) -> tuple[bool, ...] | None:
    """Sparse layers from `moe_layer_freq`: every n-th layer, or a list of 0 and 1."""
    if isinstance(value, list | tuple):
        return tuple(bool(one) for one in value)
    if isinstance(value, int) and value > 1 and layers:
        return tuple(layer % value == 0 for layer in range(layers))
    return None
