"""Hugging Face folder to Megatron checkpoint and back, in one process, with Bridge's own converters.

The CPU backend, where it is needed, must be active before this module is imported.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.bridge import AutoBridge
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from transformers import AutoConfig

from megaboa.bridge import artifacts, tensors, weights

# Of a model that isn't trained: this needs Apex, which may not be there.
UNTRAINED = {"gradient_accumulation_fusion": False}


@contextlib.contextmanager
def single_process(device: str) -> Iterator[None]:
    """Megatron's process groups for this process alone, over a store in memory: no port that another job may want."""
    os.environ["NVIDIA_TF32_OVERRIDE"] = "0"  # Transformer Engine would multiply fp32 in TF32, and logits are compared
    dist.init_process_group("gloo" if device == "cpu" else "nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        parallel_state.initialize_model_parallel()
        model_parallel_cuda_manual_seed(0)
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def import_checkpoint(source: dict[str, Any], folder: Path) -> None:
    """Write a model's weights as a Megatron distributed checkpoint, in the type in which the model has them."""
    bridge = bridge_of(source)
    with single_process(source["device"]):
        provider = bridge.to_megatron_provider()
        vars(provider).update(UNTRAINED)
        provider.finalize()
        model = provider.provide_distributed_model(wrap_with_ddp=False, use_cpu_initialization=True)
        bridge.save_megatron_model(model, folder, hf_tokenizer_path=source["tokenizer"], low_memory_save=True)


def export_checkpoint(source: dict[str, Any], checkpoint: Path, folder: Path, file_bytes: int) -> None:
    """Write a Megatron checkpoint as a Hugging Face folder: weights, config, tokenizer."""
    bridge = bridge_of(source)
    with single_process(source["device"]):
        export_model(bridge, load_checkpoint(bridge, checkpoint), source, folder, file_bytes)


def export_model(
    bridge: AutoBridge, model: list[torch.nn.Module], source: dict[str, Any], folder: Path, file_bytes: int
) -> None:
    dtype = weights.write(hf_tensors(bridge, model), folder, file_bytes)
    artifacts.write(source, str(dtype).removeprefix("torch."), folder)
    tensors.share(folder)


def hf_tensors(bridge: AutoBridge, model: list[torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """The model's weights as Hugging Face has them, one at a time."""
    return bridge.export_hf_weights(model, cpu=True, show_progress=False)


def bridge_of(source: dict[str, Any]) -> AutoBridge:
    """Bridge's converter for a model; one without weights has a config alone."""
    if tensors.files(source["path"]):
        return AutoBridge.from_hf_pretrained(source["path"])
    return AutoBridge.from_hf_config(AutoConfig.from_pretrained(source["path"], local_files_only=True))


def load_checkpoint(bridge: AutoBridge, checkpoint: Path) -> list[torch.nn.Module]:
    """The model of a checkpoint, whole, whatever layout saved it."""
    return bridge.load_megatron_model(checkpoint, wrap_with_ddp=False, mp_overrides=UNTRAINED)
