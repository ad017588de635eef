"""Fine-tuning: what a run's task sets in Bridge's configuration, and what training begins with.

Examples lie in the run's index (bridge/tuned_samples.py), split, and packed where that is asked for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.bridge.data.builders.gpt_sft import GPTSFTDatasetConfig
from megatron.bridge.data.packing import PackedSequenceSpecs
from megatron.bridge.data.sft_processing import (
    ChatSFTPreprocessingConfig,
    PromptCompletionSFTPreprocessingConfig,
    SFTPreprocessingConfig,
)
from megatron.bridge.peft.base import PEFT
from megatron.bridge.peft.dora import DoRA
from megatron.bridge.peft.lora import LoRA
from megatron.bridge.peft.utils import ParallelLinearAdapter
from megatron.bridge.training.config import ConfigContainer
from megatron.core.transformer.transformer_layer import TransformerLayer

from megaboa.blends import SPLITS, split_blends
from megaboa.check.adapters import matches
from megaboa.errors import InputError
from megaboa.paths import RunFolder, RunStore
from megaboa.records import RunSpec, TrainRecord, Tree, read
from megaboa.run import checkpoints

NO_TEMPLATE = "none"
# Of a run that is yet to be prepared, and of random weights: Bridge wants a folder that exists, and looks no further.
NOWHERE = "."
LOSS_MODES = {"answers": "assistant", "last-answer": "last_turn", "everything": "full"}


def configure(config: ConfigContainer, run: RunSpec, pretrained: str | None) -> None:
    """The task's dataset, loss and adapters, after all keys are set and before overrides are."""
    parallel = config.model
    cut = 2 * parallel.context_parallel_size if parallel.context_parallel_size > 1 else 1
    packed = run.tuning["pack"]
    length = run.training["seq_length"]
    config.dataset = GPTSFTDatasetConfig(
        seq_length=length,
        dataset_root=NOWHERE,
        seed=run.training["seed"],
        preprocessing=preprocessing(run.tuning),
        enable_offline_packing=packed,
        offline_packing_specs=PackedSequenceSpecs(packed_sequence_size=length, pad_seq_to_mult=cut) if packed else None,
        dataset_kwargs={"pad_to_max_length": True},  # so that sequences are as long as memory and speed were told
        num_workers=config.dataset.num_workers,
        do_validation="valid" in splits(run),
        do_test="test" in splits(run),
    )
    if run.chat_template is not None:
        config.tokenizer.chat_template = run.chat_template
    # Every token counts the same, whichever microbatch or rank it is in: they hold different numbers of them.
    config.model.calculate_per_token_loss = True
    config.ddp.average_in_collective = False
    config.checkpoint.pretrained_checkpoint = pretrained
    if run.has_adapters:
        config.peft = adapters(run)
        config.checkpoint.pretrained_checkpoint = pretrained or NOWHERE


def splits(run: RunSpec) -> list[str]:
    """Those that get examples."""
    if run.data.get("blend"):
        shares = [float(share) for share in run.data["split"].split(",")]
        return [split for split, share in zip(SPLITS, shares, strict=True) if share > 0]
    return list(split_blends(run.data))


def preprocessing(tuning: Tree) -> SFTPreprocessingConfig:
    if tuning["template"] != NO_TEMPLATE:
        return ChatSFTPreprocessingConfig(loss_mode=LOSS_MODES[tuning["loss_on"]])
    whole = "full" if tuning["loss_on"] == "everything" else "completion"
    return PromptCompletionSFTPreprocessingConfig(
        prompt_column="prompt", completion_column="answer", loss_mode=whole, strip_whitespace=False
    )


def adapters(run: RunSpec) -> PEFT:
    wanted = run.tuning
    kind = LoRA if run.task == "lora" else DoRA
    return kind(
        target_modules=list(wanted["targets"]),
        dim=wanted["rank"],
        alpha=wanted["alpha"],
        dropout=wanted["dropout"],
    )


def begin(config: ConfigContainer, folder: RunFolder, index_cache: Path, resumes: bool) -> None:
    """Where examples lie, and whose weights training begins with: other than a run that resumes with its own
    checkpoint, adapters need them in every attempt.
    """
    config.dataset.dataset_root = str(index_cache.absolute())
    run = folder.run
    if resumes and not run.has_adapters:
        config.checkpoint.pretrained_checkpoint = None
    elif run.parent:
        config.checkpoint.pretrained_checkpoint = str(parents_checkpoint(folder).absolute())
    if run.has_adapters:
        _adapt(run.training["seed"], random_weights=config.checkpoint.pretrained_checkpoint == NOWHERE)


def parents_checkpoint(folder: RunFolder) -> Path:
    store = RunStore(Path(read(TrainRecord, folder.parent_manifest).store))
    return checkpoints.folder(store.checkpoints, folder.run.parent.iteration)


def _adapt(seed: int, random_weights: bool) -> None:
    """Have Bridge begin with the same adapters in every layout. Where weights are random, Megatron draws them again in
    every attempt, and there is no checkpoint of them to load before adapters are added.
    """
    from megatron.bridge.training import setup

    transform = setup._apply_peft_transformation

    def transform_and_draw(peft: PEFT, model: list[Any]) -> list[Any]:
        adapted = transform(peft, model)
        require_adapters(peft, adapted)
        draw(adapted, seed)
        return adapted

    def create(config: ConfigContainer, _: Any) -> Callable[[Any], Any]:
        return lambda model: transform_and_draw(config.peft, model)

    setup._apply_peft_transformation = transform_and_draw
    if random_weights:
        setup._create_peft_pre_wrap_hook = create


def draw(model: list[torch.nn.Module], seed: int) -> None:
    """Fill the adapters' first matrices (the second ones are zero) by the names of their layers, each rank its part.

    Bridge draws every rank's part from its own random numbers: another layout would begin with other adapters. Those of
    experts, which ranks hold whole, stay as Bridge has drawn them.
    """
    for name, adapter in _adapters(model):
        weight = adapter.linear_in.weight
        group = adapter.tp_group
        ranks, rank, axis = group.size(), group.rank(), 1 if adapter.input_is_parallel else 0
        whole = torch.empty([size * (ranks if one == axis else 1) for one, size in enumerate(weight.shape)])
        numbers = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:7]))
        torch.nn.init.xavier_normal_(whole, generator=numbers)
        with torch.no_grad():
            weight.copy_(whole.chunk(ranks, axis)[rank])


def require_adapters(peft: PEFT, model: list[torch.nn.Module]) -> None:
    """Of every target: Bridge only warns of one that matches no layer."""
    parts = [part for chunk in model for part in chunk.modules()]
    adapted = [part.base_linear_name for part in parts if isinstance(part, ParallelLinearAdapter)]
    has_layers = any(isinstance(part, TransformerLayer) for part in parts)  # a stage may have the embedding alone
    for target in peft.target_modules:
        if has_layers and not any(matches(target, name) for name in adapted):
            found = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in adapted)) or "none"
            raise InputError(
                f"tuning.targets: {target!r} matches no layer of this model (adapters are at: {found}): correct it, or "
                "remove it"
            )


def _adapters(model: list[torch.nn.Module]) -> Iterator[tuple[str, ParallelLinearAdapter]]:
    """Those that are not of experts, each with a name that it has in every layout."""
    for chunk in model:
        numbers = {
            name: part.layer_number for name, part in chunk.named_modules() if isinstance(part, TransformerLayer)
        }
        for name, part in chunk.named_modules():
            if isinstance(part, ParallelLinearAdapter) and not part.is_expert:
                layer = next((one for one in numbers if name.startswith(f"{one}.")), "")
                yield f"{numbers.get(layer)}{name.removeprefix(layer)}", part
