"""A run's documents: its identity, its launch settings, and its row in the plan."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from typing import Any

from megaboa import bridge_recipes, files, layout, store
from megaboa.blends import corpora, named, split_blends
from megaboa.check.fact_sources import FACTS
from megaboa.config.formula import Number
from megaboa.config.keys import is_emptied
from megaboa.config.models.data import Data
from megaboa.config.models.experiment import Experiment
from megaboa.config.models.model import Model
from megaboa.config.models.training import Parallel
from megaboa.fields import AT_ENDS_OF_TEXT, BRIDGE_FIELDS, keys_of
from megaboa.harmless import is_harmless
from megaboa.plan import image_specs, tasks
from megaboa.plan.quantities import Quantities
from megaboa.records import SECTIONS, LaunchSpec, ProfileSpec, RunSpec, Tree, parse
from megaboa.run import recipe_code

COLUMNS = (
    *("run", "model", "data", "world_size", *layout.NAMES, "sp", "fsdp", "dp", "gbs", "mbs", "seq_length"),
    *("train_iters", "tokens", "params", "lr", "precision"),
    *("nodes", "gpus_per_node", "runtime", "jobs", "parent"),
    *("state", "why"),  # of runs that are left out
)
# Keys that runs of older versions don't have: they are in run.json only where they aren't the default.
NEWER = (("training", "nudge"),)
_SAME_LOSSES = {"num_workers", "max_epochs"}
OVERLAPS = ("overlap_grad_reduce", "overlap_param_gather")  # keys of `parallel` for when things are sent, not what
# What a run trains, among the parts of its identity; the others say how that is calculated.
_TRAINED = {one.name for one in fields(RunSpec)} - {"parallel", "world_size", "device", "overrides", "bridge_source"}
_PARTS = {"models": "model", "continue_from": "parent"}  # of an identity, where a section has another name
# Sections of Bridge that only say how a run is calculated, and words in the names of such fields of other sections:
# kernels, communication, recomputation, graphs, precision, offloading. Any other field may decide what is trained.
_CALCULATION = ("comm_overlap.", "ddp.", "dist.", "mixed_precision.")
_CALCULATING = re.compile(
    r"fusion|fused|fuser|grouped_gemm|backend|use_te_|te_rng|_impl$|flash_attention_version|comm|dispatch|deepep|hybridep"
    r"|ncclep|p2p|overlap|wgrad|recompute|graph|offload|dtype|precision|remainders|bf16|fp(4|8|16|32)(_|$)"
)
_SAME_TRAINING = {"training.micro_batch_size", "training.precision", *(f"data.{name}" for name in _SAME_LOSSES)}
_TUNED_SAMPLES = ("samples", "template", "loss_on", "pack")
_SAME_SAMPLES = (*AT_ENDS_OF_TEXT, "fim")
_SAMPLES = ("train_iters", "global_batch_size", "seq_length", "seed", "eval_interval", "eval_iters")
_SAMPLE_FIELDS = ("dataset.", "train.", "validation.", "tokenizer.", "rng.")
WHILE_TRAINING = ("profiling.use_viztracer", "profiling.record_memory_history")
GATHERED_PARAMETERS = 150e6  # for this many, each rank gathers 1.8 GB of optimizer state at a save
RECIPE = "recipe"  # value in the plan for what the recipe decides
ITSELF = "itself"  # as a parent: the run under its own name


def is_in_place(text: str | None) -> bool:
    return text is not None and text.partition("@")[0] == ITSELF


def run_spec(config: Experiment, model: str, world_size: int) -> RunSpec:
    """Everything that can change the losses, and nothing else. For a recipe only the keys that are set."""
    own_defaults = config.models[model].recipe is None
    sections = {
        name: getattr(config, name).model_dump(mode="json", exclude_unset=not own_defaults) for name in SECTIONS
    }
    sections["training"].pop("train_tokens", None)
    for section, name in NEWER:
        default = type(getattr(config, section)).model_fields[name].default
        of_recipe = not own_defaults and f"{section}.{name}" in BRIDGE_FIELDS  # it may have another value of its own
        if not of_recipe and sections[section].get(name) == default:
            sections[section].pop(name, None)
    for name in OVERLAPS:
        sections["parallel"].pop(name, None)
    if own_defaults:
        _drop_idle(sections)
    return RunSpec(
        model={"name": model, **_model(config.models[model])},
        data=_data(config.data, own_defaults),
        **sections,
        world_size=world_size,
        device=config.device,
        overrides=_overrides(config, own_defaults),
        bridge_source=image_specs.source_of(config.image),
        task=config.task,
        tuning=tasks.spec(config) if config.task != "pretrain" else {},
    )


def is_trained(key: str) -> bool:
    """Whether a key of the experiment, or an override, may decide what a run trains, and not only how that is
    calculated: the model, its data, the optimization."""
    section, _, name = key.partition(".")
    if section != "overrides":
        return key not in _SAME_TRAINING and _PARTS.get(section, section) in _TRAINED
    if is_harmless(name) or name.startswith(_CALCULATION) or FACTS.get(key, "").startswith("layout."):
        return False
    if keys := keys_of(name):
        return any(map(is_trained, keys))
    return not _CALCULATING.search(name)


def _overrides(config: Experiment, own_defaults: bool) -> Tree:
    """Overrides that can change a loss. Null for a field whose key isn't set changes only what a recipe has set."""
    kept = {field: value for field, value in config.overrides.items() if not is_harmless(field)}
    return {field: value for field, value in kept.items() if not (own_defaults and is_emptied(field, value))}


def _data(data: Data, own_defaults: bool) -> Tree:
    """Blend and split, and those other settings that differ from the default."""
    kept = data.model_dump(mode="json", exclude_unset=not own_defaults, exclude=_SAME_LOSSES)
    if own_defaults:
        defaults = Data().model_dump(mode="json")
        kept = {k: value for k, value in kept.items() if k in ("blend", "split") or value != defaults[k]}
    if data.blend_per_split is not None:
        kept.pop("blend", None)
        kept.pop("split", None)
    return kept


def _drop_idle(sections: dict[str, Tree]) -> None:
    """Remove settings of unused features, which can't change a loss."""
    if sections["parallel"]["fsdp"] != "megatron":
        del sections["parallel"]["fsdp_sharding"]
    if sections["schedule"]["decay"] != "WSD":
        del sections["schedule"]["wsd_decay_iters"]


def _model(model: Model) -> Tree:
    kept: Tree = {"init": model.init, "tokenizer": model.tokenizer}
    if model.config is not None:
        kept |= {"config": model.config, "seed": model.seed}
    if model.hf is not None:
        kept |= {"hf": model.hf, "revision": model.revision}
    if model.recipe is not None:
        kept |= {"recipe": model.recipe, "args": model.args}
        if files.is_python(model.recipe):
            kept["recipe_code"] = recipe_code.digest(model.recipe)
    return kept


def launch(config: Experiment, model: str, quantities: Quantities) -> LaunchSpec:
    """Where and how a run is executed, which doesn't affect its training."""
    is_recipe = config.models[model].recipe is not None
    asked = {
        **config.resources.model_dump(mode="json"),
        "start": config.launch.model_dump(mode="json"),
        "recovery": config.recovery.model_dump(mode="json"),
        "trackers": config.trackers.model_dump(mode="json"),
        "checkpoint": _checkpoint(config, is_recipe, quantities),
        "store": config.store,
        "continues": is_in_place(config.continue_from),
        **config.data.model_dump(mode="json", exclude_unset=is_recipe, include={"num_workers"}),
        "overrides": _launch_overrides(config),
    }
    return replace(parse(LaunchSpec, asked, "launch"), image=image_specs.launch(config))


def _checkpoint(config: Experiment, is_recipe: bool, quantities: Quantities) -> Tree:
    kept = config.checkpoint.model_dump(mode="json", exclude_unset=is_recipe)
    if kept.get("reshardable") is None:
        kept.pop("reshardable", None)
        if any(one.tensors for one in config.report.agreements):  # they are compared by name, which needs whole tensors
            kept["reshardable"] = True
        elif not is_recipe:
            kept["reshardable"] = _is_reshardable(config.parallel, quantities.get("params"))
    return kept


def _is_reshardable(parallel: Parallel, params: Number | None) -> bool:
    """The default of checkpoint.reshardable: false if the distributed optimizer's state is, or may be, too large to
    gather."""
    if parallel.fsdp == "megatron" or not parallel.distributed_optimizer:
        return True
    return params is not None and params <= GATHERED_PARAMETERS * parallel.tp * parallel.pp


def _launch_overrides(config: Experiment) -> Tree:
    """Overrides that don't change a loss. Profiling during training uses the steps and ranks of `profile`."""
    kept = {field: value for field, value in config.overrides.items() if is_harmless(field)} | _overlaps(config)
    if any(kept.get(field) for field in WHILE_TRAINING):
        begin, end = config.profile.steps
        steps = {"profiling.profile_step_start": begin - 1, "profiling.profile_step_end": end - 1}  # steps done
        kept |= {**steps, "profiling.profile_ranks": config.profile.ranks}
    return kept


def _overlaps(config: Experiment) -> Tree:
    """Bridge's fields for the overlap keys that are set. Without early reduction, there is no early gathering."""
    reduce, gather = (getattr(config.parallel, name) for name in OVERLAPS)
    if reduce is False and gather is None:
        gather = False
    wanted = dict(zip(OVERLAPS, (reduce, gather), strict=True))
    return {
        field: value
        for name, value in wanted.items()
        if value is not None
        for field in BRIDGE_FIELDS[f"parallel.{name}"]
    }


def profile(config: Experiment) -> ProfileSpec:
    """The profile's settings, with the digest of a profiler that is the user's own."""
    wanted = parse(ProfileSpec, config.profile.model_dump(mode="json"), "profile")
    return replace(wanted, tool_code=recipe_code.of_file(wanted.tool)) if files.is_python(wanted.tool) else wanted


def index_key(run: RunSpec) -> Tree | None:
    """The part of a run's identity that determines which samples Megatron draws from its corpora, and in which order.

    None if it has no corpora: Bridge generates its data, or the recipe has its own.
    """
    data = run.data
    if not corpora(data):
        return None
    model = run.model
    recipe = model if run.is_recipe else None  # it can set anything
    return {
        **({"tuning": {name: run.tuning[name] for name in _TUNED_SAMPLES}} if run.is_tuned else {}),
        "data": {name: value for name, value in data.items() if name not in _SAME_SAMPLES},
        "fim": bool(data.get("fim")),
        **({"steps_before": run.steps_before} if run.steps_before else {}),  # what training reads is counted from there
        **({"held_out": run.held_out} if run.held_out else {}),
        "training": {name: run.training.get(name) for name in _SAMPLES},
        "tokenizer": recipe or model["tokenizer"] or [model.get("hf"), model.get("revision")],
        "overrides": {field: value for field, value in run.overrides.items() if field.startswith(_SAMPLE_FIELDS)},
    }


def index_name(run: RunSpec) -> str | None:
    key = index_key(run)
    return key and files.digest(key)[: store.ID_LENGTH]


def row(name: str, model: str, config: Experiment, quantities: Quantities) -> Tree:
    """One line of plan.tsv."""
    own_defaults = config.models[model].recipe is None

    def known(section: str, field: str) -> Any:
        part = getattr(config, section)
        return getattr(part, field) if own_defaults or field in part.model_fields_set else RECIPE

    def number(quantity: str) -> Any:
        value = quantities.get(quantity)
        return RECIPE if value is None else int(value)

    params = quantities.get("params")
    blend = split_blends(config.data.model_dump()).get("train")
    precision, told = known("training", "precision"), bridge_recipes.precision_of(config.models[model].recipe)
    return {
        "run": name,
        "model": model,
        "data": named(blend) if blend else "mock" if own_defaults else RECIPE,
        "world_size": number("world_size"),
        **{field: known("parallel", field) for field in (*layout.NAMES, "sp", "fsdp")},
        "dp": number("dp"),
        "gbs": known("training", "global_batch_size"),
        "mbs": known("training", "micro_batch_size"),
        "seq_length": known("training", "seq_length"),
        "train_iters": number("train_iters"),
        "tokens": number("train_tokens"),
        "params": None if params is None else int(params),
        "lr": known("optimizer", "lr"),
        "precision": (told or RECIPE) if precision == RECIPE else precision,
        **{field: getattr(config.resources, field) for field in ("nodes", "gpus_per_node", "runtime")},
        "parent": None,
    }


def table(rows: list[Tree]) -> str:
    """Rows as tab-separated text."""
    lines = ["\t".join(COLUMNS)]
    lines += ["\t".join(cell(entry.get(column)) for column in COLUMNS) for entry in rows]
    return "\n".join(lines) + "\n"


def cell(value: Any) -> str:
    if value is None:
        return "-"
    return str(value).lower() if isinstance(value, bool) else str(value)
