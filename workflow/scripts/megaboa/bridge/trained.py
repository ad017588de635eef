"""A run's trained model: loaded from a checkpoint and exported, with its adapters.

The CPU backend, where it is needed, must be active before this module is imported.
"""

from __future__ import annotations

from pathlib import Path

import torch
from megatron.bridge import AutoBridge

from megaboa.bridge import adapters
from megaboa.bridge.convert import converter_of, export_checkpoint, export_model, is_last, load_checkpoint
from megaboa.files import write_text
from megaboa.layout import Layout
from megaboa.paths import ADAPTER, CHAT_TEMPLATE, RunFolder
from megaboa.records import ModelSource, RunSpec


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
    if run.chat_template is not None:
        write_text(folder / CHAT_TEMPLATE, run.chat_template)


def load_trained(bridge: AutoBridge, run: RunFolder, checkpoint: Path, layout: Layout) -> list[torch.nn.Module]:
    """The trained model of a run's checkpoint, with adapters merged. A model with adapters is loaded by one process."""
    if not run.run.has_adapters:
        return load_checkpoint(bridge, checkpoint, layout)
    model = adapters.load(bridge, run, checkpoint)
    adapters.merge(model)
    return model
