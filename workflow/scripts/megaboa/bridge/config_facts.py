"""Facts for the rules, read from Bridge's ConfigContainer before its own validation."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.tokenizers.config import TokenizerConfig
from megatron.bridge.training.tokenizers.tokenizer import build_tokenizer
from megatron.bridge.utils.cuda_graph import cuda_graph_module_names
from megatron.bridge.utils.cuda_graph import is_full_iteration_cuda_graph as is_full_iteration

from megaboa import bridge_recipes
from megaboa.bridge import forward_steps, kernels
from megaboa.check.fact_sources import FIELDS, not_a, overlay
from megaboa.check.facts import Cluster, Facts, Model, Training
from megaboa.layout import Layout
from megaboa.records import LaunchSpec, ProfileSpec, RunSpec

FP8 = {
    "delayed": "bf16_with_fp8_delayed_scaling_mixed",
    "tensorwise": "bf16_with_fp8_current_scaling_mixed",
    "blockwise": "bf16_with_fp8_subchannel_scaling_mixed",
    "mxfp8": "bf16_with_mxfp8_mixed",
}
ROTARY = ("rope", "yarn", "mrope")
_ABSENT = object()


def facts_of(config: ConfigContainer, run: RunSpec, launch: LaunchSpec, profile: ProfileSpec) -> Facts:
    wanted, model = launch.checkpoint, config.model
    copies = wanted.get("local") or {}
    kind = forward_steps.kind_of(model, run)
    saved = wanted.get("save_interval", config.checkpoint.save_interval)
    positions = getattr(model, "position_embedding_type", None)
    facts = Facts(
        layout=Layout(world_size=run.world_size, fsdp=_fsdp(config)),
        model=Model(
            kind=kind.name,
            family=((run.model.get("config") or {}).get("model_type")),
            max_length=getattr(model, "max_position_embeddings", None),
            hybrid=kind.name == "hybrid" or bool(getattr(model, "per_layer_embed_dim", None)),
            learned_positions=positions == "learned_absolute",
            rotary=getattr(model, "rotary_percent", None) if positions in ROTARY else None,
            tokenizer_vocab=_with_marks(tokenizer_vocabulary(config), config.dataset),
            pretrained=run.is_pretrained,
        ),
        training=Training(
            steps_before=run.steps_before,
            save_interval=saved,
            keep_last=wanted.get("keep_last"),
            copied_every=copies.get("every"),
            copied_to_partner=bool(copies.get("partner")),
            task=run.task,
            precision=run.training.get("precision") or _precision(config),
            pipeline_dtype=model.pipeline_dtype is not None or config.mixed_precision is not None,
            adapter_rank=run.tuning["rank"] if run.has_adapters else None,
            adapter_targets=tuple(run.tuning["targets"]) if run.has_adapters else (),
            adapter_magnitudes=run.task == "dora",
            profiler=profile.tool,
            profile_steps=profile.steps,
            profile_ranks=profile.ranks,
        ),
        cluster=Cluster(
            run.device,
            launch.nodes,
            launch.gpus_per_node,
            launch.gpu,
            max_connections=launch.start.environment.get("CUDA_DEVICE_MAX_CONNECTIONS") if launch.start else None,
            attention_scaling=launch.start.environment.get("NVTE_DPA_FP8_RECIPE") if launch.start else None,
            tuned_for=bridge_recipes.tuned_for(run.model.get("recipe")),
        ),
    )
    _require_numbers(config)
    facts = overlay(facts, lambda field: _value(config, field), lambda field: _value(config, field) is not _ABSENT)
    return _completed(_with_loss(_with_vocabulary(facts, config.tokenizer.use_tokenizer_vocab_size)))


def _require_numbers(config: ConfigContainer) -> None:
    """Refuse text where facts are numbers: no configuration of Bridge checks what a recipe sets."""
    for field in FIELDS.values():
        value = _value(config, field)
        if isinstance(value, str) and (wanted := not_a(field, value)):
            raise ValueError(f"{field}: {value!r} must be {wanted}")


def tokenizer_vocabulary(config: ConfigContainer) -> int | None:
    """Number of tokens; None if the tokenizer isn't available."""
    tokenizer = config.tokenizer
    return _vocabulary(tokenizer.tokenizer_type, str(tokenizer.tokenizer_model), tokenizer.vocab_size)


def _with_marks(tokens: int | None, dataset: Any) -> int | None:
    """The vocabulary plus the tokens that BERT and T5 need (masked_data.py)."""
    return None if tokens is None else tokens + len(getattr(dataset, "marks", ()))


@functools.cache
def _vocabulary(kind: str, model: str, size: int | None) -> int | None:
    if kind == "NullTokenizer":
        return size
    try:
        return int(build_tokenizer(TokenizerConfig(tokenizer_type=kind, tokenizer_model=model)).vocab_size)
    except Exception:  # the hub fails, or this kind of tokenizer needs more than a name
        return None


def _value(config: ConfigContainer, field: str) -> Any:
    """A field's value; _ABSENT if a section is missing or this kind of model has no such field."""
    value: Any = config
    for name in field.split("."):
        if value is None or not hasattr(value, name):
            return _ABSENT
        value = getattr(value, name)
    if name == "cuda_graph_modules":  # or those of its former name; the full iteration is one of them
        whole = (
            ["full_iteration"] if config.model.cuda_graph_impl == "local" and is_full_iteration(config.model) else []
        )
        return [*whole, *cuda_graph_module_names(config.model)]
    return value


def _with_vocabulary(facts: Facts, of_tokenizer: bool) -> Facts:
    """The vocabulary as determined by setup.py: the tokenizer's with padding, if Bridge is told to use that or the
    model has none; otherwise the model's, unchanged."""
    model = facts.model
    known = model.tokenizer_vocab is not None
    if model.vocab_size is None or (of_tokenizer and known):
        model = dataclasses.replace(model, vocab_size=model.tokenizer_vocab)
    elif not of_tokenizer:
        model = dataclasses.replace(model, vocab_rows=model.vocab_size)
    return dataclasses.replace(facts, model=model)


def _with_loss(facts: Facts) -> Facts:
    """Account for our loss kernel, which replaces the one of Megatron that the configuration names."""
    if "loss" not in kernels.in_use or facts.kernels.loss_kernel != "native":
        return facts
    return dataclasses.replace(facts, kernels=dataclasses.replace(facts.kernels, loss_kernel="ours"))


def _completed(facts: Facts) -> Facts:
    """Add the values that Megatron itself fills in during validation."""
    model = facts.model
    heads, hidden = model.heads, model.hidden
    model = dataclasses.replace(
        model,
        ffn=model.ffn or (4 * hidden if hidden else None),
        kv_groups=None if model.latent else model.kv_groups or heads,
        head_dim=model.head_dim or (hidden // heads if hidden and heads else None),
        moe_ffn=(model.moe_ffn or model.ffn) if model.experts else None,
        tied=bool(model.tied),
    )
    return dataclasses.replace(facts, model=model)


def _fsdp(config: ConfigContainer) -> str:
    if config.dist.use_megatron_fsdp or config.ddp.use_megatron_fsdp:
        return "megatron"
    return "torch" if config.dist.use_torch_fsdp2 else "none"


def _precision(config: ConfigContainer) -> str | None:
    """The value of `training.precision`. A recipe has Bridge's name, or the object that the name stands for."""
    mixed = config.mixed_precision
    if mixed is None or isinstance(mixed, str):
        return mixed
    if mixed.fp4:
        return "bf16_with_nvfp4_mixed"
    if mixed.fp8:
        return FP8.get(mixed.fp8_recipe)
    return "bf16_mixed" if mixed.bf16 else "fp16_mixed" if mixed.fp16 else None
