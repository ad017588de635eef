"""The keys that a Hugging Face config of each family can have: those of the installed transformers' config classes, and
those that the installed Megatron-Bridge reads without a declaration; and the types that these classes declare."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import typing
from collections.abc import Iterable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megaboa.records import Tree

READERS = {"getattr", "hasattr"}
NUMBERS = ({float}, {float, int})
NO_KEYS = {"config", "to_json_string"}  # attributes of the config class, or of the object that holds the config
# Keys that real configs have, and that transformers accepts or ignores without declaring them.
TAKEN = (
    *("_name_or_path", "_attn_implementation", "attn_implementation", "auto_map", "model_type", "output_attentions"),
    *("partial_rotary_factor", "pretraining_tp", "quantization_config", "rope_scaling", "rope_theta", "torch_dtype"),
    *("aux_loss_alpha", "ep_size", "moe_layer_freq", "norm_topk_prob", "seq_aux", "topk_method", "use_mrope"),
)


def found(families: Iterable[str]) -> Tree:
    """The content of config/config_keys.json, so that the plan needs no import of transformers."""
    from transformers import CONFIG_MAPPING, PretrainedConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    common = {*keys_of(PretrainedConfig), *TAKEN}
    classes = {name: CONFIG_MAPPING[name] for name in families}
    types = types_of(classes.values())
    return {
        "transformers": version("transformers"),
        "bridge": version("megatron-bridge"),
        "common": sorted(common),
        "families": {
            name: sorted((keys_of(one) | read_by_bridge(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(name))) - common)
            for name, one in classes.items()
        },
        "parts": {
            name: {part: inner.model_type for part, inner in one.sub_configs.items() if inner.model_type in classes}
            for name, one in classes.items()
            if one.sub_configs
        },
        "types": {name: kind for name, (kind, _) in types.items()},
        "needed": sorted(name for name, (_, takes_null) in types.items() if not takes_null),
    }


def types_of(classes: Iterable[Any]) -> dict[str, tuple[str, bool]]:
    """The keys that every class declares as a number, or as true or false, with the widest type and whether a class
    takes null."""
    declared: dict[str, set[Any]] = {}
    for one in classes:
        for field in dataclasses.fields(one):
            declared.setdefault(field.name, set()).update(typing.get_args(field.type) or (field.type,))
    kinds = {name: (hints - {type(None)}, type(None) in hints) for name, hints in declared.items()}
    wide = {frozenset({bool}): "bool", frozenset({int}): "int"} | dict.fromkeys(map(frozenset, NUMBERS), "float")
    return {
        name: (wide[frozenset(hints)], takes_null)
        for name, (hints, takes_null) in kinds.items()
        if frozenset(hints) in wide
    }


def keys_of(config: Any) -> set[str]:
    """Fields of a config class and their aliases, including older names that its code takes from kwargs."""
    aliases = config.attribute_map
    sources = [inspect.getsource(one) for one in config.__mro__ if one.__module__.startswith("transformers.models")]
    older = {name for source in sources for name in re.findall(r"""kwargs\.(?:pop|get)\(["'](\w+)["']""", source)}
    return {*(one.name for one in dataclasses.fields(config)), *aliases, *aliases.values(), *config.sub_configs, *older}


def read_by_bridge(model: str | None) -> set[str]:
    """Config attributes read by the source of a model class's converter, or by code that all converters share."""
    spec = find_spec("megatron")
    models = Path(next(iter(spec.submodule_search_locations or ()))) / "bridge" / "models" if spec else Path()
    registered = re.compile(rf"source=[\"']?{model}\b")
    folders = [models / "conversion"]
    folders += {path.parent for path in models.rglob("*.py") if registered.search(path.read_text(encoding="utf-8"))}
    trees = [ast.parse(path.read_text(encoding="utf-8")) for folder in folders for path in folder.glob("*.py")]
    names = {name for tree in trees for node in ast.walk(tree) for name in names_in(node)}
    return {name for name in names if name.isidentifier()} - NO_KEYS


def names_in(node: ast.AST) -> set[str]:
    """Keys in `getattr(hf_config, "x", None)`, `hf_config.get("x")`, and tables whose name contains CONFIG_MAPPING."""
    match node:
        case ast.Call(func=ast.Name(id=called), args=[read, ast.Constant(value=str(name)), *_]) if called in READERS:
            return {name} if is_config(read) else set()
        case ast.Call(func=ast.Attribute(value=read, attr="get"), args=[ast.Constant(value=str(name)), *_]):
            return {name} if is_config(read) else set()
        case ast.Attribute(value=read, attr=name, ctx=ast.Load()) if is_config(read) and name not in dir(dict):
            return {name}
        case ast.Assign(targets=[ast.Name(id=table)], value=ast.List(elts=pairs)) if "CONFIG_MAPPING" in table:
            return {pair.elts[0].value for pair in pairs if isinstance(pair, ast.Tuple)}
    return set()


def is_config(node: ast.AST) -> bool:
    """Whether a node of the source is a Hugging Face config, by its name."""
    return isinstance(node, ast.Name | ast.Attribute) and ast.unparse(node).split(".")[-1] in (
        *("hf_config", "hf_text_config", "text_config", "llm_config"),
    )
