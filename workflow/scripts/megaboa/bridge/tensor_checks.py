"""Checks of models' tensors: completeness, equality between two models, and change by training.

Needs torch, but no Megatron.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from safetensors.torch import _TYPES

from megaboa.bridge.verdict import check
from megaboa.bridge.weights import Kind, Tensors
from megaboa.formats import some_of
from megaboa.model_kinds import PREDICTION_KEYS
from megaboa.records import Check

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

SHOWN = 5
# Safetensors' names for types.
DTYPE_NAMES = {dtype: name for name, dtype in _TYPES.items()}
NORM = re.compile(r"norm[^.]*\.weight$")
FLOATS = {name for name, dtype in _TYPES.items() if dtype.is_floating_point}
EXPERT = re.compile(r"^(?P<before>.*\.experts)\.(?P<number>\d+)\.(?P<after>.+)$")
FUSED = re.compile(r"\.experts\.[a-z_]+$")  # all experts of a layer in one tensor, as in GPT-OSS
# Names of heads for multi-token prediction: some families have layers behind the model's last, the others `mtp`.
PREDICTION = re.compile(r"(?:model\.(?:language_model\.)?layers\.(?P<layer>\d+)|mtp)\.")
COUNTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
EMBEDDINGS, HEAD = re.compile(r"(^|\.)embed_tokens\.weight$"), re.compile(r"(^|\.)lm_head\.weight$")


def same_kinds(expected: dict[str, Kind], found: dict[str, Kind], dtype: str | None = None) -> Check:
    """Check that exactly the expected tensors are there, with their shapes and types.

    `dtype`: type that training may have converted other types to.
    """
    if dtype:
        expected = {name: _retyped(kind, found.get(name), dtype) for name, kind in expected.items()}
    missing = sorted(expected.keys() - found.keys())
    extra = sorted(found.keys() - expected.keys())
    changed = [
        f"{name} ({found[name]}, not {expected[name]})"
        for name in sorted(expected.keys() & found.keys())
        if expected[name] != found[name]
    ]
    right = len(expected) - len(missing) - len(changed)
    detail = f"{right} of {len(expected)} tensors have their name, shape and type"
    detail += listed("missing", missing) + listed("not in the model", extra) + listed("changed", changed)
    return check("tensors", not (missing or extra or changed), detail)


def round_trip(originals: Tensors, returned: Iterable[tuple[str, torch.Tensor]]) -> list[Check]:
    """Compare tensors that were converted to Megatron and back with the originals, one at a time."""
    kinds: dict[str, Kind] = {}
    differing = []
    for name, tensor in returned:
        kinds[name] = Kind(tuple(tensor.shape), DTYPE_NAMES[tensor.dtype])
        if name not in originals or kinds[name] != originals.kind(name) or not same_bits(tensor, originals[name]):
            differing.append(name)
    detail = f"{len(kinds) - len(differing)} of {len(originals)} tensors are the same bit for bit"
    return [
        same_kinds(originals.kinds(), kinds),
        check("round trip", not differing and len(kinds) == len(originals), detail + listed("different", differing)),
    ]


def trained(before: Tensors, after: Tensors) -> Check:
    """Check that the weights have changed since the start of training."""
    common = [name for name in before if name in after and before.kind(name).shape == after.kind(name).shape]
    changed = sum(not same_bits(before[name].to(after[name].dtype), after[name]) for name in common)
    return check("trained", changed > 0, f"{changed} of {len(common)} tensors differ from those of the source")


def trained_from_scratch(after: Tensors, dtype: torch.dtype) -> tuple[Check | None, str | None]:
    """Check that training has changed the scales of norms. If that can't be checked, return the reason instead.

    They start as a constant. The initial values of other weights are random and not kept.
    """
    norms = [name for name in after if NORM.search(name)]
    moved = sum(bool((after[name] != after[name].flatten()[0]).any()) for name in norms)
    detail = f"{moved} of {len(norms)} norms are no longer the constant that they started as"
    if not norms:
        return None, "the model has no norms, whose start is known"
    if not moved and dtype != torch.float32:
        return None, f"{detail}; {str(dtype).removeprefix('torch.')} may be too coarse to show it"
    return check("trained", moved > 0, detail), None


def complete(weights: Tensors, config: PreTrainedConfig) -> list[Check]:
    """Check what any model with this config must have: all experts, the whole vocabulary, tied embeddings."""
    text = config.get_text_config()
    kinds = weights.kinds()
    # models with several parts may only say it at the top level
    tied = getattr(text, "tie_word_embeddings", None)
    tied = config.tie_word_embeddings if tied is None else tied
    experts = next((count for name in COUNTS if (count := getattr(text, name, None))), 0)
    return [
        *([_has_experts(kinds, experts)] if experts and not _is_dense(text) else []),
        *_has_vocabulary(weights, kinds, text.vocab_size, tied),
    ]


def _is_dense(text: PreTrainedConfig) -> bool:
    """Whether no layer has experts: in a DeepSeek-V3 of three layers all are among the first, dense ones, and a hybrid
    model has kinds of layers (Nemotron-H, whose config has a number of experts in any case)."""
    kinds = getattr(text, "layers_block_type", None)
    if kinds and "moe" not in kinds:
        return True
    return (getattr(text, "first_k_dense_replace", None) or 0) >= text.num_hidden_layers


def _has_experts(kinds: dict[str, Kind], count: int) -> Check:
    """Check that every layer with experts has all of them, each with the same tensors."""
    numbers: dict[str, set[int]] = defaultdict(set)
    for match in filter(None, map(EXPERT.match, kinds)):
        numbers[f"{match['before']}.*.{match['after']}"].add(int(match["number"]))
    wrong = [
        f"{name} lacks {sorted(set(range(count)) - found)}" if found < set(range(count)) else f"{name} has {len(found)}"
        for name, found in sorted(numbers.items())
        if found != set(range(count))
    ]
    fused = {name: kind.shape[0] for name, kind in kinds.items() if FUSED.search(name)}
    wrong += [f"{name} holds {found}" for name, found in sorted(fused.items()) if found != count]
    groups = len(numbers) + len(fused)
    detail = f"{count} experts in each of {groups} groups of tensors"
    return check("experts", groups > 0 and not wrong, detail + listed("incomplete", wrong))


def _has_vocabulary(weights: Tensors, kinds: dict[str, Kind], size: int, tied: bool) -> list[Check]:
    """Check that the vocabulary has the config's size, without Megatron's padding, and that a tied head is the
    embedding or missing."""
    rows = {name: kind.shape[0] for name, kind in kinds.items() if EMBEDDINGS.search(name) or HEAD.search(name)}
    if not any(EMBEDDINGS.search(name) for name in rows):
        return []  # a family with other names
    wrong = [f"{name} ({count})" for name, count in rows.items() if count != size]
    found = [check("vocabulary", not wrong, f"{size} rows" + listed("not so many", wrong))]
    head = next((name for name in rows if HEAD.search(name)), None)
    if not tied:
        return [*found, check("head", head is not None, f"of its own: {head}" if head else "lm_head is missing")]
    embeddings = next(name for name in rows if EMBEDDINGS.search(name))
    same = head is None or same_bits(weights[head], weights[embeddings])
    return [*found, check("head", same, "tied to the embedding" if same else f"{head} is not {embeddings}")]


def of_prediction(name: str, config: PreTrainedConfig) -> bool:
    """Whether a tensor belongs to a head for multi-token prediction, which transformers doesn't build."""
    text, found = config.get_text_config(), PREDICTION.match(name)
    if not found or not any(getattr(text, key, 0) for key in PREDICTION_KEYS):
        return False
    return found["layer"] is None or int(found["layer"]) >= text.num_hidden_layers


def kinds(tensors: dict[str, torch.Tensor]) -> dict[str, Kind]:
    return {name: Kind(tuple(tensor.shape), DTYPE_NAMES[tensor.dtype]) for name, tensor in tensors.items()}


def _retyped(expected: Kind, found: Kind | None, dtype: str) -> Kind:
    both_float = found is not None and expected.dtype in FLOATS and found.dtype == dtype
    return dataclasses.replace(expected, dtype=dtype) if both_float else expected


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether tensors are equal in every bit, so that NaN equals itself and 0.0 is not -0.0."""
    return torch.equal(_bytes(one), _bytes(other))


def listed(what: str, names: list[str]) -> str:
    """The first few names, formatted as an addition to a sentence; empty for an empty list."""
    return f"; {what}: {some_of(names, SHOWN)}" if names else ""


def bits_digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(_bytes(tensor).numpy().data).hexdigest()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
