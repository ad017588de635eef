"""What a model of this config must consist of, whatever its weights: all experts, the vocabulary, tied embeddings."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING

from megaboa.bridge.compare import listed, same_bits
from megaboa.bridge.tensors import Kind, Tensors
from megaboa.bridge.verdict import check
from megaboa.records import Check

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

EXPERT = re.compile(r"^(?P<before>.*\.experts)\.(?P<number>\d+)\.(?P<after>.+)$")
FUSED = re.compile(r"\.experts\.[a-z_]+$")  # all experts of a layer in one tensor, as GPT-OSS has them
COUNTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
EMBEDDINGS, HEAD = re.compile(r"(^|\.)embed_tokens\.weight$"), re.compile(r"(^|\.)lm_head\.weight$")


def complete(weights: Tensors, config: PreTrainedConfig) -> list[Check]:
    text = config.get_text_config()
    kinds = weights.kinds()
    experts = next((count for name in COUNTS if (count := getattr(text, name, None))), 0)
    return [*([_experts(kinds, experts)] if experts else []), *_vocabulary(weights, kinds, text)]


def _experts(kinds: dict[str, Kind], count: int) -> Check:
    """Every layer that has experts has all of them, each with the same tensors."""
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


def _vocabulary(weights: Tensors, kinds: dict[str, Kind], config: PreTrainedConfig) -> list[Check]:
    """As many rows as the config says, without Megatron's padding; a tied head is the embedding, or isn't there."""
    rows = {name: kind.shape[0] for name, kind in kinds.items() if EMBEDDINGS.search(name) or HEAD.search(name)}
    if not any(EMBEDDINGS.search(name) for name in rows):
        return []  # a family that calls them otherwise
    wrong = [f"{name} ({count})" for name, count in rows.items() if count != config.vocab_size]
    found = [check("vocabulary", not wrong, f"{config.vocab_size} rows" + listed("not so many", wrong))]
    head = next((name for name in rows if HEAD.search(name)), None)
    if not config.tie_word_embeddings:
        return [*found, check("head", head is not None, f"of its own: {head}" if head else "lm_head is missing")]
    embeddings = next(name for name in rows if EMBEDDINGS.search(name))
    tied = head is None or same_bits(weights[head], weights[embeddings])
    return [*found, check("head", tied, "tied to the embedding" if tied else f"{head} is not {embeddings}")]
