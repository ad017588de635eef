"""The loss of an exported model on the samples of the run's own evaluation.

The log's validation loss was computed by Megatron in the run's layout and precision; this one by transformers in fp32.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import torch
from megatron.bridge.data.loaders import build_train_valid_test_datasets, cyclic_iter
from megatron.bridge.data.samplers import build_pretraining_data_loader
from megatron.bridge.data.utils import get_dataset_provider
from megatron.bridge.training.config import runtime_config_update

from megaboa.blends import SPLITS
from megaboa.bridge import configuration, datasets
from megaboa.bridge.preflight import playing_rank_0_of
from megaboa.bridge.verdict import check
from megaboa.paths import RunFolder
from megaboa.records import Check, Evaluated
from megaboa.run.checkpoints import LOSS

# Largest difference of the two losses, by the precision of the run.
BOUNDS = {"fp32": 1e-4, "bf16_mixed": 2e-2, "fp16_mixed": 2e-2}
FP8_BOUND = 1e-1
MOST_WORK = 2e14  # operations: an hour or two
# They tell Megatron's attention where documents end; transformers' models would have to be told otherwise.
NOT_COMPARABLE = ("reset_position_ids", "reset_attention_mask", "fim")

USED = ("tokens", "labels", "loss_mask")
Batch = dict[str, torch.Tensor]


def why_not(folder: RunFolder, evaluation: Evaluated | None, params: int) -> str | None:
    """Why the two losses can't be compared; None if they can."""
    if evaluation is None or evaluation.samples is None:
        return "this checkpoint was not evaluated while training"
    if not folder.index or not Path(folder.index.cache).is_dir():
        return "the data's index is gone, or the data were made up"
    first, end = evaluation.samples
    if (work := 2 * params * (end - first) * folder.run["training"]["seq_length"]) > MOST_WORK:
        return f"{work:.0e} operations on one core would take hours"
    return next((f"data.{key} is set" for key in NOT_COMPARABLE if folder.run["data"].get(key)), None)


def batches(folder: RunFolder, evaluation: Evaluated) -> list[Batch]:
    """What the evaluation read, of all ranks. To be called before any process group is made: it plays them all.

    Bridge draws validation samples in a random order, and every data parallel rank from a part of its own.
    """
    config = configuration.build(folder.run, configuration.Inputs.for_data(folder))
    config.dataset.path_to_cache = str(Path(folder.index.cache).absolute())
    with playing_rank_0_of(folder.run["world_size"]):
        runtime_config_update(config)
    datasets.set_tokenizer(config)
    valid = build_train_valid_test_datasets(config, get_dataset_provider(config.dataset))[SPLITS.index("valid")]
    first, end = evaluation.samples
    size, ranks = config.validation.eval_micro_batch_size or config.train.micro_batch_size, config.data_parallel_size
    found = []
    for rank in range(ranks):
        loader = build_pretraining_data_loader(
            valid, first, "cyclic", size, 0, config.dataset.data_sharding, data_parallel_rank=rank,
            data_parallel_size=ranks, collate_fn=getattr(valid, "collate_fn", None)
        )  # fmt: skip
        found += itertools.islice(cyclic_iter(loader), (end - first) // (size * ranks))
    return found


def same_loss(model: torch.nn.Module, found: list[Batch], evaluation: Evaluated, precision: str) -> Check:
    """transformers' loss over these samples is what the training's log says."""
    total, count = 0.0, 0.0
    sequences = ({name: batch[name][row] for name in USED} for batch in found for row in range(len(batch["tokens"])))
    for sequence in sequences:  # one at a time: logits are large
        with torch.no_grad():
            logits = model(sequence["tokens"][None]).logits[0].float()
        losses = torch.nn.functional.cross_entropy(logits, sequence["labels"], reduction="none")
        mask = sequence["loss_mask"].float()
        total += float((losses * mask).sum(dtype=torch.float64))
        count += float(mask.sum(dtype=torch.float64))
    mine, logged = total / count, evaluation.losses[LOSS]
    bound = BOUNDS.get(precision, FP8_BOUND)
    detail = (
        f"{mine:.6f} by transformers, {logged:.6f} in the log, over the same {int(count):,} tokens; "
        f"allowed difference {bound:.0e} for {precision}"
    )
    return check("validation loss", abs(mine - logged) <= bound, detail, abs(mine - logged))
