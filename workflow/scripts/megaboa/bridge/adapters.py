"""Adapters of a trained run: loading them with their base model, merging them, and writing them for the library `peft`.

The CPU backend, where it is needed, must be active before this module is imported.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

import torch
from megatron.bridge import AutoBridge
from megatron.bridge.peft.adapter_wrapper import AdapterWrapper
from megatron.bridge.peft.base import PEFT
from megatron.bridge.peft.dora_layers import DoRALinear
from megatron.bridge.training.checkpointing import (
    _generate_model_state_dict,
    apply_peft_adapter_filter_to_state_dict,
)
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.utils import unwrap_model
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from megaboa.bridge import finetuning
from megaboa.bridge.convert import hf_tensors, load_checkpoint
from megaboa.bridge.logits import PROBE_SEQUENCES, PROBE_TOKENS
from megaboa.bridge.reference import logits_bound
from megaboa.bridge.source import base_of_adapters
from megaboa.bridge.tensor_checks import listed, same_bits
from megaboa.bridge.verdict import check
from megaboa.bridge.weights import Tensors
from megaboa.errors import InputError
from megaboa.paths import ADAPTER, RunFolder
from megaboa.records import Check, ImportRecord, ModelSource, read

WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
A, B, MAGNITUDE = "lora_A.weight", "lora_B.weight", "lora_magnitude_vector"
# Allowed deviation of a merged weight from base plus adapter, in units in the last place of the largest weight.
ROUNDING = 2.0


def base_of(folder: RunFolder) -> Path:
    """The Megatron checkpoint of the base model that the adapters change."""
    if folder.run.parent:
        return finetuning.parents_checkpoint(folder)
    return Path(read(ImportRecord, folder.model_manifest).checkpoint)


def load(bridge: AutoBridge, folder: RunFolder, checkpoint: Path) -> list[torch.nn.Module]:
    """The base model with the adapters of a checkpoint."""
    peft = finetuning.adapters(folder.run)
    model = peft(load_checkpoint(bridge, base_of(folder)), training=False)
    finetuning.require_adapters(peft, model)
    restore(model, peft, checkpoint)
    return model


def restore(model: list[torch.nn.Module], peft: PEFT, checkpoint: Path) -> None:
    """Load a checkpoint's adapters into a model. They must be exactly those that the model has."""
    wanted = apply_peft_adapter_filter_to_state_dict(_generate_model_state_dict(model, {}), peft)
    found, beyond, _ = dist_checkpointing.load(wanted, str(checkpoint), strict=StrictHandling.RETURN_ALL)
    # Of the model itself: what holds it in 16 bits doesn't say what was missing.
    lost = unwrap_model(model)[0].load_state_dict(found["model"], strict=False).missing_keys
    for names, text in ((lost, "lacks"), (beyond, "has adapters that the model lacks:")):
        if wrong := sorted(name for name in names if _is_weight_of_adapter(name)):
            more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
            raise InputError(
                f"{checkpoint}: {text} {wrong[0]}{more}: it is of a run with other tuning.targets or another task"
            )


def _is_weight_of_adapter(name: str) -> bool:
    return ".adapter." in name and "_extra_state" not in name and "optimizer" not in name


def merge(model: list[torch.nn.Module]) -> None:
    """Add the adapters to the weights that they change, and remove them, so that a model without adapters is left."""
    for chunk in model:
        wrapped = [(name, part) for name, part in chunk.named_modules() if isinstance(part, AdapterWrapper)]
        for name, part in wrapped:
            weight = part.to_wrap.weight
            with torch.no_grad():
                weight.copy_(_merged(part, weight.float()).to(weight.dtype))
            owner, _, last = name.rpartition(".")
            setattr(chunk.get_submodule(owner), last, part.to_wrap)


def _merged(part: AdapterWrapper, weight: torch.Tensor) -> torch.Tensor:
    adapter = part.adapter
    product = adapter.linear_out.weight.float() @ adapter.linear_in.weight.float()
    changed = weight + (adapter.alpha / adapter.dim) * product
    if not isinstance(part, DoRALinear):
        return changed
    return changed * (adapter.weight_magnitude.float() / changed.norm(dim=1)).unsqueeze(1)


def save(
    bridge: AutoBridge, model: list[torch.nn.Module], folder: RunFolder, source: ModelSource, target: Path
) -> None:
    """Write the adapters of a model, before they are merged, in the format of `peft`."""
    base = base_of_adapters(folder.run, source)
    bridge.save_hf_adapter(model, target, finetuning.adapters(folder.run), base, show_progress=False)


def magnitudes(model: list[torch.nn.Module]) -> list[tuple[torch.nn.Parameter, torch.Tensor]]:
    """DoRA's magnitudes: weights, each with one number per row, which training may have made negative."""
    parts = [part for chunk in model for part in chunk.modules() if isinstance(part, DoRALinear)]
    return [(part.to_wrap.weight, part.adapter.weight_magnitude.detach()) for part in parts]


def add_magnitudes(
    bridge: AutoBridge,
    model: list[torch.nn.Module],
    folder: Path,
    rows: Sequence[tuple[torch.nn.Parameter, torch.Tensor]],
) -> None:
    """Add DoRA's magnitudes to the exported adapters, because Bridge only writes the matrices.

    The rows of the merged model are temporarily filled with their magnitudes, so that Bridge's export provides the
    names and order of Hugging Face.
    """
    found = load_file(folder / WEIGHTS)
    modules = {name.removesuffix(A) for name in found if name.endswith(A)}
    weights = [weight.detach().clone() for weight, _ in rows]
    with torch.no_grad():
        for weight, magnitude in rows:
            weight.copy_(magnitude.unsqueeze(1).expand_as(weight))
        for name, tensor in hf_tensors(bridge, model):
            module = f"{PREFIX}{name.removesuffix('weight')}"
            if module in modules:
                found[f"{module}{MAGNITUDE}"] = tensor[:, 0].float().clone()
        for (weight, _), before in zip(rows, weights, strict=True):
            weight.copy_(before)
    save_file(found, str(folder / WEIGHTS), metadata={"format": "pt"})


def prove(
    bridge: AutoBridge, folder: RunFolder, export: Path, reference: PreTrainedModel
) -> tuple[list[Check], dict[str, str]]:
    """Prove that the exported weights are the base plus the adapters, and that `peft` builds the same model from these.

    `reference`: transformers' model of the exported weights. Also returns checks that were not possible, and why.
    """
    base = load_checkpoint(bridge, base_of(folder))
    with Tensors(export) as merged:
        checks = [_sums(dict(hf_tensors(bridge, base)), load_file(export / ADAPTER / WEIGHTS), merged, folder)]
    if importlib.util.find_spec("peft") is None:
        return checks, {"peft": "the package peft is not installed here (`pip install peft`)"}
    return [*checks, _same_by_peft(dict(hf_tensors(bridge, base)), export, reference)], {}


def _sums(
    base: dict[str, torch.Tensor], adapters: dict[str, torch.Tensor], merged: Tensors, folder: RunFolder
) -> Check:
    """Check that every weight is the base's, bit for bit, or the base's plus its adapter."""
    scale = folder.run.tuning["alpha"] / folder.run.tuning["rank"]
    wrong, changed, largest = [], 0, 0.0
    for name in merged:
        module, found, before = f"{PREFIX}{name.removesuffix('weight')}", merged[name], base[name]
        if f"{module}{A}" not in adapters:
            wrong += [] if same_bits(before.to(found.dtype), found) else [name]
            continue
        expected = before.float() + scale * adapters[f"{module}{B}"].float() @ adapters[f"{module}{A}"].float()
        if (magnitude := adapters.get(f"{module}{MAGNITUDE}")) is not None:
            expected *= (magnitude / expected.norm(dim=1)).unsqueeze(1)
        unit = torch.finfo(found.dtype).eps * expected.abs().max().item()
        difference = (expected - found.float()).abs().max().item() / unit
        largest, changed = max(largest, difference), changed + (not same_bits(before.to(found.dtype), found))
        wrong += [] if difference <= ROUNDING else [name]
    detail = (
        f"{changed} of {len(merged)} tensors are the base's with an adapter, the others the base's bit for bit; "
        f"largest difference {largest:.1g} units in the last place, allowed {ROUNDING:g}"
    )
    return check("merged", not wrong and changed > 0, detail + listed("different", wrong), largest)


def _same_by_peft(base: dict[str, torch.Tensor], export: Path, reference: PreTrainedModel) -> Check:
    """Check that `peft`, with base and adapter, yields the logits of the merged model, both in fp32."""
    from peft import PeftModel

    tokens = torch.randint(
        reference.config.get_text_config().vocab_size,
        (PROBE_SEQUENCES, PROBE_TOKENS),
        generator=torch.Generator().manual_seed(1),
    )
    bits = torch.finfo(next(iter(base.values())).dtype).eps
    with torch.no_grad():
        expected = reference(tokens).logits
        reference.load_state_dict({name: tensor.float() for name, tensor in base.items()}, strict=False)
        without = reference(tokens).logits
        found = PeftModel.from_pretrained(reference, str(export / ADAPTER)).eval()(tokens).logits
    scale = max(1.0, expected.abs().max().item())
    difference, moved = ((one - expected).abs().max().item() / scale for one in (found, without))
    # Merged weights are rounded to their type, which peft doesn't do.
    least = logits_bound(reference.config.num_hidden_layers, reference.config.hidden_size)
    bound = max(least, bits if bits > least else 0.0)
    detail = (
        f"base and adapter by peft differ from the merged model by {difference:.1e} of the largest logit, allowed "
        f"{bound:.0e}; the base alone by {moved:.1e}"
    )
    return check("peft", difference <= bound and difference < moved, detail, difference)
