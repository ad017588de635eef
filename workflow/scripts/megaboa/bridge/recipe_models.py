"""A recipe combined with a Hugging Face model: the recipe defines the training, the model the weights and names.

Both describe an architecture, which must be the same, because the model's converter imports and exports the weights.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import importlib
import importlib.util
import inspect
import itertools
import sys
import traceback
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from megatron.bridge import AutoBridge
from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge
from megatron.bridge.training.config import ConfigContainer

from megaboa import bridge_recipes, recipe_files
from megaboa.bridge.continuation import ARCHITECTURE
from megaboa.bridge.convert import bridge_of, provider_of
from megaboa.data import hub
from megaboa.files import is_python
from megaboa.records import ModelSource, Tree

FOLDER = "hf_path"  # the parameter through which a recipe asks for the model's folder
# Further fields that affect the calculation: with other values, the weights would mean another model.
FIELDS = (
    *("activation_func", "rotary_scaling_factor", "mscale", "mscale_all_dim", "original_max_position_embeddings"),
    *("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"),
    *("moe_shared_expert_intermediate_size", "moe_router_score_function", "moe_router_pre_softmax"),
    *(
        "moe_router_num_groups",
        "moe_router_group_topk",
        "moe_router_topk_scaling_factor",
        "moe_router_enable_expert_bias",
    ),
    *("mtp_num_layers", "layernorm_zero_centered_gamma", "softmax_type"),
    *("yarn_rotary_scaling_factor", "yarn_original_max_position_embeddings", "yarn_beta_fast", "yarn_beta_slow"),
    *("yarn_mscale", "yarn_mscale_all_dim", "yarn_correction_range_round_to_int"),
    *("rope_scaling", "rope_scaling_factor", "seq_len_interpolation_factor"),
)
NEUTRAL = {  # the meaning of None
    **{"moe_router_num_groups": 1, "moe_router_group_topk": 1, "moe_router_topk_scaling_factor": 1.0},
    **{"mtp_num_layers": 0, "softmax_type": "vanilla", "moe_shared_expert_intermediate_size": 0},
    **{"rope_scaling": False, "seq_len_interpolation_factor": 1.0},
}
SHOWN = 6
SIMILAR = 0.85  # names of fields, as difflib compares them
CALLS = 3  # that are told of those that led to an error: so many of the first and of the last

# Errors of the hub, remembered for all runs of a call: Bridge and the hub's client try for two minutes.
_not_given: dict[str, hub.HubError] = {}

_folders: list[Path] = []  # the folder of the recipe that was read last, if it imports modules next to it

Make = Callable[..., ConfigContainer]


def named(recipe: str, key: str) -> Make:
    """The function of a recipe: the user's (a Python file with `configure`), or Bridge's, by its name. `key`: of its
    model, for errors."""
    if is_python(recipe):
        _find_neighbours(recipe)
        module = module_of(recipe)
        if not hasattr(module, "configure"):
            raise ValueError(
                f"{recipe} has no function named configure: name it so, or import it under that name "
                "(from ... import ... as configure)"
            )
        return module.configure
    recipes = importlib.import_module("megatron.bridge.recipes")
    if hasattr(recipes, recipe):
        return getattr(recipes, recipe)
    if found := bridge_recipes.performance(recipe):
        return _performance(found)
    # the plan has refused names that Bridge's sources lack; this one its packages don't export
    raise ValueError(f"{key}.recipe: {bridge_recipes.problem(recipe) or f'Bridge has no recipe {recipe!r}'}")


@functools.cache
def module_of(recipe: str) -> ModuleType:
    """The user's recipe file as a module, executed once, so that forward step and configuration share definitions."""
    spec = importlib.util.spec_from_file_location(Path(recipe).stem, Path(recipe).expanduser())
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _find_neighbours(recipe: str) -> None:
    """Let the recipe import the modules next to it, if it does, and no longer those next to another recipe. A file with
    the name of a library is refused, as nobody could say which of them is meant."""
    names, folder = recipe_files.modules_of(recipe), Path(recipe).expanduser().resolve().parent
    while _folders and _folders[-1] != folder:
        _leave(_folders.pop())
    for name in names:
        spec = importlib.util.find_spec(name)
        if spec is not None and not _lies_in(folder, spec):
            raise ValueError(
                f"{recipe} imports {name}, which is both in {folder} and a library ({spec.origin}): rename the file"
            )
    if names and not _folders:
        _folders.append(folder)
        sys.path.append(str(folder))


def _leave(folder: Path) -> None:
    """Make the modules of a folder unknown: another recipe may have some of the same names."""
    sys.path.remove(str(folder))
    for name, module in list(sys.modules.items()):
        if (file := getattr(module, "__file__", None)) and Path(file).resolve().is_relative_to(folder):
            del sys.modules[name]


def _lies_in(folder: Path, spec: ModuleSpec) -> bool:
    places = [spec.origin] if spec.has_location else list(spec.submodule_search_locations or ())
    return bool(places) and all(Path(place).resolve().is_relative_to(folder) for place in places)


def _performance(found: bridge_recipes.Found) -> Make:
    """A performance recipe, with the changes of Bridge's own launchers (scripts/performance/run_script.py, and
    scripts/training/run_recipe.py of 0.6): NVIDIA's BF16 numbers use Adam with states of lower precision.

    Only the recipe's own module is imported, because others need packages that this model doesn't (wan: diffusers).
    """
    make = getattr(importlib.import_module(f"{bridge_recipes.MODULE}.{found.module}"), found.name)

    @functools.wraps(make)
    def configure(*args: Any, **kwargs: Any) -> ConfigContainer:
        config = make(*args, **kwargs)
        if bridge_recipes.purpose(found.name).precision == "bf16" and config.optimizer.optimizer == "adam":
            config.optimizer.use_precision_aware_optimizer = True
        if config.checkpoint.save is None:  # as `save` is always set later, the interval must disable saves
            config.checkpoint.save_interval = 0
        return config

    return configure


def made(make: Make, model: Tree, source: ModelSource | None) -> ConfigContainer:
    """The recipe's configuration, from the experiment's arguments, plus the model's folder if the recipe has that
    parameter and the experiment doesn't set it. Arguments that it lacks, and other results, are named."""
    given, parameters, key = model["args"], inspect.signature(make).parameters, f"models.{model['name']}"
    if not any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        for name in given:
            if name not in parameters:
                near = difflib.get_close_matches(name, parameters, n=1)
                known = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(parameters) or 'none'}"
                raise ValueError(f"{key}.args: {model['recipe']} has no argument {name!r}; {known}")
    config = make(**({FOLDER: source.path} if source and FOLDER in parameters else {}) | given)
    if not isinstance(config, ConfigContainer):
        raise ValueError(
            f"{key}.recipe: configure() of {model['recipe']} returns {type(config).__name__}, not a ConfigContainer of "
            "Megatron-Bridge"
        )
    return config


def calls_to(error: BaseException, recipe: str) -> str | None:
    """The calls that led to an error, from the user's recipe on; None if it was raised elsewhere."""
    own = recipe_files.by_place(recipe)
    calls = itertools.dropwhile(lambda call: call.filename not in own, traceback.extract_tb(error.__traceback__))
    if not (told := list(map(_call, calls))):
        return None
    return ", ".join([*told[:CALLS], "...", *told[-CALLS:]] if len(told) > 2 * CALLS else told)


def _call(call: traceback.FrameSummary) -> str:
    path = Path(call.filename.rpartition("site-packages/")[2])
    path = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return f"{path}:{call.lineno}" + ("" if call.name == "<module>" else f" in {call.name}")


def refuse_misspelt(config: ConfigContainer, recipe: str) -> None:
    """Refuse attributes that a recipe's code sets and that the section doesn't have, if it has a field that is spelled
    nearly so: Python would take `config.optimizer.wieght_decay = 0.1` without a word. A longer name, as a recipe's own
    `num_layers_2`, is none of these; Bridge sets further attributes itself."""
    own = recipe_files.assigned(recipe)
    for path, section in _sections(config):
        known = {field.name for field in dataclasses.fields(section)}
        for name in sorted((own & getattr(section, "__dict__", {}).keys()) - known):
            near = difflib.get_close_matches(name, known, n=1, cutoff=SIMILAR)
            if near and name not in near[0] and near[0] not in name and not hasattr(type(section), name):
                kind = type(section).__name__
                raise ValueError(f"{recipe} sets {path}{name}, and {kind} has no such field; did you mean {near[0]}?")


def _sections(section: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """A configuration and the configurations in it, with their paths."""
    yield path, section
    for field in dataclasses.fields(section):
        value = getattr(section, field.name, None)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            yield from _sections(value, f"{path}{field.name}.")


@contextlib.contextmanager
def reading(model: Tree, source: ModelSource | None) -> Iterator[None]:
    """Let a recipe that reads this model's config from the hub read it in the fetched folder instead.

    If the hub doesn't provide a config, the error names the recipe's key.
    """
    read, key = AutoBridge.from_hf_pretrained, f"models.{model['name']}.recipe"

    def from_folder(path: Any, *args: Any, **kwargs: Any) -> AutoBridge:
        if source and str(path) == model.get("hf"):
            return read(source.path, *args, **kwargs)
        where = f"{key}: {str(path)!r}"
        if where in _not_given:
            raise _not_given[where]
        try:
            with hub.reading(where, str(path), f" (`hf download {path} config.json`)"):
                return read(path, *args, **kwargs)
        except hub.HubError as error:
            _not_given[where] = error
            raise

    AutoBridge.from_hf_pretrained = from_folder
    try:
        with hub.reading(f"{key}: what {model['recipe']} reads"):  # for other ways of reading
            yield
    finally:
        AutoBridge.from_hf_pretrained = read


def refuse_another(own: Any, model: Tree, source: ModelSource) -> None:
    """Refuse a recipe that, with overrides, builds another model than the one whose weights and config are used."""
    theirs = provider_of(bridge_of(source), load_weights=False)
    mine, wanted = _architecture(own), _architecture(theirs)
    found = [_named(field, mine[field], wanted[field]) for field in mine if mine[field] != wanted[field]]
    if not found:
        return
    more = f"; and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    key = f"models.{model['name']}"
    raise ValueError(
        f"{key}.recipe: {model['recipe']} makes another model than {source.path}/config.json says: "
        f"{'; '.join(found[:SHOWN])}{more}. Name the recipe of that model, let it read the folder "
        f"(configure({FOLDER})), set the fields by overrides, or remove the folder from {key}"
    )


def refuse_overrides(own: Any, model: Tree, source: ModelSource, overrides: Tree) -> None:
    """Refuse overrides that make another model than the one whose weights are used."""
    fields = {name.removeprefix("model.") for name in overrides} & {*ARCHITECTURE, *FIELDS}
    if not fields:
        return
    mine = _architecture(own)
    theirs = _architecture(provider_of(bridge_of(source), load_weights=False))
    for field in sorted(fields):
        if mine[field] != theirs[field]:
            raise ValueError(
                f"overrides.model.{field}: is {mine[field]!r}, and {theirs[field]!r} in the model whose weights are "
                f"used (models.{model['name']}): remove it; change {_key_of(field) or 'it'} in a copy of its "
                f"config.json if the weights allow that, or set models.{model['name']}.init: scratch"
            )


def _architecture(provider: Any) -> Tree:
    """The fields of the architecture, completed with Megatron's defaults."""
    found = {field: getattr(provider, field, None) for field in (*ARCHITECTURE, *FIELDS)}
    for field, meant in NEUTRAL.items():
        found[field] = meant if found[field] is None else found[field]
    hidden, heads = found["hidden_size"], found["num_attention_heads"]
    found["ffn_hidden_size"] = found["ffn_hidden_size"] or (4 * hidden if hidden else None)
    found["num_query_groups"] = found["num_query_groups"] or heads
    found["kv_channels"] = found["kv_channels"] or (hidden // heads if hidden and heads else None)
    found["window_size"] = list(found["window_size"]) if found["window_size"] else None
    found["activation_func"] = getattr(found["activation_func"], "__name__", None)
    if not found["rope_scaling"]:  # megatron-core doesn't read the factor then
        found["rope_scaling_factor"] = None
    if found["multi_latent_attention"]:
        found |= dict.fromkeys(("num_query_groups", "kv_channels"))  # it has ranks and sizes of its own instead
    if found["num_moe_experts"]:
        found["moe_ffn_hidden_size"] = found["moe_ffn_hidden_size"] or found["ffn_hidden_size"]
        every, layers = found["moe_layer_freq"], range(found["num_layers"] or 0)
        found["moe_layer_freq"] = [int(n % every == 0) for n in layers] if isinstance(every, int) else every
    else:
        found |= {field: None for field in found if field.startswith("moe_")}
    return found


def _named(field: str, own: Any, theirs: Any) -> str:
    """A difference between recipe and model, with the key of config.json if Bridge knows it."""
    key = _key_of(field)
    return f"model.{field} is {own!r} in the recipe and {theirs!r} there" + (f" ({key})" if key else "")


def _key_of(field: str) -> str | None:
    """The key of config.json for a field, if Bridge knows it."""
    return next((key for key, name in MegatronModelBridge.CONFIG_MAPPING if name == field), None)
