"""Logits of Megatron's and of transformers' model for the same tokens, both in fp32.

The CPU backend, where it is needed, must be active before this module is imported.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import unwrap_model

from megaboa.bridge import image_text
from megaboa.bridge.reference import BYTES, SHARE, Reference, free_bytes, logits_bound, widen, widen_by_layers
from megaboa.bridge.verdict import check
from megaboa.records import Check

PROBE_SEQUENCES, PROBE_TOKENS = 2, 64
# What the long sequence may cost: operations, numbers in its logits and in a layer's attention. A shorter one than
# WORTHWHILE shows little more than the others, and costs as much as they do.
OPERATIONS, LOGITS, ATTENTION = 1e13, 2**26, 2**25
WORTHWHILE = 4 * PROBE_TOKENS


def same_logits(
    model: list[torch.nn.Module], reference: Reference | None, vocab_size: int, length: int, params: int
) -> list[Check]:
    """Check that both models give the same logits in fp32: for short sequences, and for one up to `length` tokens, as
    long as the model's `params` allow at little cost. Only the last rank, which has the reference, returns a result.

    Experts get no long sequence: of many tokens, one has two experts that rounding alone can swap.

    The model is left in fp32, or with hooks that make it compute in fp32.
    """
    whole = unwrap_model(model)[0].eval()
    is_held = compute_in_fp32(whole)
    random = torch.Generator().manual_seed(1)
    probes = [torch.randint(vocab_size, (PROBE_SEQUENCES, PROBE_TOKENS), generator=random)]
    seen = image_text.probe(whole.config, probes[0])  # a vision model gets an image in each sequence
    routes = getattr(whole.config, "num_moe_experts", None)
    long = 0 if seen or routes else affordable(whole.config, vocab_size, length, params)
    probes += [torch.randint(vocab_size, (1, long), generator=random)] if long >= WORTHWHILE else []
    differences, largest = [], 1.0
    for tokens in probes:
        found = megatron_logits(whole, tokens, vocab_size, seen)
        if reference is not None:
            with torch.no_grad():
                expected = reference.model(tokens, **seen).logits
            largest = max(largest, expected.abs().max().item())
            differences.append(found.sub_(expected).abs_().max())
    if reference is None:
        return []
    difference = torch.stack(differences).max().item() / largest  # a NaN stays one
    detail = f"largest difference {difference:.1e} of the largest logit, over {PROBE_SEQUENCES} sequences of "
    detail += f"{PROBE_TOKENS} tokens{f' and one of {long:,}' if len(probes) > 1 else ''}"
    detail += f" and {PROBE_SEQUENCES} images" if seen else ""
    detail += f" in fp32, transformers' model {reference.how}"
    detail += "" if is_held else ", Megatron's weights widened layer by layer"
    bound = logits_bound(whole.config.num_layers, whole.config.hidden_size)
    # A NaN compares as false, so it fails.
    return [check("logits", difference <= bound, f"{detail}; allowed {bound:.1e}", difference)]


def affordable(config: Any, vocab_size: int, length: int, params: int) -> int:
    """The length of the long sequence: `length`, or what costs little."""
    most = [length, OPERATIONS / (2 * params), LOGITS / vocab_size, math.sqrt(ATTENTION / config.num_attention_heads)]
    return int(min(most))


def compute_in_fp32(model: torch.nn.Module) -> bool:
    """Make a model compute in fp32: widen all weights if there is room, else layer by layer. Returns whether all are
    widened.

    Vision models are always widened as a whole, because some parts check the type of their weights before use.
    """
    if image_text.sees(model.config) or _has_room(model):
        model.float()
        return True
    compute_by_layers(model)
    return False


def _has_room(model: torch.nn.Module) -> bool:
    """Whether the weights fit in fp32. On the CPU, all ranks may share one host."""
    device = next(model.parameters()).device
    on_gpu = device.type == "cuda"
    room = torch.cuda.mem_get_info(device)[0] if on_gpu else free_bytes() / dist.get_world_size()
    return BYTES * sum(one.numel() for one in model.parameters() if one.dtype != torch.float32) <= SHARE * room


def compute_by_layers(model: torch.nn.Module) -> None:
    """Widen weights to fp32 only while they are needed. A tied head also widens those of the embedding."""
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.data = buffer.data.float()
    widen_by_layers(model)
    for part in model.modules():
        head = getattr(part, "output_layer", None)
        if head is not None and next(head.parameters(), None) is None:
            widen(head, [part.shared_embedding_or_output_weight()])


def megatron_logits(
    model: torch.nn.Module,
    tokens: torch.Tensor,
    vocab_size: int,
    seen: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> torch.Tensor:
    """The logits without Megatron's padding of the vocabulary. Only the last pipeline stage's result is meaningful."""
    device = next(model.parameters()).device
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)

    def forward(part: torch.nn.Module) -> torch.Tensor:
        images = {name: value.to(device) for name, value in seen.items()}
        return part(input_ids=tokens.to(device), position_ids=positions.to(device), attention_mask=None, **images)

    with torch.no_grad():
        if parallel_state.get_pipeline_model_parallel_world_size() == 1:
            return _whole(forward(model))[..., :vocab_size]
        model.config.pipeline_dtype = torch.float32
        outputs = get_forward_backward_func()(
            forward_step_func=lambda _, part: (forward(part), lambda output, non_loss_data: output),
            data_iterator=None,
            model=[model],
            num_microbatches=1,
            seq_length=tokens.shape[1],
            micro_batch_size=tokens.shape[0],
            forward_only=True,
            collect_non_loss_data=True,
        )
        return _whole(outputs[0])[..., :vocab_size] if outputs else torch.empty(0)


def _whole(logits: torch.Tensor) -> torch.Tensor:
    """The logits of all tensor parallel ranks, which hold some columns each."""
    group = parallel_state.get_tensor_model_parallel_group()
    if dist.get_world_size(group) == 1:
        return logits.cpu()
    parts = [torch.empty_like(logits) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, logits.contiguous(), group=group)
    return torch.cat(parts, dim=-1).cpu()
