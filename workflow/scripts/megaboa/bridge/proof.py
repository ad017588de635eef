"""Proofs that a conversion lost nothing: every tensor's name, shape, type and bits, equal logits and equal loss.

A proof is a list of checks, each PASS or FAIL with a description. The CPU backend, where it is needed, must be active
before this module is imported.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter, deque
from pathlib import Path

import torch
from megatron.bridge import AutoBridge
from megatron.bridge.data.loaders import build_train_valid_test_datasets, cyclic_iter
from megatron.bridge.data.samplers import build_pretraining_data_loader
from megatron.bridge.data.utils import get_dataset_provider
from megatron.bridge.training.config import runtime_config_update
from megatron.core import parallel_state
from megatron.core.utils import unwrap_model
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig

from megaboa.blends import SPLITS
from megaboa.bridge import adapters, configuration, datasets, finetuning, reference, tuned_samples, weights
from megaboa.bridge.as_trained import as_trained
from megaboa.bridge.card import corpora_as_read
from megaboa.bridge.convert import (
    converter_of,
    from_all,
    hf_tensors,
    is_last,
    load_checkpoint,
    process_groups,
)
from megaboa.bridge.logits import same_logits
from megaboa.bridge.process import playing_rank_0_of
from megaboa.bridge.source import copy_settings, has_weights, saved_tensors
from megaboa.bridge.tensor_checks import (
    DTYPE_NAMES,
    bits_digest,
    complete,
    kinds,
    listed,
    of_prediction,
    round_trip,
    same_bits,
    same_kinds,
    trained,
    trained_from_scratch,
)
from megaboa.bridge.trained import add_template, end_of_answers, ends, export_adapters, load_trained
from megaboa.bridge.verdict import check
from megaboa.bridge.weights import Tensors
from megaboa.conversion import WHOLE
from megaboa.files import folder_digests
from megaboa.layout import Layout
from megaboa.paths import CARD, RunFolder
from megaboa.records import LM_LOSS, Check, Evaluated, ExportRecord, ModelSource
from megaboa.run import checkpoints
from megaboa.store_paths import RunStore

NEEDED = {"tensors", "experts", "loads"}
COPY = "output_layer.weight"
PADDED = ("word_embeddings.weight", "output_layer.weight")
# Allowed difference of the loss from the one in the log, by the run's precision.
BOUNDS = {"fp32": 1e-4, "bf16_mixed": 2e-2, "fp16_mixed": 2e-2}
FP8_BOUND = 1e-1
MOST_WORK = 2e14  # operations: one or two hours
# They tell Megatron's attention where documents end, for which transformers' models need other inputs.
NOT_COMPARABLE = ("reset_position_ids", "reset_attention_mask", "fim")
LOSS_READS = ("tokens", "labels", "loss_mask")
Batch = dict[str, torch.Tensor]


def prove_import(source: ModelSource, checkpoint: Path, layout: Layout = WHOLE) -> list[Check]:
    """Prove that the Megatron checkpoint holds the Hugging Face model, completely and nothing else.

    If there are several ranks, each holds a part of the model, and only the last one returns checks.
    """
    bridge = converter_of(source)
    config = AutoConfig.from_pretrained(source.path, local_files_only=True)
    with process_groups(source.device, layout), Tensors(source.path) as originals:
        model = load_checkpoint(bridge, checkpoint, layout)
        checks = [mapped(bridge, model)]
        if is_last():
            checks = [*complete(originals, config), *checks, *round_trip(originals, hf_tensors(bridge, model))]
        else:
            deque(hf_tensors(bridge, model), maxlen=0)  # every rank contributes its parts
        theirs = reference.load(source.path, source.params) if is_last() else None
        checks += same_logits(model, theirs, *_probed(config, source))
        return checks if is_last() else []


def prove_export(
    export: ExportRecord, source: ModelSource, folder: RunFolder, layout: Layout = WHOLE
) -> tuple[list[Check], dict[str, str]]:
    """Prove that the exported folder is the checkpoint, completely, and a model that transformers loads and runs.

    Also returns checks that were not possible, and why. If there are several ranks, each holds a part of the
    checkpoint, and only the last one returns results.
    """
    if layout.world_size == 1 or int(os.environ["RANK"]) == layout.world_size - 1:
        found = _Found(export, source, folder)
    else:
        found = None
    bridge, checkpoint = converter_of(source), Path(export.checkpoint)
    config = AutoConfig.from_pretrained(source.path, local_files_only=True)
    vocab_size, longest, params = _probed(config, source)
    with process_groups(source.device, layout):
        if not from_all(found is None or found.can_be_read)[-1]:
            return (found.checks, found.left_out) if found else ([], {})
        model = load_trained(bridge, folder, checkpoint, layout)
        checks = [mapped(bridge, model)]
        trained_bits = parameter_digests(bridge, model, vocab_size)
        checks.append(second_export(bridge, model, folder, source, export))
        theirs = reference.load(export.path, source.params) if found else None
        checks += same_logits(model, theirs, vocab_size, folder.run.training.get("seq_length") or longest, params)
        del model  # same_logits has made it compute in fp32
        model = load_trained(bridge, folder, checkpoint, layout)
        checks += trained_further(bridge, model, folder, layout, trained_bits, vocab_size)
        read_back(bridge, model, export.path)
        checks.append(same_parameters(trained_bits, parameter_digests(bridge, model, vocab_size)))
    if found is None:
        return [], {}
    checks = [*found.checks, *checks, *found.loss(theirs.model)]
    if not folder.run.has_adapters:
        return checks, found.left_out
    del model
    with process_groups(source.device):  # loads the base's weights into the reference
        merged, unseen = adapters.prove(bridge, folder, Path(export.path), theirs.model)
    return [*checks, *merged], found.left_out | unseen


def _probed(config: PreTrainedConfig, source: ModelSource) -> tuple[int, int, int]:
    """Sizes that decide how logits are compared: of the vocabulary, of the longest sequence, of the model."""
    text = config.get_text_config()
    return text.vocab_size, getattr(text, "max_position_embeddings", 0) or 0, source.params


class _Found:
    """Checks of an export's files that need no Megatron, and inputs for comparing the loss."""

    def __init__(self, export: ExportRecord, source: ModelSource, folder: RunFolder):
        self.left_out: dict[str, str] = {}
        self._read: list[Batch] = []
        files = unchanged(export)
        self.checks = [files]
        self.can_be_read = files.passed
        if not files.passed:
            return  # nothing else can be said about changed files
        self._tensors(export, source, folder)
        self._evaluation = checkpoints.evaluations(RunStore(folder.store)).get(export.iteration)
        if obstacle := held_out_obstacle(folder, self._evaluation, source.params):
            self.left_out["validation loss"] = obstacle
        else:
            self._read = held_out_batches(folder, self._evaluation)  # must precede the process group
            self._precision = as_trained(folder).training["precision"]
        if folder.run.is_of_chats:
            self._stops(Path(export.path))
        self.checks += runs_alone(export.path, source.params)
        # If these failed, Megatron can't read the files either.
        self.can_be_read = not NEEDED.intersection(one.name for one in self.checks if not one.passed)

    def _tensors(self, export: ExportRecord, source: ModelSource, folder: RunFolder) -> None:
        # Expectations come from the source's config; from the export's only the type that training gave the weights.
        config = AutoConfig.from_pretrained(source.path, local_files_only=True)
        dtype = AutoConfig.from_pretrained(export.path, local_files_only=True).dtype
        with Tensors(export.path) as after:
            if has_weights(source):
                with Tensors(source.path) as before:
                    self.checks += [same_kinds(before.kinds(), after.kinds(), DTYPE_NAMES[dtype])]
                    self.checks += [trained(before, after)] if not folder.run.parent else []
            else:
                # That heads for multi-token prediction are whole is told by `mapped` and `read back`.
                found = {name: kind for name, kind in after.kinds().items() if not of_prediction(name, config)}
                self.checks.append(same_kinds(kinds(saved_tensors(config)), found, DTYPE_NAMES[dtype]))
                moved, obstacle = trained_from_scratch(after, dtype) if not folder.run.parent else (None, None)
                self.checks += [moved] if moved else []
                self.left_out |= {"trained": obstacle} if obstacle else {}
            if folder.run.parent and not finetuning.parents_checkpoint(folder).is_dir():
                self.left_out["trained"] = f"the checkpoint of {folder.run.parent} is gone"
            self.checks += complete(after, config)

    def _stops(self, export: Path) -> None:
        """Check that generation ends with what ended the answers of the examples."""
        words = AutoTokenizer.from_pretrained(export, local_files_only=True)
        end = end_of_answers(words)
        if end is None:
            self.left_out["stops"] = (
                "where answers end can't be told from the chat template: set eos_token_id where text is generated"
            )
            return
        found = ends(export)
        detail = f"answers end with {words.decode(end)}, generation with {' or '.join(map(words.decode, found))}"
        self.checks.append(check("stops", end in found, detail))

    def loss(self, theirs: torch.nn.Module) -> list[Check]:
        """Compare the loss of transformers' model on the samples of the run's own evaluation."""
        return [same_loss(theirs, self._read, self._evaluation, self._precision)] if self._read else []


def unchanged(export: ExportRecord) -> Check:
    """Check that the files are those that the export wrote."""
    found = folder_digests(export.path)
    wrong = sorted(name for name, digest in export.files.items() if found.get(name) != digest)
    extra = sorted(found.keys() - export.files.keys())
    detail = f"{len(export.files) - len(wrong)} of {len(export.files)} are as they were written"
    return check("files", not (wrong or extra), detail + listed("changed or missing", wrong) + listed("added", extra))


def second_export(
    bridge: AutoBridge, model: list[torch.nn.Module], run: RunFolder, source: ModelSource, export: ExportRecord
) -> Check:
    """Check that a second export, in another process, gives the same tensors bit for bit, and the same other files.

    The tensors are compared one at a time and not written. Their order, and thus their files, may differ, because it
    depends on the ranks. Only the last rank's result counts. Adapters are written again, and their files compared.
    """
    tensors = hf_tensors(bridge, model)
    if not is_last():
        deque(tensors, maxlen=0)
        return check("second export", True, "another rank's to say")
    names, wrong, types = set(), [], Counter()
    with Tensors(export.path) as written:
        for name, tensor in tensors:
            names.add(name)
            types[tensor.dtype] += tensor.nbytes
            if name not in written or not same_bits(tensor, written[name]):
                wrong.append(name)
        wrong += sorted(set(written) - names)
    with tempfile.TemporaryDirectory() as again:
        copy_settings(source, str(types.most_common(1)[0][0]).removeprefix("torch."), Path(again))
        if run.run.has_adapters:
            export_adapters(bridge, run, source, Path(export.checkpoint), Path(again))
        add_template(run.run, Path(again))
        expected = {name: digest for name, digest in export.files.items() if not weights.is_of_weights(name)}
        found = folder_digests(again) | {CARD: expected.get(CARD)}
    wrong += sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    detail = f"{len(names)} tensors are the same bit for bit, and {len(found) - 1} other files"
    return check("second export", not wrong, detail if not wrong else listed("different", wrong).lstrip("; "))


def trained_further(
    bridge: AutoBridge,
    model: list[torch.nn.Module],
    folder: RunFolder,
    layout: Layout,
    after: dict[str, str],
    vocab_size: int,
) -> list[Check]:
    """Check that a run that began with another's checkpoint has changed its weights. What adapters change is checked
    with them (`merged`)."""
    if folder.run.parent is None or folder.run.has_adapters:
        return []
    checkpoint = finetuning.parents_checkpoint(folder)
    if not from_all(checkpoint.is_dir())[-1]:
        return []
    parent = load_checkpoint(bridge, checkpoint, layout)
    for mine, theirs in zip(unwrap_model(model)[0].parameters(), unwrap_model(parent)[0].parameters(), strict=True):
        theirs.data = theirs.data.to(mine.dtype)  # a run may have another precision than its parent
    before = parameter_digests(bridge, parent, vocab_size)
    found = from_all((sum(before[name] != after[name] for name in after), len(after)))
    changed, count = map(sum, zip(*found, strict=True))
    detail = f"{changed} of {count} parameters differ from those of {folder.run.parent}"
    return [check("trained", changed > 0, detail)]


def read_back(bridge: AutoBridge, model: list[torch.nn.Module], folder: str) -> None:
    """Fill a Megatron model with the exported weights; parameters that aren't read from them become NaN."""
    with torch.no_grad():
        for parameter in unwrap_model(model)[0].parameters():
            parameter.fill_(float("nan"))
    bridge.load_hf_weights(model, folder)


def same_parameters(before: dict[str, str], after: dict[str, str]) -> Check:
    """Check that every parameter of the Megatron model, read back from the exported files, is the same bit for bit."""
    found = from_all((len(before), [name for name in before if after[name] != before[name]]))
    wrong = sorted({name for _, names in found for name in names})
    count = sum(number for number, _ in found)
    detail = f"{count - len(wrong)} of {count} parameters come back bit for bit"
    return check("read back", not wrong, detail + listed("different", wrong))


def parameter_digests(bridge: AutoBridge, model: list[torch.nn.Module], vocab_size: int) -> dict[str, str]:
    """Digest of every parameter, without Megatron's padding of the vocabulary."""
    found = {}
    for task in bridge.get_conversion_tasks(model):
        if task is not None and task.param_weight is not None:
            rows = task.param_weight.detach()
            if task.param_name.endswith(PADDED):  # this rank's rows of the vocabulary
                begin = parallel_state.get_tensor_model_parallel_rank() * len(rows)
                rows = rows[: max(0, vocab_size - begin)]
            found[task.param_name] = bits_digest(rows)
    return found


def mapped(bridge: AutoBridge, model: list[torch.nn.Module]) -> Check:
    """Check that every parameter of the Megatron model has a source, so that none silently keeps its random
    initialization.

    Bridge itself skips a parameter that it knows no tensor for, or whose tensor is missing, and only logs that.
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
    """Whether this pipeline stage has a copy of the first stage's embedding, for a tied head."""
    return part.share_embeddings_and_output_weights and not part.pre_process


def runs_alone(folder: str, params: int) -> list[Check]:
    """Check that a fresh process loads the model and generates, with no network and no Megatron."""
    scripts = Path(__file__).resolve().parents[2]
    last = ""
    with tempfile.TemporaryFile("w+") as answer:
        with subprocess.Popen(
            [sys.executable, "-m", "megaboa.bridge.reload", folder, str(params)],
            env={**os.environ, "PYTHONPATH": str(scripts), "HF_HUB_OFFLINE": "1"},
            stdout=answer,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            for line in filter(str.strip, process.stderr):
                last = line.strip()
                if last.startswith(reference.WAITS):
                    print(last, file=sys.__stderr__, flush=True)
        if process.returncode:
            why = last or f"exit code {process.returncode}"
            return [check("loads", False, f"transformers failed in a fresh process: {why}")]
        answer.seek(0)
        seen = json.load(answer)
    wrong = seen["missing"] + seen["unexpected"] + seen["mismatched"]
    return [
        check("loads", not wrong, "transformers loads it offline in a fresh process" + listed("not clean", wrong)),
        check("finite", seen["finite"], "all logits are finite" if seen["finite"] else "logits hold NaN or infinity"),
        check("generates", seen["generated"] > 0, f"{seen['generated']} tokens generated: {seen['text']!r}"),
    ]


def held_out_obstacle(folder: RunFolder, evaluation: Evaluated | None, params: int) -> str | None:
    """The reason why the loss can't be compared with the log's on the samples of the run's own evaluation; None if it
    can."""
    if evaluation is None or evaluation.samples is None:
        return "this checkpoint was not evaluated while training"
    if not folder.index or not Path(folder.index.cache).is_dir():
        return "the data's index is gone, or the data were made up"
    if corpora_as_read(folder).keys() != folder.corpus_manifests.keys():
        return "a corpus has changed since"
    first, end = evaluation.samples
    if (work := 2 * params * (end - first) * as_trained(folder).training["seq_length"]) > MOST_WORK:
        return f"{work:.0e} operations on one core would take hours"
    return next((f"data.{key} is set" for key in NOT_COMPARABLE if folder.run.data.get(key)), None)


def held_out_batches(folder: RunFolder, evaluation: Evaluated) -> list[Batch]:
    """The batches that the evaluation read on all ranks. Must be called before there is a process group.

    Bridge draws validation samples in random order, and each data parallel rank from its own part, whose size depends
    on the micro-batch, too.
    """
    config = configuration.build_as_launched(folder, configuration.Inputs.for_data(folder))
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
    """Check that transformers' loss over these samples is the one in the training's log.

    The logged loss was computed by Megatron in the run's layout and precision, this one by transformers in fp32.
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
    mine, logged = total / count, evaluation.losses[LM_LOSS]
    bound = BOUNDS.get(precision, FP8_BOUND)
    detail = (
        f"{mine:.6f} by transformers, {logged:.6f} in the log, over the same {int(count):,} tokens; "
        f"allowed difference {bound:.0e} for {precision}"
    )
    return check("validation loss", abs(mine - logged) <= bound, detail, abs(mine - logged))
