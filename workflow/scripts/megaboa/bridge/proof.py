"""Proofs that a conversion lost nothing: every tensor by name, shape, type and bits, the same logits and the same loss.

A proof is a list of checks, each PASS or FAIL with what was seen. The CPU backend, where it is needed, must be active
before this module is imported.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from collections import deque
from pathlib import Path

import torch
from megatron.bridge import AutoBridge
from megatron.bridge.data.loaders import build_train_valid_test_datasets, cyclic_iter
from megatron.bridge.data.samplers import build_pretraining_data_loader
from megatron.bridge.data.utils import get_dataset_provider
from megatron.bridge.training.config import runtime_config_update
from megatron.core.utils import unwrap_model
from transformers import AutoConfig

from megaboa.blends import SPLITS
from megaboa.bridge import adapters, configuration, datasets, tuned_samples
from megaboa.bridge.as_trained import as_trained
from megaboa.bridge.convert import (
    converter_of,
    export_model,
    from_all,
    hf_tensors,
    is_last,
    load_checkpoint,
    load_trained,
    process_groups,
)
from megaboa.bridge.logits import load_reference, same_logits
from megaboa.bridge.process import playing_rank_0_of
from megaboa.bridge.source import has_weights, saved_tensors
from megaboa.bridge.tensor_checks import (
    DTYPE_NAMES,
    bits_digest,
    complete,
    kinds,
    listed,
    round_trip,
    same_kinds,
    trained,
    trained_from_scratch,
)
from megaboa.bridge.verdict import check
from megaboa.bridge.weights import Tensors
from megaboa.conversion import WHOLE
from megaboa.files import folder_digests
from megaboa.layout import Layout
from megaboa.paths import CARD, RunFolder, RunStore
from megaboa.records import Check, Evaluated, ExportRecord, ModelSource
from megaboa.run import checkpoints

NEEDED = {"tensors", "experts", "loads"}
COPY = "output_layer.weight"
PADDED = ("word_embeddings.weight", "output_layer.weight")
# Largest difference of the loss from the one in the log, by the precision of the run.
BOUNDS = {"fp32": 1e-4, "bf16_mixed": 2e-2, "fp16_mixed": 2e-2}
FP8_BOUND = 1e-1
MOST_WORK = 2e14  # operations: an hour or two
# They tell Megatron's attention where documents end; transformers' models would have to be told otherwise.
NOT_COMPARABLE = ("reset_position_ids", "reset_attention_mask", "fim")
LOSS_READS = ("tokens", "labels", "loss_mask")
Batch = dict[str, torch.Tensor]


def prove_import(source: ModelSource, checkpoint: Path, layout: Layout = WHOLE) -> list[Check]:
    """The Megatron checkpoint holds the Hugging Face model, the whole of it and nothing else.

    Of several ranks each holds a part of it, and the last one says what was seen; the others return nothing.
    """
    bridge = converter_of(source)
    config = AutoConfig.from_pretrained(source.path, local_files_only=True)
    with process_groups(source.device, layout), Tensors(source.path) as originals:
        model = load_checkpoint(bridge, checkpoint, layout)
        checks = [mapped(bridge, model)]
        if is_last():
            checks = [*complete(originals, config), *checks, *round_trip(originals, hf_tensors(bridge, model))]
        else:
            deque(hf_tensors(bridge, model), maxlen=0)  # every rank gives its part
        reference = load_reference(source.path) if is_last() else None
        checks += same_logits(model, reference, config.get_text_config().vocab_size)
        return checks if is_last() else []


def prove_export(export: ExportRecord, source: ModelSource, folder: RunFolder) -> tuple[list[Check], dict[str, str]]:
    """The exported folder is the checkpoint, the whole of it, and a model that transformers loads and runs.

    Also what could not be looked at, and why.
    """
    files = unchanged(export)
    if not files.passed:
        return [files], {}  # what else could be said of it?
    # What is expected comes from the source; of the export's own config only the type that training gave the weights.
    config = AutoConfig.from_pretrained(source.path, local_files_only=True)
    dtype = AutoConfig.from_pretrained(export.path, local_files_only=True).dtype
    checks, left_out = [files], {}
    with Tensors(export.path) as after:
        if has_weights(source):
            with Tensors(source.path) as before:
                checks += [same_kinds(before.kinds(), after.kinds(), DTYPE_NAMES[dtype]), trained(before, after)]
        else:
            checks.append(same_kinds(kinds(saved_tensors(config)), after.kinds(), DTYPE_NAMES[dtype]))
            moved, obstacle = trained_from_scratch(after, dtype)
            checks += [moved] if moved else []
            left_out |= {"trained": obstacle} if obstacle else {}
        checks += complete(after, config)
    evaluation = checkpoints.evaluations(RunStore(folder.store)).get(export.iteration)
    obstacle = held_out_obstacle(folder, evaluation, source.params)
    read = [] if obstacle else held_out_batches(folder, evaluation)  # before there is a process group
    checks += runs_alone(export.path)
    if NEEDED.intersection(one.name for one in checks if not one.passed):
        return checks, left_out  # Megatron could not read it either
    bridge, checkpoint = converter_of(source), Path(export.checkpoint)
    vocab_size = config.get_text_config().vocab_size
    with process_groups(source.device):
        model = load_trained(bridge, folder, checkpoint)
        checks.append(mapped(bridge, model))
        trained_bits = parameter_digests(bridge, model, vocab_size)
        checks.append(second_export(bridge, model, folder, source, export))
        reference = load_reference(export.path)
        checks += same_logits(model, reference, vocab_size)  # it leaves the model in fp32
        model = load_trained(bridge, folder, checkpoint)
        read_back(bridge, model, export.path)
        checks.append(same_parameters(trained_bits, parameter_digests(bridge, model, vocab_size)))
        if read:
            checks.append(same_loss(reference, read, evaluation, as_trained(folder).training["precision"]))
        if folder.run.has_adapters:  # it leaves the reference with the base's weights
            merged, unseen = adapters.prove(bridge, folder, Path(export.path), reference)
            checks, left_out = [*checks, *merged], left_out | unseen
    return checks, left_out | ({"validation loss": obstacle} if obstacle else {})


def unchanged(export: ExportRecord) -> Check:
    """The files are those that the export wrote."""
    found = folder_digests(export.path)
    wrong = sorted(name for name, digest in export.files.items() if found.get(name) != digest)
    extra = sorted(found.keys() - export.files.keys())
    detail = f"{len(export.files) - len(wrong)} of {len(export.files)} are as they were written"
    return check("files", not (wrong or extra), detail + listed("changed or missing", wrong) + listed("added", extra))


def second_export(
    bridge: AutoBridge, model: list[torch.nn.Module], run: RunFolder, source: ModelSource, export: ExportRecord
) -> Check:
    """A second export, in another process, gives the same files byte for byte."""
    folder = Path(export.path)
    again = folder.with_name(f".{folder.name}.again")
    shutil.rmtree(again, ignore_errors=True)
    again.mkdir()
    try:
        export_model(bridge, model, run, source, Path(export.checkpoint), again, export.file_bytes)
        found = folder_digests(again)
    finally:
        shutil.rmtree(again, ignore_errors=True)
    expected = {name: digest for name, digest in export.files.items() if name != CARD}
    wrong = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    detail = f"{len(found)} files are the same byte for byte"
    return check("second export", not wrong, detail if not wrong else listed("different", wrong).lstrip("; "))


def read_back(bridge: AutoBridge, model: list[torch.nn.Module], folder: str) -> None:
    """Fill a Megatron model with the exported weights; what isn't read from them is NaN."""
    with torch.no_grad():
        for parameter in unwrap_model(model)[0].parameters():
            parameter.fill_(float("nan"))
    bridge.load_hf_weights(model, folder)


def same_parameters(before: dict[str, str], after: dict[str, str]) -> Check:
    """Read from the exported files, every parameter of the Megatron model is what it was, bit for bit."""
    wrong = sorted(name for name in before if after[name] != before[name])
    detail = f"{len(before) - len(wrong)} of {len(before)} parameters come back bit for bit"
    return check("read back", not wrong, detail + listed("different", wrong))


def parameter_digests(bridge: AutoBridge, model: list[torch.nn.Module], vocab_size: int) -> dict[str, str]:
    """Of every parameter, the rows by which Megatron pads the vocabulary left out."""
    found = {}
    for task in bridge.get_conversion_tasks(model):
        if task is not None and task.param_weight is not None:
            rows = task.param_weight.detach()
            padded = task.param_name.endswith(PADDED) and len(rows) > vocab_size
            found[task.param_name] = bits_digest(rows[:vocab_size] if padded else rows)
    return found


def mapped(bridge: AutoBridge, model: list[torch.nn.Module]) -> Check:
    """Every parameter of the Megatron model has its counterpart: none kept a random start unnoticed.

    Bridge itself leaves out a parameter for which it knows no tensor, or whose tensor isn't there, and only logs it.
    """
    covered = {task.param_name for task in bridge.get_conversion_tasks(model) if task and task.param_weight is not None}
    part = unwrap_model(model)[0]
    names = [name for name, _ in part.named_parameters() if name != COPY or not _has_copy(part)]
    found = from_all((len(names), sorted(set(names) - covered)))
    count = sum(number for number, _ in found)
    left = [(name, rank) for rank, (_, unmapped) in enumerate(found) for name in unmapped]
    left = [name if len(found) == 1 else f"{name} of rank {rank}" for name, rank in left]
    detail = f"{count - len(left)} of {count} come from tensors of the model"
    return check("Megatron parameters", not left, detail + listed("without a source", left))


def _has_copy(part: torch.nn.Module) -> bool:
    """Whether it is the last stage of a pipeline, with a copy of the first one's embedding for a tied head."""
    return part.share_embeddings_and_output_weights and not part.pre_process


def runs_alone(folder: str) -> list[Check]:
    """A fresh process, with no network and no Megatron, loads the model and generates."""
    scripts = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "megaboa.bridge.reload", folder],
        env={**os.environ, "PYTHONPATH": str(scripts), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        return [check("loads", False, f"transformers failed in a fresh process: {last[0]}")]
    seen = json.loads(done.stdout)
    wrong = seen["missing"] + seen["unexpected"] + seen["mismatched"]
    return [
        check("loads", not wrong, "transformers loads it offline in a fresh process" + listed("not clean", wrong)),
        check("finite", seen["finite"], "all logits are finite" if seen["finite"] else "logits hold NaN or infinity"),
        check("generates", seen["generated"] > 0, f"{seen['generated']} tokens generated: {seen['text']!r}"),
    ]


def held_out_obstacle(folder: RunFolder, evaluation: Evaluated | None, params: int) -> str | None:
    """Why the loss can't be compared with the log's on the samples of the run's own evaluation; None if it can."""
    if evaluation is None or evaluation.samples is None:
        return "this checkpoint was not evaluated while training"
    if not folder.index or not Path(folder.index.cache).is_dir():
        return "the data's index is gone, or the data were made up"
    first, end = evaluation.samples
    if (work := 2 * params * (end - first) * as_trained(folder).training["seq_length"]) > MOST_WORK:
        return f"{work:.0e} operations on one core would take hours"
    return next((f"data.{key} is set" for key in NOT_COMPARABLE if folder.run.data.get(key)), None)


def held_out_batches(folder: RunFolder, evaluation: Evaluated) -> list[Batch]:
    """What the evaluation read, of all ranks. To be called before any process group is made: it plays them all.

    Bridge draws validation samples in a random order, and every data parallel rank from a part of its own.
    """
    config = configuration.build(folder.run, configuration.Inputs.for_data(folder))
    config.dataset.path_to_cache = str(Path(folder.index.cache).absolute())
    with playing_rank_0_of(folder.run.world_size):
        runtime_config_update(config)
    first, end = evaluation.samples
    if folder.run.is_tuned:
        return tuned_samples.held_out(config, folder, first, end)
    datasets.set_tokenizer(config)
    valid = build_train_valid_test_datasets(config, get_dataset_provider(config.dataset))[SPLITS.index("valid")]
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
    """transformers' loss over these samples is what the training's log says.

    The log's was computed by Megatron in the run's layout and precision; this one by transformers in fp32.
    """
    total, count = 0.0, 0.0
    sequences = (
        {name: batch[name][row] for name in LOSS_READS} for batch in found for row in range(len(batch["tokens"]))
    )
    for sequence in sequences:  # one at a time: logits are large
        with torch.no_grad():
            logits = model(sequence["tokens"][None]).logits[0].float()
        losses = torch.nn.functional.cross_entropy(logits, sequence["labels"], reduction="none")
        mask = sequence["loss_mask"].float()
        total += float((losses * mask).sum(dtype=torch.float64))
        count += float(mask.sum(dtype=torch.float64))
    mine, logged = total / count, evaluation.losses[checkpoints.LOSS]
    bound = BOUNDS.get(precision, FP8_BOUND)
    detail = (
        f"{mine:.6f} by transformers, {logged:.6f} in the log, over the same {int(count):,} tokens; "
        f"allowed difference {bound:.0e} for {precision}"
    )
    return check("validation loss", abs(mine - logged) <= bound, detail, abs(mine - logged))
