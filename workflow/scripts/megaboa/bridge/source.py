"""Models in the form of `transformers`: made from a config, found in a folder, or fetched from the hub.

Exported models take their config and tokenizer from here. Nothing here needs Megatron.
"""

from __future__ import annotations

import difflib
import inspect
import itertools
import os
import shutil
import sys
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from megaboa import store
from megaboa.bridge import weights
from megaboa.bridge.card import origin
from megaboa.bridge.quiet import quietly
from megaboa.bridge.random_weights import PIECE, drawn_in_pieces
from megaboa.check import hidden_act, rope
from megaboa.data import hub, tokenizer
from megaboa.errors import InputError, naming
from megaboa.files import digest, file_digest, folder_digests, read_json, write_json
from megaboa.model_kinds import BY_NAME, PREDICTION_KEYS
from megaboa.records import ModelSource, ModelSpec, RunSpec, Tree
from megaboa.store_paths import FACTS

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel
    from transformers.models.auto.auto_factory import _BaseAutoModelClass

GENERATION = "generation_config.json"
CONFIG_FILES = ["config.json", GENERATION]
WEIGHT_FILES = ["*.safetensors", "*.safetensors.index.json"]
TEMPLATE_FILES = "chat_template*"
LEGAL_FILES = ["LICENSE*", "LICENCE*", "NOTICE*"]
TOKENIZER_FILES = [*tokenizer.FILES, TEMPLATE_FILES]
# Keys that transformers converts when it reads a config.
CONVERTED_KEYS = {"rope_theta", "rope_scaling", "partial_rotary_factor", "torch_dtype"}
SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
# Kernels for GPUs, and parts made of them, under their names in transformers' modules: None where none is installed.
GPU_KERNELS = {"causal_conv1d_fn", "causal_conv1d_update", "chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"}
GPU_KERNELS |= {"FusedRMSNormGated"}
# Size of the perturbation of one-dimensional weights (norms, biases), which would otherwise be identical.
PERTURBATION = 0.02


class Found(NamedTuple):
    """The folder of a model."""

    path: Path
    digest: str
    commit: str | None = None  # on the hub


def obtain(spec: ModelSpec) -> ModelSource:
    """The manifest of the model that a specification describes; the model is made or fetched if necessary.

    If `weights` is false (the model's runs start from random weights), its folder needs no weights.
    """
    key = f"models.{spec.name}"
    named = tokenizer.resolve(spec.tokenizer, f"{key}.tokenizer") if spec.tokenizer else None
    found = _find(spec, f"{key}.hf") if spec.config is None else _make(spec, named, key)
    used = named or tokenizer.find(str(found.path))
    config = read_config(found.path, key)
    refuse_lost_settings(spec.name, found.path)
    vocab_size = config.get_text_config().vocab_size
    if spec.config is None and spec.weights:
        _require_fit(config, found.path, f"{key}.hf")
    if used:
        _check_vocabulary(used, vocab_size, f"{key}.tokenizer", spec.hf)
    local = spec.hf is not None and found.commit is None
    return ModelSource(
        name=spec.name,
        path=str(found.path),
        revision=found.commit,
        digest=found.digest,
        tokenizer=used.path if used else None,
        tokenizer_digest=used.digest if used else None,
        vocab_size=vocab_size,
        params=weights.count(found.path) or _on_meta_device(config).num_parameters(),
        dtype=str(config.dtype or "float32").removeprefix("torch."),
        device=spec.device,
        weights=spec.weights,
        chat_template=_digest_of_template(used.path) if used else None,
        folder=_behind_links(found.path) if local else None,
        origin=origin(found.path) if local and spec.weights else None,
    )


def base_of_adapters(run: RunSpec, source: ModelSource) -> str:
    """The base model, as exported adapters name it: an id of the hub, a folder, or the parent run. The folder is the
    one that was read, because a link to a run's export leads to another one after the next."""
    if run.parent:
        return str(run.parent)
    return run.model["hf"] if source.revision else str(Path(source.folder or source.path).resolve())


def _behind_links(folder: Path) -> str | None:
    """The folder to which a path leads, seen from here where it is below; None if there is no link on the way."""
    real = folder.resolve()
    if real == Path(os.path.normpath(folder.absolute())):
        return None
    here = Path.cwd()
    return str(real.relative_to(here) if real.is_relative_to(here) else real)


def refuse_lost_settings(name: str, folder: str | Path) -> None:
    """Refuse a model with rotary positions or an activation that Bridge's converter would lose."""
    config = read_json(Path(folder) / "config.json")
    if lost := rope.lost(config) or hidden_act.lost(config):
        raise InputError(f"models.{name}: {folder}/config.json: {lost}")


def has_weights(source: ModelSource) -> bool:
    """Whether runs use the weights in the model's folder. A model that is trained from scratch may have unused ones."""
    return bool(weights.files(source.path)) if source.weights is None else source.weights


def saved_tensors(config: PreTrainedConfig) -> dict[str, torch.Tensor]:
    """The tensors that transformers would save for a model with this config, on the meta device, so without values."""
    from transformers.core_model_loading import revert_weight_conversion

    model = _on_meta_device(config, dtype=config.dtype)
    unsaved = {*model.all_tied_weights_keys, *(model._keys_to_ignore_on_save or ())}
    saved = revert_weight_conversion(model, {k: v for k, v in model.state_dict().items() if k not in unsaved})
    exact = model._keep_in_fp32_modules_strict or ()  # kept in fp32, whatever the other types are
    return {k: v.float() if any(part in k for part in exact) else v for k, v in saved.items()}


def class_of(config: PreTrainedConfig) -> type[_BaseAutoModelClass]:
    """The automatic class of transformers for a config's complete model, not only its decoder."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    sees = BY_NAME["vlm"].families
    found = AutoModelForImageTextToText if config.model_type in sees else AutoModelForCausalLM
    _without_gpu_kernels(found, config)
    return found


def _without_gpu_kernels(automatic: type[_BaseAutoModelClass], config: PreTrainedConfig) -> None:
    """Let transformers' model compute on the CPU, as it does here: where flash-linear-attention and causal-conv1d are
    installed, Qwen3-Next's would call their kernels for GPUs."""
    if (model := automatic._model_mapping.get(type(config), None)) is not None:
        module = sys.modules[model.__module__]
        vars(module).update(dict.fromkeys(vars(module).keys() & GPU_KERNELS))


def read_config(folder: str | Path, key: str) -> PreTrainedConfig:
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, StrictDataclassError) as error:
        why = f"transformers {version('transformers')} can't read it: {_on_one_line(error)}"
        raise InputError(f"{key}: {folder}: {why}") from error


def copy_settings(source: ModelSource, dtype: str, folder: Path) -> None:
    """Copy everything of an exported model but the weights: configs, tokenizer, chat template, licence.

    These are the source's own files; only the type of the weights comes from the training.
    """
    origin = Path(source.path)
    config = read_json(origin / "config.json")
    config.pop("torch_dtype", None)
    write_json(folder / "config.json", {**config, "dtype": dtype})
    _generation_config(origin, folder)
    for name in _tokenizer_files(source.tokenizer):
        shutil.copyfile(Path(source.tokenizer, name), folder / name)
    for path in _legal_files(origin):
        shutil.copyfile(path, folder / path.name)


def settings_digests(source: ModelSource) -> dict[str, str]:
    """Digests of files that change an export, but no training."""
    templates = [Path(source.tokenizer, name) for name in _tokenizer_files(source.tokenizer)]
    given = Path(source.path, GENERATION)
    others = [*([given] if given.exists() else []), *_legal_files(Path(source.path))]
    return {path.name: file_digest(path) for path in [*templates, *others]}


def _legal_files(folder: Path) -> list[Path]:
    return sorted(path for pattern in LEGAL_FILES for path in folder.glob(pattern) if path.is_file())


def _tokenizer_files(folder: str | None) -> list[str]:
    """Names of a tokenizer's files, including its chat template; none if the model has no tokenizer."""
    if folder is None:
        return []
    return sorted({path.name for pattern in TOKENIZER_FILES for path in Path(folder).glob(pattern)})


def _digest_of_template(folder: str) -> str | None:
    found = {path.name: file_digest(path) for path in Path(folder).glob(TEMPLATE_FILES) if path.is_file()}
    return digest(found) if found else None


def _generation_config(origin: Path, folder: Path) -> None:
    """Write the source's generation config, or the one that its config implies."""
    from transformers import AutoConfig, GenerationConfig

    given = origin / GENERATION
    if given.exists():
        shutil.copyfile(given, folder / given.name)
        return
    config = AutoConfig.from_pretrained(origin, local_files_only=True)
    GenerationConfig.from_model_config(config).save_pretrained(folder)


def _find(spec: ModelSpec, key: str) -> Found:
    """Find a model: a local folder is used in place, a Hugging Face id is fetched into the hub's cache."""
    patterns = [*CONFIG_FILES, *TOKENIZER_FILES, *(WEIGHT_FILES if spec.weights else [])]
    folder = Path(spec.hf)
    if folder.is_dir():
        if spec.revision:
            raise InputError(f"{key}: {folder} is a local folder, which has no revision {spec.revision!r}")
        commit = None
        files = sorted(set(itertools.chain.from_iterable(folder.glob(pattern) for pattern in patterns)))
        # Files that change an export, but not every training, aren't part of the model's identity.
        files = [path for path in files if path.name != GENERATION and not path.name.startswith("chat_template")]
        content = digest({path.name: file_digest(path) for path in files})
    else:
        folder, commit = hub.download(spec.hf, spec.revision, [*patterns, *LEGAL_FILES], key)
        content = digest({"hub": spec.hf, "commit": commit, "weights": spec.weights})
    if not (folder / "config.json").exists():
        raise InputError(f"{key}: {folder} has no config.json; name the folder of a Hugging Face model")
    if spec.weights and not weights.files(folder):
        raise InputError(
            f"{key}: {folder} has no *.safetensors; save its weights in that form, "
            "or set `init: scratch` to start from random ones"
        )
    if spec.weights:
        with naming(key):
            weights.require_whole(folder)
    return Found(folder, content, commit)


def _require_fit(config: PreTrainedConfig, folder: Path, key: str) -> None:
    """Refuse weights that are not those of the config next to them.

    Tensors under names that transformers doesn't save, such as quantized ones, aren't judged: the proof decides.
    """
    from megaboa.bridge.tensor_checks import of_prediction

    expected = saved_tensors(config)
    with weights.Tensors(folder) as tensors:
        found = {name: kind for name, kind in tensors.kinds().items() if not of_prediction(name, config)}
    remedy = "correct it, or download or copy the folder again"
    for name in sorted(expected.keys() & found.keys()):
        shape, wanted = list(found[name].shape), list(expected[name].shape)
        if found[name].is_float and shape != wanted:
            raise InputError(
                f"{key}: {folder}/config.json makes {name} {wanted}, and the weights have {shape}: {remedy}"
            )
    missing = sorted(expected.keys() - found.keys())
    if missing and found.keys() <= expected.keys():
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise InputError(f"{key}: {folder}/config.json asks for {missing[0]}{more}, which the weights lack: {remedy}")


def _make(spec: ModelSpec, named: tokenizer.Reference | None, key: str) -> Found:
    """Make a model from a config in the store, together with its tokenizer."""
    import torch

    identity = {
        "config": spec.config,
        "seed": spec.seed,
        "weights": spec.weights,
        "tokenizer": named.digest if named else None,
        "transformers": version("transformers"),
        "torch": torch.__version__,
        **({"pieces": PIECE} if spec.weights else {}),
    }
    folder = store.folder(spec.store, "models", spec.name, identity)
    with store.building(folder, part="hf") as partial:
        if partial:
            config = _config(spec.config, named, f"{key}.config")
            loaded = tokenizer.load(named) if named else None
            if spec.weights:
                _refuse_heads(config, f"{key}.config")
                with quietly():
                    _random_model(config, spec.seed).save_pretrained(partial / "hf")
                weights.share(partial / "hf")
            else:
                config.architectures = [type(_on_meta_device(config)).__name__]
                config.save_pretrained(partial / "hf")
            if loaded:
                loaded.save_pretrained(str(partial / "hf"))
            write_json(partial / FACTS, {"digest": digest(folder_digests(partial / "hf"))})
    return Found(folder / "hf", read_json(folder / FACTS)["digest"])


def _refuse_heads(config: PreTrainedConfig, key: str) -> None:
    if asked := next((name for name in PREDICTION_KEYS if getattr(config.get_text_config(), name, 0)), None):
        raise InputError(
            f"{key}.{asked}: weights that are made from a config have no heads for multi-token prediction, because "
            "transformers doesn't build them: set it to 0, or init: scratch, or name a model that has them (hf)"
        )


def _config(given: Tree, named: tokenizer.Reference | None, key: str) -> PreTrainedConfig:
    """The config, with missing values about the vocabulary taken from the tokenizer."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING, AutoConfig

    values = dict(given)
    model_type = values.pop("model_type", None)
    if model_type not in CONFIG_MAPPING:
        meant = _nearest(model_type, CONFIG_MAPPING)
        raise InputError(f"{key}.model_type: {model_type!r} is not a model type of transformers{meant}")
    known = _known_keys(CONFIG_MAPPING[model_type])
    for name in values:
        # transformers takes any key, and some models read keys that their config class does not declare.
        if name not in known and (meant := _nearest(name, known, cutoff=0.85)):
            raise InputError(f"{key}.{name}: {model_type} has no such setting{meant}")
    if named:
        loaded = tokenizer.load(named)
        defaults = {"vocab_size": len(loaded)} | {name: getattr(loaded, name) for name in SPECIAL_TOKENS}
        if "text_config" in values:  # the vocabulary is the decoder's
            values["text_config"] = defaults | values["text_config"]
        else:
            values = defaults | values
    values.setdefault("dtype", values.pop("torch_dtype", "float32"))
    try:
        return AutoConfig.for_model(model_type, **values)
    except (ValueError, TypeError, ArithmeticError, StrictDataclassError) as error:
        raise InputError(f"{key}: transformers refuses it: {_on_one_line(error)}") from error


def _known_keys(config_class: type[PreTrainedConfig]) -> set[str]:
    parameters = set(inspect.signature(config_class).parameters)
    return parameters | set(config_class().to_dict()) | set(config_class.attribute_map) | CONVERTED_KEYS


def _nearest(word: Any, words: Iterable[str], cutoff: float = 0.6) -> str:
    close = difflib.get_close_matches(str(word), list(words), n=1, cutoff=cutoff)
    return f"; did you mean {close[0]!r}?" if close else ""


def _on_one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _random_model(config: PreTrainedConfig, seed: int) -> PreTrainedModel:
    import torch

    with drawn_in_pieces(seed):
        model = class_of(config).from_config(config, dtype=config.dtype)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 1:
                weight.add_(torch.randn_like(weight) * PERTURBATION)
    return model


def _on_meta_device(config: PreTrainedConfig, **options: Any) -> PreTrainedModel:
    """The model without memory for its weights."""
    import torch

    with torch.device("meta"):
        return class_of(config).from_config(config, **options)


def _check_vocabulary(used: tokenizer.Reference, vocab_size: int, key: str, hf: str | None) -> None:
    size = len(tokenizer.load(used))
    if size > vocab_size:
        remedy = (
            f"resize_token_embeddings({size}) of transformers adds rows: save that model, with this tokenizer, to a "
            f"folder, and name it instead of {hf} (docs/how-to/huggingface.md, More tokens)"
        )
        raise InputError(
            f"{key}: the tokenizer {used.path} has {size} tokens, more than the model's vocab_size of {vocab_size}; "
            f"{remedy if hf else 'raise vocab_size'}, or take another tokenizer"
        )
