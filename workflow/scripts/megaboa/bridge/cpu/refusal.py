"""Settings that the CPU backend can't support, or only by training something else than was asked for.

It reads Bridge's ConfigContainer as it is before `pretrain()`, by duck typing, so that no import of Megatron is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from megaboa.check.device import NOT_ON_CPU


class RefusedOnCpu(ValueError):
    """A configuration that only a GPU can run."""


class Rule(NamedTuple):
    """A field of the ConfigContainer, its refused values, the remedy, and the configurations that it applies to."""

    field: str
    refused: Callable[[Any], bool]
    remedy: str
    where: Callable[[Any], bool] = lambda cfg: True


def _value(cfg: Any, field: str) -> Any:
    for name in field.split("."):
        cfg = getattr(cfg, name, None)
    return cfg


def _low_precision(value: Any) -> bool:
    """Whether a precision is fp16, fp8 or fp4. The value is the name of a recipe, or the recipe itself."""
    if isinstance(value, str):
        return value == "16-mixed" or any(name in value for name in NOT_ON_CPU)
    return bool(_formats(value))


def _formats(recipe: Any) -> list[str]:
    """The formats that a precision's object turns on, of which the CPU has none."""
    return [name for name in NOT_ON_CPU if getattr(recipe, name, None)]


def _without_output(modules: list[str] | None) -> bool:
    """Whether some modules are recomputed into the storage of their outputs, which needs Transformer Engine."""
    return bool({"layernorm", "moe_act", "mla_up_proj"} & set(modules or ()))


def _gathers_context(cfg: Any) -> bool:
    return (_value(cfg, "model.context_parallel_size") or 1) > 1


def _has_latent_attention(cfg: Any) -> bool:
    return bool(_value(cfg, "model.multi_latent_attention"))


def _interleaves_two_stages(cfg: Any) -> bool:
    """Whether two pipeline ranks would mix up batched messages: each is the other's predecessor and successor."""
    stages = _value(cfg, "model.virtual_pipeline_model_parallel_size") or 1
    arranged = cfg.comm_overlap is not None and _value(cfg, "comm_overlap.overlap_p2p_comm") is not False
    return _value(cfg, "model.pipeline_model_parallel_size") == 2 and stages > 1 and not arranged


def _is_on(section: Any) -> bool:
    return section is not None and bool(section.enabled)


def _shown(value: Any) -> str:
    """A value in a message: of a precision's object, which has a page of fields, what is refused."""
    return ", ".join(_formats(value)) or repr(value)


OFF = "set it to false"
NO_RELIEF = "set it to false: there is no GPU to relieve"
FP32_OR_BF16 = "set training.precision to fp32 or bf16_mixed"

RULES = (
    Rule("mixed_precision", _low_precision, FP32_OR_BF16),
    Rule("model.fp16", bool, FP32_OR_BF16),
    Rule("model.fp8", bool, FP32_OR_BF16),
    Rule("model.fp4", bool, FP32_OR_BF16),
    Rule("model.cuda_graph_impl", lambda impl: impl not in (None, "none"), "set it to none"),
    Rule("model.enable_cuda_graph", bool, OFF),
    Rule("model.external_cuda_graph", bool, OFF),
    Rule("optimizer.optimizer_cuda_graph", bool, OFF),
    Rule("dist.use_megatron_fsdp", bool, "set parallel.fsdp to none"),
    Rule("ddp.use_megatron_fsdp", bool, "set parallel.fsdp to none"),
    Rule("dist.use_torch_fsdp2", bool, "set parallel.fsdp to none"),
    Rule("dist.use_decentralized_pg", bool, OFF),
    Rule("dist.use_sharp", bool, OFF),
    Rule("ddp.nccl_ub", bool, OFF),
    Rule("model.tp_comm_overlap", bool, OFF),
    Rule("comm_overlap.tp_comm_overlap", bool, OFF),
    Rule("model.overlap_moe_expert_parallel_comm", bool, OFF),  # needs streams of a GPU
    Rule("comm_overlap.overlap_moe_expert_parallel_comm", bool, OFF),
    Rule(
        "model.overlap_p2p_comm",
        lambda overlap: not overlap,
        "set it to true and model.batch_p2p_comm to false: two pipeline stages with vpp would mix up their messages",
        where=_interleaves_two_stages,
    ),
    Rule("model.cpu_offloading", bool, NO_RELIEF),
    Rule("model.fine_grained_activation_offloading", bool, NO_RELIEF),
    Rule("optimizer.optimizer_cpu_offload", bool, NO_RELIEF),
    Rule("optimizer.use_precision_aware_optimizer", bool, OFF),
    # dist_muon gathers tensors of unequal sizes, which gloo can't.
    Rule("optimizer.optimizer", lambda name: name not in (None, "adam", "sgd", "muon"), "set optimizer.name to muon"),
    Rule("model.moe_token_dispatcher_type", lambda name: name == "flex", "set it to alltoall"),
    Rule("model.moe_enable_deepep", bool, OFF),
    Rule("model.moe_paged_stash", bool, OFF),
    Rule("model.window_size", bool, "set parallel.cp to 1", where=_gathers_context),
    Rule(
        "model.softmax_type", lambda kind: kind not in (None, "vanilla"), "set parallel.cp to 1", where=_gathers_context
    ),
    Rule("model.use_transformer_engine_full_layer_spec", bool, OFF),
    Rule("model.use_transformer_engine_op_fuser", bool, OFF),
    Rule("model.use_te_activation_func", bool, OFF),
    Rule("model.use_kitchen", bool, OFF),
    Rule("model.recompute_modules", _without_output, "name only core_attn, mlp and moe"),
    Rule("dataset.reset_attention_mask", bool, OFF, where=_has_latent_attention),
    Rule("dataset.enable_offline_packing", bool, OFF),
    Rule("dataset.enable_in_batch_packing", bool, OFF),
    Rule("checkpoint.async_save", bool, OFF),
    Rule("profiling.use_nsys_profiler", bool, "set profile.tool to pytorch"),
    Rule("profiling.record_memory_history", bool, OFF),
    Rule("straggler.log_straggler", bool, OFF),
    Rule("nvrx_straggler", _is_on, "set it to null"),
    Rule("inprocess_restart", _is_on, "set it to null"),
    Rule("ft.enable_ft_package", bool, OFF),
)


def refuse(cfg: Any) -> None:
    """Raise `RefusedOnCpu`, naming every such field of Bridge's ConfigContainer with its value and a remedy."""
    asked = [(rule, _value(cfg, rule.field)) for rule in RULES if rule.where(cfg)]
    found = [f"  {rule.field}: {_shown(value)}: {rule.remedy}" for rule, value in asked if rule.refused(value)]
    if found:
        raise RefusedOnCpu("device: cpu can't do what this configuration asks for:\n" + "\n".join(found))
