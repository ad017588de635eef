"""From `run.json` to Bridge's ConfigContainer.

`build` sets everything that can change the losses; `place` sets where the run is stored and what it saves. `pretrain`
gets the result of both. Preflight uses `build` alone.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import functools
import inspect
import os
import signal
import types
import typing
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.bridge.recipes.common import _pretrain_common
from megatron.bridge.training.config import CheckpointConfig, ConfigContainer
from megatron.bridge.training.mixed_precision import get_mixed_precision_config
from megatron.bridge.training.utils.omegaconf_utils import create_omegaconf_dict_config, process_config_with_overrides
from megatron.core.dist_checkpointing.strategies.nvrx import has_nvrx_async_support
from omegaconf import OmegaConf

from megaboa import store
from megaboa.bridge import datasets, finetuning, image_text, kernels, recipe_models, wheels
from megaboa.bridge.convert import bridge_of, provider_of, refuse_other_gelu, with_yarn_defaults
from megaboa.bridge.overrides import hydra_overrides, hydra_value
from megaboa.bridge.source import refuse_lost_settings
from megaboa.errors import InputError
from megaboa.fields import BRIDGE_FIELDS, INTERPOLATED, interpolated, key_of
from megaboa.paths import RunFolder
from megaboa.records import (
    SECTIONS,
    ImportRecord,
    LaunchSpec,
    ModelSource,
    Parent,
    ProfileSpec,
    RunSpec,
    Tokenizer,
    Tree,
    read,
)
from megaboa.store_paths import AttemptFolder, RunStore

EVALUATED = "validation.eval_interval"
REFERENCE_STEPS = 4  # steps without the profiler, after the step that includes the end of the capture
# Their values have another meaning in Bridge's fields, or Bridge has no field for them (bridge/nudge.py).
NOT_COPIED = {"training.precision", "parallel.fsdp", "training.nudge"}


@dataclass(frozen=True)
class Inputs:
    """The payloads that a run reads, from the manifests of earlier stages."""

    source: ModelSource | None  # manifest of the Hugging Face folder; None for a recipe that brings its own model
    tokenizer: str | None  # Hugging Face folder or id
    pretrained: str | None  # Megatron checkpoint to start from
    corpora: datasets.Corpora

    @classmethod
    def read(cls, folder: RunFolder) -> Inputs:
        pretrained = read(ImportRecord, folder.model_manifest).checkpoint if folder.run.is_pretrained else None
        return cls(
            *architecture(folder),
            pretrained=pretrained,
            corpora=folder.corpora,
        )

    @classmethod
    def for_data(cls, folder: RunFolder) -> Inputs:
        """Inputs for the index job, which needs everything but weights."""
        return cls(*architecture(folder), pretrained=None, corpora=folder.corpora)

    @classmethod
    def before_payloads(cls, folder: RunFolder) -> Inputs:
        """Inputs for preflight, which needs the architecture, but neither weights nor text."""
        return cls(*architecture(folder), pretrained=None, corpora={})


def build(run: RunSpec, inputs: Inputs) -> ConfigContainer:
    kernels.in_use.clear()  # preflight builds many runs in one process
    if inputs.source:  # it may have been fetched by an earlier version
        refuse_lost_settings(inputs.source.name, inputs.source.path)
    config = _from_recipe(run.model, inputs.source) if run.is_recipe else _from_hugging_face(inputs.source)
    if inputs.tokenizer:
        config.tokenizer.tokenizer_type = "HuggingFaceTokenizer"
        config.tokenizer.tokenizer_model = inputs.tokenizer
    _set_precision(config, run.training.get("precision"))
    for section in SECTIONS:
        for name, value in getattr(run, section).items():
            key = f"{section}.{name}"
            if value is not None and key not in NOT_COPIED:
                for field in BRIDGE_FIELDS[key]:
                    _set(config, field, value)
    if not run.is_recipe and run.training.get("eval_interval") is None:
        config.validation.eval_interval = config.train.train_iters + 1  # Bridge always evaluates at the end
    _set_sharding(config, run.parallel)
    overlaps = {} if run.is_recipe else _overlaps(config, run)
    for field, value in overlaps.items():
        _set(config, field, value)
    _set_pipeline(config, run.parallel)
    config.checkpoint.pretrained_checkpoint = inputs.pretrained
    if run.is_tuned:
        finetuning.configure(config, run, inputs.pretrained)
    else:
        datasets.configure(config, run.data, inputs.corpora)
    _restart_schedule(config, run.parent)
    _let_overflow_reach_the_loss_scaler(config)
    if run.device == "cpu":
        config.dist.distributed_backend = "gloo"
        config.dist.use_gloo_process_groups = False
        config.train.manual_gc = False
    if config.model.vocab_size is not None or "model.vocab_size" in run.overrides:
        # The model has its own vocabulary, of which the tokenizer may use only a part; Bridge would truncate it.
        config.tokenizer.use_tokenizer_vocab_size = False
    config = override(config, run.overrides and {**overlaps, **run.overrides})  # overrides may set `comm_overlap`
    if inputs.source:
        refuse_other_gelu(config.model, inputs.source)
    if (
        run.overrides.get(EVALUATED, ...) is None and config.train.train_iters
    ):  # null, not unset: as for our own default
        config.validation.eval_interval = config.train.train_iters + 1
    if run.is_recipe and inputs.source:
        with_yarn_defaults(config.model)
        recipe_models.refuse_another(config.model, run.model, inputs.source)
    elif run.is_pretrained:
        recipe_models.refuse_overrides(config.model, run.model, inputs.source, run.overrides)
    return config


def build_as_launched(folder: RunFolder, inputs: Inputs) -> ConfigContainer:
    """The result of `build` and launch.json's overrides, which don't change what is trained. Bridge validates both."""
    return override(build(folder.run, inputs), folder.launch.overrides)


def place(
    config: ConfigContainer,
    launch: LaunchSpec,
    store: RunStore,
    attempt: AttemptFolder,
    load: Path | None,
    index_cache: Path,
) -> None:
    """Set where the run is stored, and what it saves. `load`: the checkpoint to continue from."""
    wanted = launch.checkpoint  # for a recipe only the keys that are set
    saved = config.checkpoint
    if "save_interval" in wanted:
        saved.save_interval = config.train.train_iters if wanted["save_interval"] is None else wanted["save_interval"]
    saved.save = str(store.checkpoints.absolute())
    saved.load = None
    if load:  # this exact folder, because Bridge's tracker files may be outdated, torn, or lost
        saved.load = str(load.absolute())
        if config.peft is None:  # adapters are saved without their base model
            saved.pretrained_checkpoint = None
    if "reshardable" in wanted:
        saved.dist_ckpt_optim_fully_reshardable = wanted["reshardable"]
    if not saved.save_interval:
        _save_nothing(saved)
    elif wanted.get("async_save") is not None:
        saved.async_save = wanted["async_save"]
    elif "async_save" in wanted:
        saved.async_save = saves_in_background(config)
    # The process that collects writers' results. A forked one would outlive a killed rank, and hold the GPU's memory.
    saved.async_write_results_mp_mode = "spawn"
    if "keep_last" in wanted:  # removal of old checkpoints is the supervisor's task
        saved.most_recent_k = -1
    if launch.num_workers is not None:
        config.dataset.num_workers = launch.num_workers
    if config.dist.distributed_backend == "gloo":  # worker processes would only take cores from the ranks
        config.dataset.num_workers = 0
    config.dataset.path_to_cache = str(index_cache.absolute())
    config.logger.log_interval = 1
    track(config, launch.trackers, store, attempt)
    if launch.start and (minutes := launch.start.timeout_minutes) is not None:
        config.dist.distributed_timeout_minutes = minutes
    override(config, launch.overrides)
    # A rank that is asked to end (SIGTERM) saves first, so its data loader must stay alive until then.
    config.train.exit_signal_handler = config.train.exit_signal_handler_for_dataloader = True
    config.train.exit_signal = signal.SIGTERM
    _keep_snapshots(config, attempt)


def _keep_snapshots(config: ConfigContainer, attempt: AttemptFolder) -> None:
    """Replace Bridge's default path, which belongs to NeMo-Run: elsewhere it doesn't exist, which would end the run."""
    profiling = config.profiling
    if profiling is not None and profiling.record_memory_history and "/nemo_run/" in profiling.memory_snapshot_path:
        folder = attempt.traces("memory")
        folder.mkdir(parents=True, exist_ok=True)
        profiling.memory_snapshot_path = str(folder / "snapshot.pickle")


def track(config: ConfigContainer, wanted: Tree, store: RunStore, attempt: AttemptFolder) -> None:
    """Set Bridge's loggers other than the console. Names for W&B are in the ranks' environment (run/command.py)."""
    logger = config.logger
    logger.tensorboard_dir = str(attempt.tensorboard.absolute()) if wanted.get("tensorboard", True) else None
    experiment, run = store.path.parts[-3:-1]
    if wandb := wanted.get("wandb"):
        logger.wandb_project = wandb["project"] or experiment
        logger.wandb_entity = wandb["entity"]
        logger.wandb_exp_name = run
        logger.wandb_save_dir = str(store.path.absolute())
    if mlflow := wanted.get("mlflow"):
        logger.mlflow_experiment = mlflow["experiment"] or experiment
        logger.mlflow_run_name = run
        logger.mlflow_tracking_uri = store.mlflow_uri if wanted["offline"] else mlflow["tracking_uri"]
        identity = f"{experiment}-{run}-{store.path.name}"
        logger.mlflow_tags = {"megaboa.run": identity, "megaboa.attempt": attempt.path.name}
        logger.mlflow_log_artifacts = False  # checkpoints stay in the store


def saves_in_background(config: ConfigContainer) -> bool:
    """Whether checkpoints are saved in the background by default: on GPUs, if the package that Bridge writes with is
    installed (Megatron-Core's own way is deprecated).

    Not with Megatron-FSDP: on two H200s all of its shardings hung in their first save (Bridge 0.6.2).
    """
    if config.dist.distributed_backend == "gloo" or config.dist.use_megatron_fsdp:
        return False
    try:
        found = has_nvrx_async_support()
    except AssertionError:  # installed, but too old
        found = False
    if not found and os.environ.get("RANK", "0") == "0":
        wheels.say(["ranks wait while a checkpoint is written: nvidia-resiliency-ext isn't installed, or too old"])
    return found


def _save_nothing(saved: CheckpointConfig) -> None:
    saved.save, saved.async_save = None, False  # Bridge refuses async_save without save


def profile(config: ConfigContainer, wanted: ProfileSpec) -> None:
    """Train only the first steps, under the profiler, with the learning rates of the whole run and without saves.

    A few more steps follow the captured ones: the comparison shows the profiler's own cost. Trials of `snakemake tune`
    have no profiler, and so nothing to compare.
    """
    begin, end = wanted.steps
    config.scheduler.lr_decay_iters = config.scheduler.lr_decay_iters or config.train.train_iters
    config.train.train_iters = end + (REFERENCE_STEPS if wanted.tool != "none" else 0)
    config.validation.eval_iters = 0
    _save_nothing(config.checkpoint)
    profiling = config.profiling
    profiling.profile_ranks = list(wanted.ranks)
    profiling.profile_step_start, profiling.profile_step_end = begin - 1, end - 1  # counted as steps done before
    # Only this tool, whatever overrides say: all but nsys are attached (profilers.py).
    profiling.use_pytorch_profiler = profiling.use_viztracer = profiling.record_memory_history = False
    profiling.use_nsys_profiler = profiling.nvtx_ranges = wanted.tool == "nsys"


def override(config: ConfigContainer, overrides: Tree) -> ConfigContainer:
    """Set fields in Bridge's own dotted form, with Bridge's checks of names and types."""
    if not overrides:
        return config
    _refuse_interpolations({f"overrides.{name}": value for name, value in overrides.items()})
    _add_parts(config, overrides)
    tree, _ = create_omegaconf_dict_config(config)
    _refuse_interpolations(OmegaConf.to_container(tree, resolve=False))
    try:
        changed = process_config_with_overrides(config, cli_overrides=hydra_overrides(overrides))
    except Exception:  # whose class depends on Bridge's version
        if refused := list(_refusals(config, overrides)):
            raise InputError("; ".join(refused)) from None
        raise
    for name in overrides:
        _refuse_code(changed, name)
        if choices := _choices(changed, name):
            _choose(changed, name, choices)
    _keep_overlaps(changed, overrides)
    return changed


def _refuse_interpolations(values: Tree) -> None:
    """Refuse texts that Bridge would replace by other values, whichever key they come from."""
    for name, value in values.items():
        if (text := interpolated(value)) is not None:
            raise InputError(f"{name}: {text!r} {INTERPOLATED}")


def _refusals(config: ConfigContainer, overrides: Tree) -> Iterator[str]:
    """Overrides of fields that Bridge doesn't have. Its own error names only the first, and recommends Hydra's `+`."""
    tree, _ = create_omegaconf_dict_config(config)
    for name, value in overrides.items():
        if why := _no_such_field(config, tree, name):
            yield f"overrides.{name}: {hydra_value(value)}: {why}"


def _no_such_field(config: ConfigContainer, tree: Any, name: str) -> str | None:
    """What is wrong with a field's name, with the nearest that exists; None if nothing is."""
    parts = name.split(".")
    for number, part in enumerate(parts):
        if not isinstance(tree, Mapping):
            return f"{'.'.join(parts[:number])} is {tree!r} here, and has no fields"
        if part not in tree:
            near = difflib.get_close_matches(part, map(str, tree), n=1)
            break
        tree = tree[part]
    else:
        return None
    if _value(config, name) is not None:
        return "is an object, which an override can't set"
    if not near:
        return "Bridge has no such field"
    field = ".".join([*parts[:number], *near, *parts[number + 1 :]])
    return f"Bridge has no such field; did you mean {key_of(field) or f'overrides.{field}'}?"


def _keep_overlaps(config: ConfigContainer, overrides: Tree) -> None:
    """Copy overrides of `ddp` to `comm_overlap`, if a recipe sets that: it would overwrite them before training."""
    for name, value in overrides.items():
        part, _, field = name.partition(".")
        if part == "ddp" and hasattr(config.comm_overlap, field) and f"comm_overlap.{field}" not in overrides:
            setattr(config.comm_overlap, field, value)


def _refuse_code(config: ConfigContainer, name: str) -> None:
    """Refuse a value that isn't a function for a field that is declared as one: the rank would call it. Bridge resolves
    the names that it knows, those of `activation_func`."""
    value = _value(config, name)
    kinds = [typing.get_origin(kind) or kind for kind in _kinds(config, name)]
    if value is None or callable(value) or kinds != [Callable]:
        return
    raise InputError(
        f"overrides.{name}: {hydra_value(value)}: is a function in Bridge, which an override can't name: set it in a "
        "recipe of your own"
    )


def _choices(config: ConfigContainer, name: str) -> type[enum.Enum] | None:
    """The enum that a field is declared as, if it is declared as an enum (or None) and nothing else."""
    kinds = _kinds(config, name)
    one = kinds[0] if len(kinds) == 1 else None
    return one if isinstance(one, type) and issubclass(one, enum.Enum) else None


def _kinds(config: ConfigContainer, name: str) -> list[Any]:
    """The types that a field may have, other than None."""
    part, _, field = name.rpartition(".")
    declared = _declared(type(_value(config, part)), field)
    alternatives = typing.get_args(declared) if typing.get_origin(declared) in (typing.Union, types.UnionType) else ()
    return [kind for kind in alternatives or (declared,) if kind is not type(None)]


def _declared(kind: type, field: str) -> Any:
    """The field's type, from the class that declares it: some derived classes of Bridge have annotations that only a
    type checker can read."""
    declaring = next((base for base in kind.__mro__ if field in inspect.get_annotations(base)), None)
    try:
        return typing.get_type_hints(declaring).get(field) if declaring else None
    except (NameError, TypeError):
        return None


def _choose(config: ConfigContainer, name: str, choices: type[enum.Enum]) -> None:
    """Replace an enum's name by its member.

    Bridge keeps the text, which equals no member, so that Megatron ignores it.
    """
    word = _value(config, name)
    if word is None or isinstance(word, choices):
        return
    if not isinstance(word, str) or word not in choices.__members__:
        raise InputError(f"overrides.{name}: there is no {word!r}; one of {', '.join(choices.__members__)}")
    _set(config, name, choices[word])


def _value(config: Any, name: str) -> Any:
    """The value of a dotted field; None if there is no such field, as in parts that are mappings."""
    return functools.reduce(lambda owner, part: getattr(owner, part, None), name.split("."), config)


def _add_parts(config: ConfigContainer, overrides: Tree) -> None:
    """Create parts that a recipe left out (`straggler`, `comm_overlap`), if overrides set their fields."""
    given: dict[str, Tree] = defaultdict(dict)
    for name, value in overrides.items():
        part, _, field = name.partition(".")
        # A missing mixed_precision means fp32.
        if part != "mixed_precision" and getattr(config, part, config) is None:
            given[part][field] = value
    for part, values in given.items():
        optional = typing.get_type_hints(type(config))[part]
        for kind in filter(dataclasses.is_dataclass, typing.get_args(optional)):
            setattr(config, part, _made(kind, part, values))


def _made(kind: type, part: str, values: Tree) -> Any:
    """A part with these fields. Unknown fields are left for Bridge to report."""
    fields = [one for one in dataclasses.fields(kind) if one.init]
    needed = [one.name for one in fields if one.default is one.default_factory is dataclasses.MISSING]
    if missing := [f"{part}.{name}" for name in needed if name not in values]:
        raise InputError(f"overrides: {part} isn't set here, and needs {' and '.join(missing)} too")
    return kind(**{one.name: values[one.name] for one in fields if one.name in values})


def architecture(folder: RunFolder) -> tuple[ModelSource | None, str | None]:
    """The manifest of the run's model (None if a recipe brings its own), and its tokenizer.

    Raises InputError if one of them isn't in the store any more.
    """
    if folder.run.has_source:
        source = read(ModelSource, folder.source_manifest)
        for payload in filter(None, (source.path, source.tokenizer)):
            store.require(payload, folder.source_manifest)
        return source, source.tokenizer
    if (manifest := folder.tokenizer_manifest) is None:
        return None, folder.run.model["tokenizer"]
    trained = read(Tokenizer, manifest).path
    store.require(trained, manifest)
    return None, trained


def _from_hugging_face(source: ModelSource) -> ConfigContainer:
    config = _pretrain_common()
    config.model = provider_of(bridge_of(source), load_weights=False)
    if image_text.sees(config.model):
        config.dataset = image_text.ImageTextDatasetConfig.of(config.model, config.dataset)
    config.dataset.create_attention_mask = False  # unused, and quadratic in the sequence length
    return config


def _from_recipe(model: Tree, source: ModelSource | None) -> ConfigContainer:
    """A recipe's configuration, with its own model or that of `source`."""
    with recipe_models.reading(model, source):
        make = recipe_models.named(model["recipe"], f"models.{model['name']}")
        config = recipe_models.made(make, model, source)
    if source and config.model.vocab_size is None:
        config.model.vocab_size = source.vocab_size
    return config


def _set_precision(config: ConfigContainer, precision: str | None) -> None:
    if precision is None:
        return
    # An object and not a name, so that overrides can reach its fields (`mixed_precision.initial_loss_scale`).
    config.mixed_precision = None if precision == "fp32" else get_mixed_precision_config(precision)
    if precision == "fp32":
        for part in (config.model, config.optimizer):
            part.bf16 = part.fp16 = False
            part.params_dtype = torch.float32
        config.model.pipeline_dtype = torch.float32


def _let_overflow_reach_the_loss_scaler(config: ConfigContainer) -> None:
    """Turn off Bridge's check for infinite gradients under fp16, where they are how the loss scale is found."""
    if config.mixed_precision is not None and get_mixed_precision_config(config.mixed_precision).fp16:
        config.ddp.check_for_nan_in_grad = False


def _set_sharding(config: ConfigContainer, parallel: Tree) -> None:
    if "fsdp" not in parallel:
        return
    config.dist.use_megatron_fsdp = config.ddp.use_megatron_fsdp = parallel["fsdp"] == "megatron"
    config.dist.use_torch_fsdp2 = parallel["fsdp"] == "torch"
    if parallel["fsdp"] == "megatron":
        config.checkpoint.ckpt_format = "fsdp_dtensor"


def _overlaps(config: ConfigContainer, run: RunSpec) -> Tree:
    """Overlaps to turn off where Bridge's defaults (on) don't fit. Keys for them come later, with other overrides.

    On the CPU, gloo copies messages on the processor that calculates, so there is nothing to hide them behind.
    """
    if run.device == "cpu" or run.parallel.get("fsdp") == "torch":
        return {"ddp.overlap_grad_reduce": False, "ddp.overlap_param_gather": False}
    if not config.ddp.use_distributed_optimizer and not config.ddp.use_megatron_fsdp:
        return {"ddp.overlap_param_gather": False}
    return {}


def _set_pipeline(config: ConfigContainer, parallel: Tree) -> None:
    """Set the exchange between stages: with two pipeline ranks and several stages each, batched exchange silently
    trains wrongly (observed)."""
    if parallel.get("vpp") == 1:  # no virtual stages, even if the recipe has some
        config.model.virtual_pipeline_model_parallel_size = None
        config.model.overlap_p2p_comm, config.model.batch_p2p_comm = False, True
    elif parallel.get("vpp"):
        config.model.overlap_p2p_comm, config.model.batch_p2p_comm = True, False


def _restart_schedule(config: ConfigContainer, parent: Parent | None) -> None:
    """Without the optimizer's state the schedule counts from the parent's step: let it end at the run's last step by
    default."""
    if parent and not parent.weights_only and not parent.load.optimizer and config.scheduler.lr_decay_iters is None:
        config.scheduler.lr_decay_iters = config.train.train_iters - parent.iteration


def _set(config: ConfigContainer, field: str, value: Any) -> None:
    *path, name = field.split(".")
    target: Any = config
    for part in path:
        target = getattr(target, part)
    if not hasattr(target, name):
        raise AttributeError(f"Bridge's configuration has no field {field}")
    setattr(target, name, value)
