"""Greedy continuations of the same prompts by a checkpoint and by its export."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core.utils import unwrap_model
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from megaboa.bridge import reference
from megaboa.bridge.convert import bridge_of, from_all, is_last, process_groups
from megaboa.bridge.logits import compute_in_fp32, megatron_logits
from megaboa.bridge.trained import load_trained, stops
from megaboa.conversion import WHOLE
from megaboa.layout import Layout
from megaboa.paths import RunFolder
from megaboa.records import ExportRecord, GenerateSpec, Generation, ModelSource


def generate(
    export: ExportRecord, run: RunFolder, source: ModelSource, spec: GenerateSpec, layout: Layout = WHOLE
) -> list[Generation]:
    """For each prompt, the continuations by Megatron's and by transformers' model. Only the last rank returns them."""
    words = AutoTokenizer.from_pretrained(export.path, local_files_only=True)
    rows = AutoConfig.from_pretrained(export.path, local_files_only=True).get_text_config().vocab_size
    with process_groups(source.device, layout):
        model = unwrap_model(load_trained(bridge_of(source), run, Path(export.checkpoint), layout))[0].eval()
        compute_in_fp32(model)
        theirs = reference.load(export.path, source.params) if is_last() else None
        last = stops(Path(export.path), words.eos_token_id)
        found = []
        for prompt in spec.prompts:
            start = words(prompt, return_tensors="pt")["input_ids"]
            mine = greedy(model, start, spec.tokens, rows, last)
            if theirs is None:
                continue
            said = _by_transformers(theirs.model, start, spec.tokens, words, last)
            found.append(
                Generation(
                    prompt=prompt,
                    megatron=words.decode(mine),
                    transformers=words.decode(said),
                    same=mine == said,
                )
            )
    return found


def greedy(model: torch.nn.Module, start: torch.Tensor, tokens: int, vocab_size: int, last: Sequence[int]) -> list[int]:
    """Greedy decoding with Megatron's own model, token by token and without a cache: slow, but simple enough to be
    right."""
    sequence = start
    for _ in range(tokens):
        logits = megatron_logits(model, sequence, vocab_size)
        # Only the last pipeline stage has the logits.
        likeliest = from_all(logits[:, -1].argmax(dim=-1, keepdim=True) if is_last() else None)[-1]
        sequence = torch.cat([sequence, likeliest], dim=1)
        if int(likeliest) in last:
            break
    return sequence[0, start.shape[1] :].tolist()


def _by_transformers(
    model: torch.nn.Module, start: torch.Tensor, tokens: int, words: Any, last: Sequence[int]
) -> list[int]:
    pad = words.pad_token_id if words.pad_token_id is not None else words.eos_token_id
    # A config of its own, because the model's may set penalties, which Megatron's side doesn't have.
    model.generation_config = GenerationConfig(
        max_new_tokens=tokens,
        do_sample=False,
        eos_token_id=[*last] or None,
        pad_token_id=pad,
    )
    with torch.no_grad():
        done = model.generate(start, attention_mask=torch.ones_like(start))
    return done[0, start.shape[1] :].tolist()
