"""Heads for multi-token prediction: their tensors in Hugging Face's format, and their loss in fine-tuned runs.

transformers doesn't build such heads. It ignores their tensors, which Bridge converts.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from megatron.bridge import AutoBridge
from megatron.core.models.gpt import GPTModel
from transformers import PreTrainedConfig

from megaboa.bridge.masks import Batch, giving, of_this_rank
from megaboa.bridge.source import saved_tensors
from megaboa.bridge.tensor_checks import LAYER, PREDICTION, of_prediction
from megaboa.model_kinds import PREDICTION_KEYS

SHARED = re.compile(r"\.(?:embed_tokens|shared_head\.head)\.weight$")
# Parameters that other layers don't have, by their sizes in hidden sizes.
OWN = {"enorm": (1,), "hnorm": (1,), "final_layernorm": (1,), "eh_proj": (1, 2)}


def written_tensors(config: PreTrainedConfig) -> dict[str, torch.Tensor]:
    """The tensors that Bridge writes for a model with this config, on the meta device: those that transformers would
    save, and those of the heads, whose layers are like the last one."""
    saved, text = saved_tensors(config), config.get_text_config()
    if not any(getattr(text, key, 0) for key in PREDICTION_KEYS):
        return saved
    layer = {
        found["name"]: tensor
        for name, tensor in saved.items()
        if (found := LAYER.match(name)) and int(found["number"]) == text.num_hidden_layers - 1
    }
    like = next(iter(saved.values()))
    written = dict(saved)
    for mapping in AutoBridge.from_hf_config(config)._model_bridge.mapping_registry():
        if not mapping.megatron_param.startswith(PREDICTION):
            continue
        own = OWN.get(mapping.megatron_param.split(".")[-2])
        for name in [mapping.hf_param] if isinstance(mapping.hf_param, str) else mapping.hf_param.values():
            if own:
                written[name] = like.new_empty([text.hidden_size * times for times in own])
            elif found := LAYER.match(name):
                wanted = re.compile(re.escape(found["name"]).replace(r"\*", r"\d+"))
                prefix = f"{found['before']}{found['number']}."
                written |= {prefix + part: tensor for part, tensor in layer.items() if wanted.fullmatch(part)}
    return written


def with_copies(
    written: Iterable[tuple[str, torch.Tensor]], names: Iterable[str], config: PreTrainedConfig
) -> Iterator[tuple[str, torch.Tensor]]:
    """What Bridge writes, and the embeddings and output layers that folders repeat for each head: Megatron has them
    once. `names`: the tensors of the model's folder."""
    copies = defaultdict(list)
    for name in names:
        if of_prediction(name, config) and (shared := SHARED.search(name)):
            copies["embed_tokens" if "embed_tokens" in shared[0] else "lm_head"].append(name)
    for name, tensor in written:
        yield name, tensor
        for copy in copies.get(name.removesuffix(".weight").rpartition(".")[2], ()):
            yield copy, tensor.clone()  # safetensors refuses two names for the same memory


def masked(forward_step: Callable[..., Any]) -> Callable[..., Any]:
    """The forward step of a fine-tuned run, whose heads learn from the tokens that count, as the model does.

    Bridge's forward step gives the mask of the loss to no model. Without it heads learn prompts and padding, too.
    """
    return giving(forward_step, _mask)


def _mask(batch: Batch, chunk: torch.nn.Module) -> dict[str, torch.Tensor]:
    has_heads = isinstance(chunk, GPTModel) and chunk.post_process
    return {"loss_mask": of_this_rank(batch, "loss_mask", chunk)} if has_heads else {}
