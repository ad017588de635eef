"""Hugging Face folder to Megatron checkpoint and back, with Bridge's converters, in one process or several ranks.

The CPU backend, where it is needed, must be active before this module is imported.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import shutil
import sys
from collections import deque
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.bridge import AutoBridge
from megatron.bridge.models.conversion import model_bridge
from megatron.bridge.models.hf_pretrained.causal_lm import PreTrainedCausalLM
from megatron.bridge.models.hf_pretrained.state import StateDict
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.enums import AttnBackend
from torch.nn.functional import gelu, silu
from transformers import AutoConfig, PreTrainedConfig

from megaboa import store
from megaboa.bridge import prediction, process, untrusted, weights
from megaboa.bridge.continuation import ROUNDS
from megaboa.bridge.source import copy_settings, has_weights
from megaboa.check.rope import YARN_DEFAULTS
from megaboa.conversion import WHOLE
from megaboa.errors import InputError, no_room
from megaboa.formats import some_of
from megaboa.layout import AXES, Layout
from megaboa.records import ModelSource

# Settings for models that aren't trained: gradient accumulation fusion needs Apex, which may not be installed.
UNTRAINED = {"gradient_accumulation_fusion": False}
# FlashAttention, which Bridge sets for Gemma and hybrid models, has no fp32, in which logits are compared.
ANY_PRECISION = {"attention_backend": AttnBackend.auto}
# All parameters come from files, as the proof verifies. Drawing random ones would take a minute per 8 billion.
UNDRAWN = {"perform_initialization": False}
# Bridge's fields of YaRN's keys that a config may leave out.
YARN = {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow", ROUNDS: "truncate"}
# Switches to kernels that calculate GELU by its tanh approximation: Megatron's, and Transformer Engine's.
APPROXIMATE = ("bias_activation_fusion", "use_te_activation_func", "use_transformer_engine_op_fuser")
# The launcher notices a rank that dies. One that reads a large model, or waits for another job's, is merely slow.
PATIENCE = timedelta(days=1)
FUSED_SOFTMAX = "scaled_masked_softmax_cuda"
UNMAPPED = "No mapping found for megatron_param: "
SHOWN = 5  # parameters that an error names


def import_checkpoint(source: ModelSource, folder: Path, layout: Layout = WHOLE) -> None:
    """Write a model's weights as a Megatron distributed checkpoint, in the model's own type.

    Needs process groups: every rank reads and writes its part of the model.
    """
    bridge = converter_of(source)
    provider = provider_of(bridge)
    vars(provider).update({**UNTRAINED, **UNDRAWN, **sizes(layout)})
    provider.finalize()
    with _unmapped() as unmapped:
        try:
            model = provider.provide_distributed_model(wrap_with_ddp=False, use_cpu_initialization=True)
        except AttributeError as error:
            if "megatron_module" not in str(error) or not unmapped:
                raise
            # Bridge 0.6.2 loads as if each parameter had a task.
            elsewhere = "; some families are known on GPUs only" if source.device == "cpu" else ""
            raise InputError(
                f"models.{source.name}: Megatron-Bridge's converter knows no tensor for parameters that the model has "
                f"on device {source.device}: {some_of(unmapped, SHOWN)}{elsewhere}"
            ) from error
    process.save_in_foreground()
    with _full_disks_told():
        bridge.save_megatron_model(model, folder, hf_tokenizer_path=source.tokenizer, low_memory_save=True)


@contextlib.contextmanager
def _unmapped() -> Iterator[list[str]]:
    """Collect the parameters for which Bridge's converter has no tensor: it only warns of each."""
    found: list[str] = []

    def collect(record: logging.LogRecord) -> bool:
        _, told, name = record.getMessage().partition(UNMAPPED)
        found.extend([name] if told and name not in found else [])
        return not told

    model_bridge.logger.addFilter(collect)
    try:
        yield found
    finally:
        model_bridge.logger.removeFilter(collect)


@contextlib.contextmanager
def _full_disks_told() -> Iterator[None]:
    """Raise the system's error if a disk is full. Megatron only says that a worker failed, and drops the reason."""
    write, full = FileSystemWriterAsync.write_preloaded_data, []

    def watched(*arguments: Any, **named: Any) -> Any:
        number, found = write(*arguments, **named)
        if isinstance(found, Exception) and (code := no_room(found)):
            full.append(OSError(code, os.strerror(code)))
        return number, found

    FileSystemWriterAsync.write_preloaded_data = staticmethod(watched)
    try:
        yield
    except BaseException as error:  # torch's CheckpointException is a BaseException
        if full:
            raise full[0] from error
        raise
    finally:
        FileSystemWriterAsync.write_preloaded_data = staticmethod(write)


def export_checkpoint(source: ModelSource, checkpoint: Path, folder: Path, file_bytes: int, layout: Layout) -> None:
    """Export a Megatron checkpoint as a Hugging Face folder: weights, config, tokenizer.

    Needs process groups: every rank reads its part of the checkpoint, and the last one writes.
    """
    bridge = converter_of(source)
    export_model(bridge, load_checkpoint(bridge, checkpoint, layout), source, folder, file_bytes)


def export_model(
    bridge: AutoBridge, model: list[torch.nn.Module], source: ModelSource, folder: Path, file_bytes: int
) -> None:
    """Gather the tensors one by one. Every rank contributes its parts; the last one writes them, and the others drop
    them."""
    tensors = hf_tensors(bridge, model)
    if is_last():
        dtype = weights.write(tensors, folder, file_bytes)
        copy_settings(source, str(dtype).removeprefix("torch."), folder)
        weights.share(folder)
    else:
        deque(tensors, maxlen=0)
    from_all(None)


def hf_tensors(bridge: AutoBridge, model: list[torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """The model's weights in Hugging Face's format, one at a time."""
    written = bridge.export_hf_weights(model, cpu=True, show_progress=False)
    return prediction.with_copies(written, bridge.hf_pretrained.state.keys(), bridge.hf_pretrained.config)


def converter_of(source: ModelSource) -> AutoBridge:
    """Bridge's converter for a model.

    For a model trained from scratch it gets the list of tensors that transformers would save. Otherwise Bridge would
    also write a tied head, and could not detect a parameter without a tensor.
    """
    if has_weights(source):
        return AutoBridge.from_hf_pretrained(source.path)
    return AutoBridge(_Outline(AutoConfig.from_pretrained(source.path, local_files_only=True)))


class _Outline(PreTrainedCausalLM):
    """A pretrained model without its weights: config, and names and shapes of tensors."""

    def __init__(self, config: PreTrainedConfig):
        super().__init__()
        self.config = config
        self._state_dict_accessor = StateDict(prediction.Saved(config))


def provider_of(bridge: AutoBridge, load_weights: bool = True) -> Any:
    """Bridge's provider, which builds the model. Bridge 0.6.2 assumes heads of 128 for Qwen2.5-VL's rotary sections."""
    provider = bridge.to_megatron_provider(load_weights=load_weights)
    config = bridge.hf_pretrained if isinstance(bridge.hf_pretrained, PreTrainedConfig) else bridge.hf_pretrained.config
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    if hasattr(provider, "mrope_section") and rope.get("mrope_section"):
        provider.mrope_section = list(rope["mrope_section"])
    with_yarn_defaults(provider)
    with_own_activation(provider)
    with_softmax_that_is_there(provider)
    with_public_layers(provider)
    return provider


def with_yarn_defaults(model: Any) -> None:
    """Give a model what transformers takes for YaRN's missing keys: in Megatron they are null."""
    if getattr(model, "position_embedding_type", None) == "yarn":
        missing = {field: YARN_DEFAULTS[key] for field, key in YARN.items() if getattr(model, field) is None}
        vars(model).update(missing)


def with_own_activation(model: Any) -> None:
    """Leave an activation unfused where Megatron has no kernel for it, or one of another function. Some of Bridge's
    converters fuse all. GPT-OSS's quick GELU with an offset has a kernel, in experts."""
    if model.activation_func is not silu and not model.glu_linear_offset:
        model.bias_activation_fusion = False


def with_softmax_that_is_there(model: Any) -> None:
    """Don't ask for the fused softmax of Megatron's own attention (Gemma 4's) where its extension isn't installed: it
    comes with images alone."""
    if importlib.util.find_spec(FUSED_SOFTMAX) is None:
        model.masked_softmax_fusion = False


def with_public_layers(model: Any) -> None:
    """Give the function that describes a model's layers a public name, if its own is private (ERNIE 4.5, EXAONE MoE):
    Bridge 0.6.2 writes it into checkpoints, and reads no private names there."""
    layers = getattr(model, "transformer_layer_spec", None)
    name = getattr(layers, "__qualname__", "")
    if name.startswith("_") and "." not in name:
        layers.__name__ = layers.__qualname__ = name.lstrip("_")
        setattr(sys.modules[layers.__module__], layers.__name__, layers)


def refuse_other_gelu(model: Any, source: ModelSource) -> None:
    """Refuse kernels that calculate another GELU than the model's config means."""
    wrong = next((name for name in APPROXIMATE if getattr(model, name, False)), None)
    if wrong and model.activation_func is gelu:
        raise InputError(
            f"overrides.model.{wrong}: true: that kernel calculates GELU by its tanh approximation, and "
            f"{source.path}/config.json says gelu, which is exact: set it to false"
        )


def bridge_of(source: ModelSource) -> AutoBridge:
    """The AutoBridge of a model, from its weights or else its config."""
    if weights.files(source.path):
        return AutoBridge.from_hf_pretrained(source.path)
    return AutoBridge.from_hf_config(AutoConfig.from_pretrained(source.path, local_files_only=True))


def load_checkpoint(bridge: AutoBridge, checkpoint: Path, layout: Layout = WHOLE) -> list[torch.nn.Module]:
    """The model of a checkpoint, whole or this rank's part of it, regardless of the layout that saved it."""
    with_public_layers(bridge.to_megatron_provider(load_weights=False))
    with untrusted.told(checkpoint):
        return bridge.load_megatron_model(
            checkpoint, wrap_with_ddp=False, mp_overrides={**UNTRAINED, **ANY_PRECISION, **sizes(layout)}
        )


@contextlib.contextmanager
def process_groups(device: str, layout: Layout = WHOLE) -> Iterator[None]:
    """Megatron's process groups, for one process or for ranks that each hold a part of the model.

    A single process uses a store in memory, so it needs no port, which another job might want.
    """
    # Otherwise Transformer Engine, and kernels of Triton, use TF32 for fp32; logits are compared.
    os.environ |= {"NVIDIA_TF32_OVERRIDE": "0", "TRITON_F32_DEFAULT": "ieee"}
    if layout.world_size == 1:
        dist.init_process_group("gloo" if device == "cpu" else "nccl", store=dist.HashStore(), rank=0, world_size=1)
    else:
        if device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        # Weights stay on the host until a model is complete, even if it is for GPUs.
        dist.init_process_group("gloo" if device == "cpu" else "cpu:gloo,cuda:nccl", timeout=PATIENCE)
    failed = True
    try:
        minutes = PATIENCE // timedelta(minutes=1)
        parallel_state.initialize_model_parallel(**sizes(layout), distributed_timeout_minutes=minutes)
        model_parallel_cuda_manual_seed(0)
        yield
        failed = False
    finally:
        # Without its groups the other ranks fail, and then all are ended: a rank that fails first must say why.
        if layout.world_size == 1 or not failed:
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()


def sizes(layout: Layout) -> dict[str, Any]:
    """Parallel sizes under Megatron-Core's names."""
    return {axis.argument: layout.size(axis.name) for axis in AXES if axis.weights}


def is_last() -> bool:
    """Whether this rank reports results: the last one has the last pipeline stage, and so the logits."""
    return dist.get_rank() == dist.get_world_size() - 1


@contextlib.contextmanager
def building(final: Path) -> Iterator[Path | None]:
    """`store.building` for all ranks together: the first rank holds the lock, and waits for the others at the end.

    A rank that runs out of space removes everything written, because the first rank may be ended while it waits.
    """
    first = dist.get_rank() == 0
    with store.building(final) if first else contextlib.nullcontext() as partial:
        partial = _from_first(partial)
        try:
            yield partial
        except Exception as error:
            if partial and no_room(error):
                shutil.rmtree(partial, ignore_errors=True)
            raise
        from_all(None)
    from_all(None)  # the folder has its final name now, so the record's writer may read it


def from_all(value: Any) -> list[Any]:
    """The values of all ranks, in order."""
    if dist.get_world_size() == 1:
        return [value]
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def _from_first(value: Any) -> Any:
    return from_all(value)[0]
