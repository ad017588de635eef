"""The plan's facts about a run for the rules, from keys of the experiment and the model's Hugging Face config."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

from megaboa import bridge_recipes, files, model_kinds
from megaboa.check import hidden_act, rope
from megaboa.check.fact_sources import KEYS, with_overrides
from megaboa.check.facts import Cluster, Facts, Kernels, Model, Profiling, Training, from_json
from megaboa.config.check import is_local
from megaboa.config.formula import Number
from megaboa.config.models.experiment import Experiment
from megaboa.launch.nsys import has_nsys
from megaboa.layout import DENSE, Layout
from megaboa.paths import ExperimentFolder
from megaboa.plan import families, tasks
from megaboa.plan.plan import Run
from megaboa.plan.quantities import Quantities
from megaboa.records import Preflight, RunCheck, Tree, read_if_there
from megaboa.scheduler.registry import cluster

ROTARY_FIELDS = frozenset({"model.rotary_percent", "model.position_embedding_type"})


def facts_of(config: Experiment, quantities: Quantities, hf_config: Tree | None) -> Facts:
    """The facts of a run. For a recipe only what the file says; preflight has the recipe's own configuration."""
    model = config.models[str(config.model)]
    if model.recipe is not None:
        return Facts(
            _layout_of_recipe(config, quantities),
            Model(kind=_kind_of_recipe(model.recipe)),
            training=_training(config, quantities, _set_next_to_recipe(config, "training")),
            cluster=_cluster(config, model.recipe),
        )
    world = int(quantities("world_size"))
    training = _training(config, quantities, _given(config, "training"))
    return _of_config(config, str(config.model), hf_config, world, training)


def _of_config(config: Experiment, name: str, hf_config: Tree | None, world: int, training: Training) -> Facts:
    """The facts of one of the experiment's models that has no recipe."""
    model = config.models[name]
    tokenizer = config.tokenizers.get(str(model.tokenizer))
    sizes = _model(hf_config, tokenizer.size if tokenizer else None, model.init == "pretrained")
    facts = Facts(
        layout=Layout(world, **_given(config, "layout")),
        model=sizes,
        training=training,
        kernels=dataclasses.replace(_of_converter(sizes, config.device), **_given(config, "kernels")),
        profiling=_profiling(config),
        cluster=_cluster(config),
    )
    facts = with_overrides(facts, config.overrides)
    if not ROTARY_FIELDS.isdisjoint(config.overrides):  # preflight decides, by Bridge's own configuration
        facts = dataclasses.replace(facts, model=dataclasses.replace(facts.model, rotary=None))
    return dataclasses.replace(facts, model=dataclasses.replace(facts.model, vocab_rows=facts.model.vocab_size))


def _kind_of_recipe(recipe: str) -> str:
    """The kind of a recipe's model. If a recipe file doesn't declare it, preflight will find it."""
    if files.is_python(recipe):
        return (model_kinds.in_file(recipe)[0] or model_kinds.BY_NAME[model_kinds.GPT]).name
    found = bridge_recipes.named(recipe)
    return bridge_recipes.kind_of(found).name if found else model_kinds.GPT


def _given(config: Experiment, section: str) -> Tree:
    """A section's facts, by their keys of the file."""
    values = {}
    for fact, key in KEYS.items():
        (part, name), (where, field) = fact.split("."), key.split(".")
        if part == section:
            values[name] = getattr(getattr(config, where), field)
    return values


def _set_next_to_recipe(config: Experiment, section: str) -> Tree:
    """Facts by the keys that are set; null leaves a key to the recipe. Those are left out that say nothing without a
    setting that only the recipe knows."""
    known = {fact for fact, key in KEYS.items() if _is_set(config, *key.split("."))}
    if "training.decay_iters" not in known:  # the recipe's decay may end later than the run
        known -= {"training.warmup_iters", "training.wsd_decay_iters"}
    if "training.wsd_decay_iters" not in known:  # the recipe may have one
        known.discard("training.decay")
    return {name: value for name, value in _given(config, section).items() if f"{section}.{name}" in known}


def _is_set(config: Experiment, section: str, name: str) -> bool:
    part = getattr(config, section)
    return name in part.model_fields_set and getattr(part, name) is not None


def _layout_of_recipe(config: Experiment, quantities: Quantities) -> Layout:
    given = _set_next_to_recipe(config, "layout")
    given.pop("fsdp_sharding", None)  # says nothing without the recipe's model
    if config.optimizer.name != "adam":
        given.setdefault("distributed_optimizer", False)  # unless the recipe's own is illegal, which preflight finds
    if given.keys() >= set(DENSE):
        return Layout(int(quantities("world_size")), **given)
    alone = (*DENSE, "fsdp", "distributed_optimizer")  # the others and the ranks mean something with all of DENSE only
    return Layout(**{name: value for name, value in given.items() if name in alone})


def _training(config: Experiment, quantities: Quantities, given: Tree) -> Training:
    given = {**given, "iters": _whole(quantities.get("train_iters"))}  # may be given in tokens
    if config.models[str(config.model)].recipe is None or _is_set(config, "optimizer", "weight_decay"):
        given |= dict.fromkeys(("first_weight_decay", "last_weight_decay"), config.optimizer.weight_decay)
    return Training(**given, **_copies(config), task=config.task, **tasks.facts(config), **_profile(config))


def _copies(config: Experiment) -> dict[str, Any]:
    local = config.checkpoint.local
    if local is None:
        return {}
    return {"copied_every": local.every, "copied_to_partner": bool(local.partner)}


def _whole(number: Number | None) -> int | None:
    return None if number is None else int(number)


def _profile(config: Experiment) -> dict[str, Any]:
    wanted = config.profile
    steps = (wanted.steps[0], wanted.steps[1])
    return {"profiler": wanted.tool, "profile_steps": steps, "profile_ranks": tuple(wanted.ranks)}


def _profiling(config: Experiment) -> Profiling:
    """Steps and ranks of `profile`, in case an override profiles the training itself."""
    begin, end = config.profile.steps
    return Profiling(start=begin - 1, end=end - 1, ranks=tuple(config.profile.ranks))


def _cluster(config: Experiment, recipe: str | None = None) -> Cluster:
    resources = config.resources
    return Cluster(
        device=config.device,
        nodes=resources.nodes,
        gpus_per_node=resources.gpus_per_node,
        gpu=resources.gpu,
        tasks_per_node=cluster().tasks_per_node(resources.slurm_extra),
        max_connections=config.launch.environment.get("CUDA_DEVICE_MAX_CONNECTIONS"),
        attention_scaling=config.launch.environment.get("NVTE_DPA_FP8_RECIPE"),
        # an image's programs aren't known here
        has_nsys=has_nsys(config.profile.tool) if config.image.runtime == "none" else None,
        tuned_for=bridge_recipes.tuned_for(recipe),
    )


def _of_converter(model: Model, device: str) -> Kernels:
    """What Bridge's converters set. The CPU has no grouped products, and no kernels of Transformer Engine."""
    family, on_gpu = str(model.family), device == "cuda"
    kernels = Kernels(
        fused_activation=family in families.FUSED_ACTIVATION and model.has_swiglu,
        fused_loss=family not in families.UNFUSED_LOSS,
        loss_kernel="te" if family in families.LOSS_OF_TE and on_gpu else "native",
        flex_backend="deepep",
    )
    if not model.is_sparse:
        return kernels
    by_hybridep = family in families.DISPATCHED_BY_HYBRIDEP
    return dataclasses.replace(
        kernels,
        grouped_gemm=on_gpu,
        dispatcher="flex" if by_hybridep else "alltoall",
        flex_backend="hybridep" if by_hybridep else "deepep",
        router_dtype="fp32" if family in families.ROUTED_IN_FP32 else None,
        shared_expert_overlap=family in families.OVERLAPPED_SHARED_EXPERT,
    )


def _model(hf_config: Tree | None, tokenizer_vocab: int | None, pretrained: bool) -> Model:
    """Facts of a Hugging Face config. The vocabulary (the config's, or else the tokenizer's) isn't padded."""
    if hf_config is None:
        return Model(tokenizer_vocab=tokenizer_vocab, pretrained=pretrained)
    c, family = families.with_defaults(hf_config), hf_config.get("model_type")
    heads, hidden = c.get("num_attention_heads"), c.get("hidden_size")
    latent = c.get("kv_lora_rank") is not None
    tied = c.get("tie_word_embeddings", False)
    vocabulary = hf_config.get("vocab_size") or tokenizer_vocab
    return Model(
        kind=model_kinds.of_family(str(family)).name,
        family=family,
        layers=c.get("num_hidden_layers"),
        hidden=hidden,
        ffn=c.get("intermediate_size"),
        heads=heads,
        kv_groups=None if latent else c.get("num_key_value_heads") or heads,
        head_dim=c.get("head_dim") or (hidden // heads if hidden and heads else None),
        vocab_size=vocabulary,
        vocab_multiple=math.gcd(vocabulary or 0, 128),  # as Bridge's converters do it
        max_length=c.get("max_position_embeddings"),
        rotary=1.0 if families.is_wholly_rotary(c) else None,
        longest_plain=rope.longest_plain(hf_config),
        activation=hidden_act.named(hf_config),
        tied=tied,
        gated=family not in families.UNGATED,
        bias=families.has_bias(c),
        qkv_bias=families.has_qkv_bias(c),
        norm_bias=family in families.LAYER_NORM,
        qk_norm=families.has_qk_norm(c),
        **_experts(c),
        latent=latent,
        q_rank=c.get("q_lora_rank"),
        kv_rank=c.get("kv_lora_rank"),
        qk_head_dim=c.get("qk_nope_head_dim"),
        qk_position_dim=c.get("qk_rope_head_dim"),
        v_head_dim=c.get("v_head_dim"),
        mtp_layers=next((c[key] for key in model_kinds.PREDICTION_KEYS if c.get(key)), 0),
        tokenizer_vocab=tokenizer_vocab,
        pretrained=pretrained,
        source_tied=tied if pretrained else None,
    )


def _experts(c: Tree) -> Tree:
    """Facts of a mixture of experts; families have different keys for them."""

    def first(*names: str) -> Any:
        return next((c[name] for name in names if c.get(name)), None)

    experts = first("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    if not experts:
        return {}
    width = c.get("moe_intermediate_size") or c.get("intermediate_size")
    shared = (first("n_shared_experts", "num_shared_experts", "moe_num_shared_experts") or 0) * (width or 0)
    return {
        "experts": experts,
        "topk": first("num_experts_per_tok", "moe_k"),
        "moe_ffn": width,
        "shared_ffn": c.get("shared_expert_intermediate_size") or shared or None,
        "moe_layers": _sparse_layers(c),
    }


def _sparse_layers(c: Tree) -> tuple[bool, ...] | None:
    """For each layer whether it has experts; None if all have."""
    layers, step = range(c.get("num_hidden_layers") or 0), c.get("decoder_sparse_step") or 1
    first = c.get("first_k_dense_replace") or c.get("moe_layer_start_index") or 0
    listed = (layer for layer, kind in enumerate(c.get("mlp_layer_types") or []) if kind == "dense")
    dense = {*(c.get("mlp_only_layers") or []), *range(first), *listed}
    sparse = tuple((layer + 1) % step == 0 and layer not in dense for layer in layers)
    return None if all(sparse) else sparse


def alone(config: Experiment, name: str | None, nodes: int | None = None) -> Facts:
    """A model's facts with the experiment's own layout, without its sweep and length; raises LookupError if the
    experiment alone doesn't determine them. `nodes`: if they are chosen elsewhere."""
    chosen = name or config.model or (next(iter(config.models)) if len(config.models) == 1 else None)
    if chosen is None:
        raise LookupError(f"models: which of {', '.join(config.models)}? Name it with --model")
    if chosen not in config.models:
        raise LookupError(f"--model: {chosen} is not one of {', '.join(config.models)}")
    model, training, asked = config.models[chosen], config.training, config.resources
    hf_config = hf_config_of(model.model_dump())
    if hf_config is None:
        raise LookupError(f"models.{chosen}: only an inline config or that of a Hugging Face folder can be read here")
    facts = Training(
        gbs=training.global_batch_size,
        mbs=training.micro_batch_size,
        seq_length=training.seq_length,
        task=config.task,
        precision=training.precision,
        optimizer=config.optimizer.name,
        **tasks.facts(config),
    )
    needed = {
        "training.global_batch_size": facts.gbs,
        "training.seq_length": facts.seq_length,
        "tuning.rank": facts.adapter_rank,
        "resources.nodes": nodes or asked.nodes,
        "resources.gpus_per_node": asked.gpus_per_node,
    }
    for key, value in needed.items():
        if isinstance(value, str):
            instead = ", or given by --nodes" if key == "resources.nodes" else ""
            raise LookupError(f"{key}: {value!r} is an expression: it must be a number here{instead}")
    return _of_config(config, chosen, hf_config, (nodes or asked.nodes) * asked.gpus_per_node, facts)


def hf_config_of(model: Tree) -> Tree | None:
    """A model's Hugging Face config; None for a recipe, or if it isn't known before the model is fetched."""
    if model.get("config") is not None:
        return dict(model["config"])
    if model.get("hf") is not None and is_local(model["hf"]):
        return dict(files.read_json(Path(model["hf"]).expanduser() / "config.json"))
    return None


def known_facts(run: Run, folder: ExperimentFolder) -> Facts | None:
    """The run's facts; for a recipe those from preflight, or None if preflight hasn't read the run as it is."""
    if not run.run.is_recipe:
        return run.facts
    known = known_check(run, read_if_there(Preflight, folder.preflight))
    return from_json(known.facts) if known and known.facts else None


def known_check(run: Run, found: Preflight | None) -> RunCheck | None:
    """Preflight's result for the run; None if preflight hasn't read the run as it is."""
    if found is None or not run.digest.startswith(found.identities.get(run.name, "never read")):
        return None
    return found.runs[run.name]
