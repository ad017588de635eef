"""Hugging Face folder to Megatron checkpoint and back, with Bridge's own converters.

The CPU backend, where it is needed, must be active before this module is imported.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from megatron.bridge import AutoBridge
from megatron.bridge.models.hf_pretrained.causal_lm import PreTrainedCausalLM
from megatron.bridge.models.hf_pretrained.state import StateDict
from transformers import AutoConfig, PreTrainedConfig

from megaboa.bridge import weights
from megaboa.bridge.groups import process_groups, sizes
from megaboa.bridge.source import copy_settings, has_weights, saved_tensors
from megaboa.conversion import WHOLE
from megaboa.layout import Layout
from megaboa.records import ModelSource

# Of a model that isn't trained: this needs Apex, which may not be there.
UNTRAINED = {"gradient_accumulation_fusion": False}


def import_checkpoint(source: ModelSource, folder: Path, layout: Layout = WHOLE) -> None:
    """Write a model's weights as a Megatron distributed checkpoint, in the type in which the model has them.

    Within process groups: every rank reads its part of the model and writes it.
    """
    bridge = converter_of(source)
    provider = bridge.to_megatron_provider()
    vars(provider).update({**UNTRAINED, **sizes(layout)})
    provider.finalize()
    model = provider.provide_distributed_model(wrap_with_ddp=False, use_cpu_initialization=True)
    bridge.save_megatron_model(model, folder, hf_tokenizer_path=source.tokenizer, low_memory_save=True)


def export_checkpoint(source: ModelSource, checkpoint: Path, folder: Path, file_bytes: int) -> None:
    """Write a Megatron checkpoint as a Hugging Face folder: weights, config, tokenizer."""
    bridge = converter_of(source)
    with process_groups(source.device):
        export_model(bridge, load_checkpoint(bridge, checkpoint), source, folder, file_bytes)


def export_model(
    bridge: AutoBridge, model: list[torch.nn.Module], source: ModelSource, folder: Path, file_bytes: int
) -> None:
    dtype = weights.write(hf_tensors(bridge, model), folder, file_bytes)
    copy_settings(source, str(dtype).removeprefix("torch."), folder)
    weights.share(folder)


def hf_tensors(bridge: AutoBridge, model: list[torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """The model's weights as Hugging Face has them, one at a time."""
    return bridge.export_hf_weights(model, cpu=True, show_progress=False)


def converter_of(source: ModelSource) -> AutoBridge:
    """Bridge's converter for a model.

    For one that is trained from scratch it knows what transformers' model of this config consists of: Bridge would
    otherwise write a tied head too, and couldn't tell a parameter that has no tensor.
    """
    if has_weights(source):
        return AutoBridge.from_hf_pretrained(source.path)
    return AutoBridge(_Outline(AutoConfig.from_pretrained(source.path, local_files_only=True)))


class _Outline(PreTrainedCausalLM):
    """A model of which all is known but the weights."""

    def __init__(self, config: PreTrainedConfig):
        super().__init__()
        self.config = config
        self._state_dict_accessor = StateDict(saved_tensors(config))


def bridge_of(source: ModelSource) -> AutoBridge:
    """Bridge's idea of a model, from its config."""
    if weights.files(source.path):
        return AutoBridge.from_hf_pretrained(source.path)
    return AutoBridge.from_hf_config(AutoConfig.from_pretrained(source.path, local_files_only=True))


def load_checkpoint(bridge: AutoBridge, checkpoint: Path, layout: Layout = WHOLE) -> list[torch.nn.Module]:
    """The model of a checkpoint, whole or this rank's part of it, whatever layout saved it."""
    return bridge.load_megatron_model(checkpoint, wrap_with_ddp=False, mp_overrides={**UNTRAINED, **sizes(layout)})
