"""Megatron's index of a run's data: which samples there are, and in which order. Built before the run, without a GPU.

Bridge builds it from the run's own configuration, as on rank 0 of the run, so that the run finds it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from megatron.bridge.data.loaders import build_train_valid_test_datasets
from megatron.bridge.data.utils import get_dataset_provider
from megatron.bridge.training.config import ConfigContainer, runtime_config_update
from megatron.bridge.training.setup import _validate_and_set_vocab_size
from megatron.core.datasets.masked_dataset import MaskedWordPieceDataset

from megaboa import store
from megaboa.blends import SPLITS, files_held_out, key_of_validation, split_blends, validation_sets
from megaboa.bridge import configuration, datasets, tuned_samples
from megaboa.bridge.process import playing_rank_0_of
from megaboa.bridge.quiet import quietly
from megaboa.data import tokenizer
from megaboa.errors import InputError
from megaboa.files import read_json, write_json
from megaboa.metrics import VALIDATION_SET
from megaboa.paths import RunFolder
from megaboa.records import (
    Corpus,
    CorpusRead,
    DataIndex,
    EvaluationRead,
    IndexSpec,
    ModelSource,
    Sources,
    Tokenizer,
    Tree,
    parse,
    plain,
    read,
    read_if_there,
)
from megaboa.run.inputs import check_data, check_documents
from megaboa.store_paths import FACTS


def make(spec: IndexSpec, experiment: Path) -> DataIndex:
    """Make the index that a specification asks for, in the store, unless it is there."""
    folder = RunFolder(experiment / "runs" / spec.run)
    check_data(folder)
    require_one_tokenizer(folder)
    final = store.folder(spec.store, "indexes", spec.name, identity(folder, spec.key))
    with store.building(final) as partial:
        if partial:
            with quietly():
                facts = (tuned_samples.build if folder.run.is_tuned else build)(folder, partial / "cache")
            write_json(partial / FACTS, facts)
    made = {"name": spec.name, "cache": str(final / "cache"), "max_epochs": spec.max_epochs}
    found = parse(DataIndex, {**read_json(final / FACTS), **made}, final / FACTS)
    said = [*warnings(found.corpora, spec.max_epochs, has_data_of_parent(folder)), *repeated(found.evaluations)]
    said += [text for name, corpus in folder.corpora.items() if (text := tokenizer.unknown_tokens(name, corpus))]
    if found.examples:
        said += tuned_samples.warnings(found.examples)
    else:  # examples are split at random
        said += files_held_out(folder.corpora, folder.run.data)
    return replace(found, warnings=tuple(said))


def build(folder: RunFolder, cache: Path) -> Tree:
    """Build the index in the cache; return the number of samples, and how often training reads each corpus."""
    run, inputs = folder.run, configuration.Inputs.for_data(folder)
    config = configuration.build_as_launched(folder, inputs)
    config.dataset.path_to_cache = str(cache.absolute())
    config.dataset.fast_cache_load = config.dataset.defer_npy_index_mmap = False  # both require an existing index
    with playing_rank_0_of(run.world_size):
        runtime_config_update(config)
    check_documents(folder, config.dataset.split)
    datasets.set_tokenizer(config)
    require_vocabulary(config, inputs.corpora)
    splits = build_train_valid_test_datasets(config, get_dataset_provider(config.dataset))
    sets = datasets.build_validation_sets(config, run, inputs.corpora)
    further = {f"{VALIDATION_SET}{name}": dataset for name, dataset in sets.items()}
    found = dict(zip(SPLITS, splits, strict=True)) | further
    return {
        "samples": {name: len(dataset) for name, dataset in found.items() if dataset is not None},
        "corpora": [
            plain(row)
            for row in epochs(split_blends(run.data)["train"], inputs.corpora, found["train"], config, run.steps_before)
        ],
        "evaluations": [plain(row) for row in evaluations(run.data, inputs.corpora, found, config)],
    }


def require_one_tokenizer(folder: RunFolder) -> None:
    """Check that ids mean the same tokens in all corpora and in the model. The tokenizer of pairs, or of a recipe, need
    not be known."""
    known = {}  # by what it is of: its digest, its path, and its file
    for name in folder.corpora:
        listed = read_if_there(Sources, folder.experiment_folder.corpus(name).sources)
        if listed and (words := listed.tokenizer):
            known[f"corpora.{name}"] = (words.digest, words.path, Path(words.file))
    if folder.run.has_source:
        source = read(ModelSource, folder.source_manifest)
        known["the model"] = (source.tokenizer_digest, source.tokenizer, Path(str(source.tokenizer), tokenizer.FILE))
    elif folder.tokenizer_manifest:
        made = read(Tokenizer, folder.tokenizer_manifest)
        known["the model"] = (made.digest, made.path, Path(made.path, tokenizer.FILE))
    known = {of: one for of, one in known.items() if one[2].is_file()}
    if len({digest for digest, _, _ in known.values()}) < 2:
        return
    last = list(known)[-1]
    vocabularies = {of: tokenizer.vocabulary(file) for of, (_, _, file) in known.items()}
    for of, (_, path, _) in known.items():
        if meant := tokenizer.contradiction(vocabularies[of], vocabularies[last]):
            raise InputError(
                f"run {folder.name}: {of}.tokenizer: {path} has another vocabulary than {known[last][1]} of {last}: "
                f"{meant}; name the same tokenizer, or leave the corpus out of data"
            )


def require_vocabulary(config: ConfigContainer, corpora: datasets.Corpora) -> None:
    """Check that the vocabulary holds all tokens: on a GPU, one beyond it causes an assertion that names neither."""
    vocab_size, _ = _validate_and_set_vocab_size(
        config.model.vocab_size, config.dataset.tokenizer.vocab_size, config.tokenizer.use_tokenizer_vocab_size
    )
    for name, corpus in corpora.items():
        for part in corpus.datasets:
            if part.largest_token >= vocab_size:
                raise InputError(
                    f"corpora.{name}: {part.prefix}.bin holds token {part.largest_token}, and the model's "
                    f"vocabulary is {vocab_size}: write the corpus with the model's tokenizer, or take a larger model"
                )


def epochs(
    blend: dict[str, float], corpora: datasets.Corpora, dataset: Any, config: ConfigContainer, start: int = 0
) -> list[CorpusRead]:
    """For each corpus of the blend, and each of its prefixes if they have weights: tokens that training draws, tokens
    available, and their ratio. `start`: step after which the run begins; the samples of the steps before are a
    parent's."""
    counted = iter(_tokens(dataset, config, start))
    total = sum(blend.values())
    rows = []
    for name, weight in blend.items():
        parts = [part for part in corpora[name].datasets if part.tokens]
        counts = list(itertools.islice(counted, len(parts)))
        rows.append(_row(name, weight / total, np.sum(counts, axis=0).tolist()))
        if len(parts) > 1 and parts[0].weight is not None:  # otherwise all are read equally often
            whole = sum(part.weight for part in parts)
            rows += [
                _row(name, weight / total * part.weight / whole, of_part, part.prefix)
                for part, of_part in zip(parts, counts, strict=True)
            ]
    return rows


def _row(name: str, weight: float, counts: Sequence[int], prefix: str = "") -> CorpusRead:
    before, asked, there = counts
    return CorpusRead(
        name=name,
        prefix=prefix,
        weight=weight,
        tokens_before=before,
        tokens_asked=asked,
        tokens=there,
        epochs=asked / there,
    )


def _tokens(dataset: Any, config: ConfigContainer, start: int) -> list[tuple[int, int, int]]:
    """For each dataset of the blend, in its order: the tokens of the steps up to `start`, those that training draws
    after it, and the tokens of the documents that it draws from. Two corpora may have a dataset in common."""
    first, end = (step * config.train.global_batch_size for step in (start, config.train.train_iters))
    parts = getattr(dataset, "datasets", [dataset])

    def drawn(samples: slice) -> list[int]:
        counts = [samples.stop - samples.start]
        if len(parts) > 1:
            counts = np.bincount(dataset.dataset_index[samples], minlength=len(parts)).tolist()
        return [count * config.dataset.seq_length for count in counts]

    return list(zip(drawn(slice(0, first)), drawn(slice(first, end)), map(_tokens_of, parts), strict=True))


def _tokens_of(part: Any) -> int:
    """Tokens of the documents that samples are drawn from; masked datasets cut them into sentences."""
    if isinstance(part, MaskedWordPieceDataset):
        return part.tokens
    return int(part.dataset.sequence_lengths[part.indices].sum())


def warnings(rows: Sequence[CorpusRead], limit: float, resumes: bool = False) -> list[str]:
    """`resumes`: the run continues with its parent's data, whose samples it doesn't read from the start again."""
    by_prefix = {row.name for row in rows if row.prefix}
    said = []
    for row in rows:
        read = row.tokens_asked + (row.tokens_before if resumes else 0)
        if read > limit * row.tokens and (row.prefix or row.name not in by_prefix):
            what = f"corpora.{row.name}.megatron: {row.prefix}" if row.prefix else f"corpus {row.name!r}"
            times = f"{read / row.tokens:.3g} times" + (
                " by the run and its parents" if read > row.tokens_asked else ""
            )
            said.append(
                f"{what} is read {times} ({read:,} of {row.tokens:,} tokens), and data.max_epochs is "
                f"{limit:g}: train on fewer tokens, lower its weight, or raise the limit"
            )
    return said


def evaluations(
    data: Tree, corpora: datasets.Corpora, found: Mapping[str, Any], config: ConfigContainer
) -> Iterator[EvaluationRead]:
    """How much one evaluation reads of each validation set. `found`: the datasets, by split or `valid/<name>`."""
    sets = {
        f"{VALIDATION_SET}{name}": (f"data.validation_sets.{name}", one) for name, one in validation_sets(data).items()
    }
    if found.get("valid") is not None:
        sets["valid"] = (key_of_validation(data), split_blends(data)["valid"])
    for name, (key, blend) in sets.items() if config.validation.eval_iters else ():
        yield _evaluation(key, blend, corpora, found[name], config)


def _evaluation(
    key: str, blend: dict[str, float], corpora: datasets.Corpora, dataset: Any, config: ConfigContainer
) -> EvaluationRead:
    """What one evaluation reads of the corpus, or weighted prefix, of which it asks for the largest part."""
    batch = (config.validation.eval_global_batch_size or config.train.global_batch_size) * config.dataset.seq_length
    weights = getattr(dataset, "weights", [1.0])
    counted = iter(zip(weights, map(_tokens_of, getattr(dataset, "datasets", [dataset])), strict=True))
    rows = []
    for name in blend:
        parts = [part for part in corpora[name].datasets if part.tokens]
        found = list(itertools.islice(counted, len(parts)))
        if parts[0].weight is None:  # all are read equally often
            rows.append((name, "", *np.sum(found, axis=0)))
        else:
            rows += [(name, part.prefix, *one) for part, one in zip(parts, found, strict=True)]
    corpus, prefix, weight, tokens = min(rows, key=lambda row: row[3] / row[2])
    of_batch, iters = weight / sum(weights) * batch, config.validation.eval_iters
    return EvaluationRead(
        key=key,
        corpus=corpus,
        prefix=prefix,
        unit="tokens",
        asked=round(of_batch * iters),
        there=int(tokens),
        eval_iters=iters,
        most=int(tokens / of_batch),
    )


def repeated(rows: Sequence[EvaluationRead]) -> Iterator[str]:
    """Warnings of validation sets of which one evaluation reads documents several times."""
    for row in rows:
        if row.asked <= row.there:
            continue
        what = f"corpora.{row.corpus}.megatron: {row.prefix}" if row.prefix else f"corpus {row.corpus!r}"
        remedy = (
            f"set eval_iters to at most {row.most:,}, or validate on more text"
            if row.most
            else "one batch is more than it has: validate on more text, or take smaller batches"
        )
        yield (
            f"{row.key}: {what} has {row.there:,} {row.unit} for validation, and each evaluation reads {row.asked:,} "
            f"(training.eval_iters: {row.eval_iters}), so it repeats some: {remedy}"
        )


def has_data_of_parent(folder: RunFolder) -> bool:
    parent = folder.parent_folder
    return parent is not None and split_blends(parent.run.data).get("train") == split_blends(folder.run.data)["train"]


def identity(folder: RunFolder, key: Tree) -> Tree:
    """What the index depends on: the plan's key, and corpora and tokenizer, whose paths are part of Megatron's key.

    The index of a fine-tuned run has tokens of its own; others take those of their corpora.
    """
    tokenizer = folder.tokenizer_manifest or (folder.source_manifest if folder.run.has_source else None)
    manifest = read_json(tokenizer) if tokenizer else {}
    made_by = ["tokenizer_digest", *(["chat_template"] if folder.run.has_template_of_model else [])]
    return {
        "key": key,
        **({name: manifest.get(name) for name in made_by} if folder.run.is_tuned else {}),
        "corpora": {name: _places(corpus) for name, corpus in folder.corpora.items()},
        "tokenizer": manifest.get("tokenizer") or manifest.get("path"),
        "megatron": version("megatron-core"),
    }


def _places(corpus: Corpus) -> list[str]:
    return [corpus.digest, *(part.prefix for part in corpus.datasets)]
