"""Fine-tuning: what a run's task sets in Bridge's configuration, and what training begins with.

Examples lie in the run's index (bridge/tuned_samples.py), split, and packed where that is asked for.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.bridge.data import conversation_processing, token_utils
from megatron.bridge.data.builders.gpt_sft import GPTSFTDatasetConfig
from megatron.bridge.data.datasets import gpt_sft
from megatron.bridge.data.packing import PackedSequenceSpecs
from megatron.bridge.data.sft_processing import (
    ChatSFTPreprocessingConfig,
    PromptCompletionSFTPreprocessingConfig,
    SFTPreprocessingConfig,
    TokenizedPromptCompletion,
    tokenize_prompt_completion_example,
)
from megatron.bridge.peft.base import PEFT
from megatron.bridge.peft.dora import DoRA
from megatron.bridge.peft.lora import LoRA
from megatron.bridge.peft.utils import ParallelLinearAdapter
from megatron.bridge.training.config import ConfigContainer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_layer import TransformerLayer

from megaboa.blends import SPLITS, split_blends
from megaboa.check.adapters import matches
from megaboa.errors import InputError
from megaboa.paths import RunFolder
from megaboa.records import NO_TEMPLATE, RunSpec, TrainRecord, Tree, read
from megaboa.run import checkpoints
from megaboa.store_paths import RunStore

# Placeholder for runs that aren't prepared yet, and for random weights: Bridge only checks that the folder exists.
NOWHERE = "."
# Tokens by which turns begin, and of images and sounds, which Bridge never counts.
NEVER_SPOKEN = token_utils.PAD_TOKENS
MARKS = re.compile(r"{%[-+]?\s*generation\s*[-+]?%}")
infer_boundaries = conversation_processing.infer_assistant_mask_boundary_config
LOSS_MODES = {"answers": "assistant", "last-answer": "last_turn", "everything": "full"}


def configure(config: ConfigContainer, run: RunSpec, pretrained: str | None) -> None:
    """Set the task's dataset, loss and adapters, after all keys and before overrides."""
    gpt_sft.tokenize_prompt_completion_example = joined
    conversation_processing.infer_assistant_mask_boundary_config = boundaries
    token_utils.PAD_TOKENS = set() if run.tuning["loss_on"] == "everything" else NEVER_SPOKEN
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
        dataset_kwargs={"pad_to_max_length": True},  # so that sequences are as long as estimates assumed
        num_workers=config.dataset.num_workers,
        do_validation="valid" in splits(run),
        do_test="test" in splits(run),
    )
    if run.chat_template is not None:
        config.tokenizer.chat_template = run.chat_template
    # Every token counts the same, although microbatches and ranks have different numbers of them.
    config.model.calculate_per_token_loss = True
    config.ddp.average_in_collective = False
    config.checkpoint.pretrained_checkpoint = pretrained
    if run.has_adapters:
        config.peft = adapters(run)
        config.checkpoint.pretrained_checkpoint = pretrained or NOWHERE


def splits(run: RunSpec) -> list[str]:
    """The splits that get examples."""
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


def joined(*arguments: Any, max_length: int, **named: Any) -> TokenizedPromptCompletion:
    """A prompt and its answer, cut at the end as conversations are, with one token more, which is only predicted.

    Bridge would cut the prompt, so that answers lose what they answer, and put the last token behind half an answer.
    """
    whole = tokenize_prompt_completion_example(*arguments, **named)
    room = max(0, max_length + 1 - len(whole.prompt_ids))
    return TokenizedPromptCompletion(
        input_ids=whole.input_ids[: max_length + 1],
        loss_mask=whole.loss_mask[: max_length + 1],
        prompt_ids=whole.prompt_ids[:max_length],
        completion_ids=whole.completion_ids[:room],
    )


def boundaries(tokenizer: Any) -> conversation_processing.AssistantMaskBoundaryConfig | None:
    """Where a known format begins and ends what the assistant says; None if the template marks it. Bridge would prefer
    the format to the marks."""
    words = conversation_processing.get_processor_tokenizer(tokenizer)
    template = conversation_processing._get_chat_template(words, tokenizer)
    return None if MARKS.search(template or "") else infer_boundaries(tokenizer)


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
    """Set where examples are, and the weights that training starts from.

    A run that resumes needs no such weights, except with adapters, whose base is loaded in every attempt.
    """
    skip_on_all_stages()
    config.dataset.dataset_root = str(index_cache.absolute())
    run = folder.run
    if resumes and not run.has_adapters:
        config.checkpoint.pretrained_checkpoint = None
    elif run.parent:
        config.checkpoint.pretrained_checkpoint = str(parents_checkpoint(folder).absolute())
    if run.has_adapters:
        _adapt(run.training["seed"], random_weights=config.checkpoint.pretrained_checkpoint == NOWHERE)


def skip_on_all_stages() -> None:
    """Skip the batches of a skipped step on every pipeline stage: in fine-tuning all read them. Bridge skips them on
    the first and the last."""
    from megatron.bridge.training import train

    train.is_pp_first_stage = lambda _: True


def parents_checkpoint(folder: RunFolder) -> Path:
    store = RunStore(Path(read(TrainRecord, folder.parent_manifest).store))
    return checkpoints.folder(store.checkpoints, folder.run.parent.iteration)


def _adapt(seed: int, random_weights: bool) -> None:
    """Make Bridge start with the same adapters in every layout.

    Random base weights are drawn by Megatron in every attempt, so there is no checkpoint to load before adapters are
    added.
    """
    from megatron.bridge.training import setup

    transform = setup._apply_peft_transformation

    def transform_and_draw(peft: PEFT, model: list[Any]) -> list[Any]:
        adapted = transform(peft, model)
        freeze_expert_biases(adapted)
        require_adapters(peft, adapted)
        draw(adapted, seed)
        return adapted

    def create(config: ConfigContainer, _: Any) -> Callable[[Any], Any]:
        return lambda model: transform_and_draw(config.peft, model)

    setup._apply_peft_transformation = transform_and_draw
    if random_weights:
        setup._create_peft_pre_wrap_hook = create


def draw(model: list[torch.nn.Module], seed: int) -> None:
    """Fill the adapters' first matrices (the second ones are zero), seeded by the names of their layers.

    Bridge draws each rank's part from the rank's own random numbers, so adapters would depend on the layout. Adapters
    of experts, which ranks hold completely, keep Bridge's values.
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


def freeze_expert_biases(model: list[torch.nn.Module]) -> None:
    """Keep the biases by which routers balance experts. They belong to the base, and no checkpoint of adapters has
    them; Megatron-Core changes them by the experts' load, frozen or not."""
    for chunk in model:
        for router in (part for part in chunk.modules() if isinstance(part, TopKRouter)):
            router.frozen_expert_bias = True


def require_adapters(peft: PEFT, model: list[torch.nn.Module]) -> None:
    """Check that every target matches a layer, because Bridge only warns."""
    parts = [part for chunk in model for part in chunk.modules()]
    adapted = [part.base_linear_name for part in parts if isinstance(part, ParallelLinearAdapter)]
    has_layers = any(isinstance(part, TransformerLayer) for part in parts)  # a stage may have only the embedding
    for target in peft.target_modules:
        if has_layers and not any(matches(target, name) for name in adapted):
            found = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in adapted)) or "none"
            raise InputError(
                f"tuning.targets: {target!r} matches no layer of this model (adapters are at: {found}): correct it, or "
                "remove it"
            )


def _adapters(model: list[torch.nn.Module]) -> Iterator[tuple[str, ParallelLinearAdapter]]:
    """All adapters except those of experts, each with a name that is the same in every layout."""
    for chunk in model:
        numbers = {
            name: part.layer_number for name, part in chunk.named_modules() if isinstance(part, TransformerLayer)
        }
        for name, part in chunk.named_modules():
            if isinstance(part, ParallelLinearAdapter) and not part.is_expert:
                layer = next((one for one in numbers if name.startswith(f"{one}.")), "")
                yield f"{numbers.get(layer)}{name.removeprefix(layer)}", part
