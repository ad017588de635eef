"""A run's trained model: loaded from a checkpoint and exported, with its adapters.

The CPU backend, where it is needed, must be active before this module is imported.
"""

from __future__ import annotations

from pathlib import Path

import torch
from megatron.bridge import AutoBridge
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from megaboa.bridge import adapters
from megaboa.bridge.convert import converter_of, export_checkpoint, export_model, is_last, load_checkpoint
from megaboa.bridge.source import GENERATION
from megaboa.files import read_json, write_json, write_text
from megaboa.layout import Layout
from megaboa.paths import ADAPTER, CHAT_TEMPLATE, RunFolder
from megaboa.records import ModelSource, RunSpec

PROBE = "megaboa"


def export_run(
    run: RunFolder, source: ModelSource, checkpoint: Path, folder: Path, file_bytes: int, layout: Layout
) -> None:
    """Export a run's checkpoint, with the chat template that it was fine-tuned with. Adapters are merged, and also
    written next to the model."""
    if run.run.has_adapters:
        bridge = converter_of(source)
        export_model(bridge, export_adapters(bridge, run, source, checkpoint, folder), source, folder, file_bytes)
    else:
        export_checkpoint(source, checkpoint, folder, file_bytes, layout)
    if is_last():
        add_template(run.run, folder)


def export_adapters(
    bridge: AutoBridge, run: RunFolder, source: ModelSource, checkpoint: Path, folder: Path
) -> list[torch.nn.Module]:
    """Write the adapters of a checkpoint, in one process; returns the model with the adapters merged."""
    model = adapters.load(bridge, run, checkpoint)
    adapters.save(bridge, model, run, source, folder / ADAPTER)
    magnitudes = adapters.magnitudes(model)
    adapters.merge(model)
    if magnitudes:
        adapters.add_magnitudes(bridge, model, folder / ADAPTER, magnitudes)
    return model


def add_template(run: RunSpec, folder: Path) -> None:
    """Add the chat template that a run was fine-tuned with, and end generation where its answers end."""
    if run.chat_template is not None:
        write_text(folder / CHAT_TEMPLATE, run.chat_template)
    if not run.is_of_chats:
        return
    path, words = folder / GENERATION, AutoTokenizer.from_pretrained(folder, local_files_only=True)
    if (end := end_of_answers(words)) is not None:
        write_json(path, {**read_json(path), "eos_token_id": stops(folder, words.eos_token_id, end)})


def end_of_answers(words: PreTrainedTokenizerBase) -> int | None:
    """The special token that ends what the assistant says, by a tokenizer's chat template; None if it can't be told."""
    turns = [{"role": "user", "content": "one?"}, {"role": "assistant", "content": PROBE}]
    try:
        text = words.apply_chat_template(turns, tokenize=False)
    except Exception:  # it is for other conversations than this one, and may object in any way
        return None
    _, said, behind = text.rpartition(PROBE)
    special = {number for number, token in words.added_tokens_decoder.items() if token.special}
    tokens = words(behind, add_special_tokens=False)["input_ids"] if said else []
    return next((token for token in tokens if token in special), None)


def ends(folder: Path) -> list[int]:
    """The tokens that end generation, by the generation config of an exported folder."""
    given = read_json(folder / GENERATION).get("eos_token_id")
    return given if isinstance(given, list) else [] if given is None else [given]


def stops(folder: Path, *further: int | None) -> list[int]:
    """The tokens that end generation: those of an exported folder's generation config, and these."""
    return [*dict.fromkeys(token for token in (*ends(folder), *further) if token is not None)]


def load_trained(bridge: AutoBridge, run: RunFolder, checkpoint: Path, layout: Layout) -> list[torch.nn.Module]:
    """The trained model of a run's checkpoint, with adapters merged. A model with adapters is loaded by one process."""
    if not run.run.has_adapters:
        return load_checkpoint(bridge, checkpoint, layout)
    model = adapters.load(bridge, run, checkpoint)
    adapters.merge(model)
    return model
