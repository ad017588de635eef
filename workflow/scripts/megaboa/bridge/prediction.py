"""Heads for multi-token prediction: their tensors in Hugging Face's format, and their loss in fine-tuned runs.

transformers doesn't build such heads. It ignores their tensors, which Bridge converts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from megatron.bridge.models.hf_pretrained.state import DictStateSource
from megatron.core.models.gpt import GPTModel
from megatron.core.models.hybrid.hybrid_model import HybridModel
from transformers import PreTrainedConfig

from megaboa.bridge.masks import Batch, giving, of_this_rank
from megaboa.bridge.source import saved_tensors
from megaboa.bridge.tensor_checks import EMBEDDINGS, HEAD, of_prediction

COPY = re.compile(r"\.(?:embed_tokens|shared_head\.head)\.weight$")  # folders repeat it for each head


class Saved(DictStateSource):
    """What transformers would save for a model with this config, on the meta device, and whatever belongs to a head:
    only Bridge knows the names of its tensors."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(saved_tensors(config))
        self._names = _Names(self._dict, config)

    def get_all_keys(self) -> list[str]:
        return self._names


class _Names(list[str]):
    def __init__(self, names: Iterable[str], config: PreTrainedConfig) -> None:
        super().__init__(sorted(names))
        self._saved, self._config = set(names), config

    def __contains__(self, name: object) -> bool:
        return name in self._saved or of_prediction(str(name), self._config)


def with_copies(
    written: Iterable[tuple[str, torch.Tensor]], names: Iterable[str], config: PreTrainedConfig
) -> Iterator[tuple[str, torch.Tensor]]:
    """What Bridge writes, and then the heads' copies of embeddings and output layer that it leaves out.

    `names`: the tensors of the model's folder.
    """
    missing = {name for name in names if of_prediction(name, config) and COPY.search(name)}
    embeddings = head = None
    for name, tensor in written:
        missing.discard(name)
        if missing and not of_prediction(name, config):
            embeddings = tensor if EMBEDDINGS.search(name) else embeddings
            head = tensor if HEAD.search(name) else head
        yield name, tensor
    for name in sorted(missing):
        original = embeddings if EMBEDDINGS.search(name) or head is None else head  # tied, it isn't written
        if original is not None:
            yield name, original.clone()  # safetensors refuses two names for the same memory


def masked(forward_step: Callable[..., Any]) -> Callable[..., Any]:
    """The forward step of a fine-tuned run, whose heads learn from the tokens that count, as the model does.

    Bridge's forward step gives the mask of the loss to no model. Without it heads learn prompts and padding, too.
    """
    return giving(forward_step, _mask)


def _mask(batch: Batch, chunk: torch.nn.Module) -> dict[str, torch.Tensor]:
    has_heads = isinstance(chunk, (GPTModel, HybridModel)) and chunk.post_process
    return {"loss_mask": of_this_rank(batch, "loss_mask", chunk)} if has_heads else {}
