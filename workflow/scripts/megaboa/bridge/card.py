"""The model card of an export: the model, its training, its data, and its results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megaboa.blends import split_blends
from megaboa.bridge.as_trained import as_trained
from megaboa.layout import NAMES
from megaboa.paths import ADAPTER, CHAT_TEMPLATE, RunFolder
from megaboa.records import LM_LOSS, Corpus, Evaluated, Identity, ModelSource, TrainRecord, read_if_there
from megaboa.store_paths import RunStore

TASKS = {
    "pretrain": "Pretrained",
    "sft": "Fine-tuned",
    "lora": "Fine-tuned by low-rank adapters (LoRA)",
    "dora": "Fine-tuned by weight-decomposed adapters (DoRA)",
}


def card(
    folder: RunFolder,
    source: ModelSource,
    iteration: int,
    evaluation: Evaluated | None,
    train: TrainRecord,
    license: str | None,
    commit: str | None,
    versions: dict[str, str],
) -> str:
    """The README.md of the exported folder. The same run always yields the same text."""
    title = f"{folder.experiment}: {folder.name}"
    sections = [
        _front_matter(folder, source, license),
        f"# {title}\n\n{TASKS[folder.run.task]} with Megatron-Bridge by Megaboa; weights of iteration {iteration}"
        + (f" of {train.train_iters}.\n" if train.train_iters else ".\n"),
        *_tuning(folder),
        _table("Training", _training(folder, source, iteration, evaluation)),
        _table("Data", _data(folder, iteration, folder.corpora)),
        *_data_of_parents(folder),
        _table("Made with", {"commit": commit or "unknown", **versions, "run": train.identity}),
    ]
    return "\n".join(sections)


def _tuning(folder: RunFolder) -> list[str]:
    """The section about fine-tuning, and where the adapters are."""
    run, wanted = folder.run, folder.run.tuning
    if not run.is_tuned:
        return []
    template = {None: "the tokenizer's own", "none": "none"}.get(wanted["template"], CHAT_TEMPLATE)
    rows = {"loss on": wanted["loss_on"], "chat template": template}
    rows |= {name: wanted[name] for name in ("rank", "alpha") if name in wanted}
    if run.has_adapters:
        rows |= {
            "adapted layers": ", ".join(wanted["targets"]),
            "adapters alone": f"`{ADAPTER}/`; here they are merged",
        }
    return [_table("Fine-tuning", rows)]


def _front_matter(folder: RunFolder, source: ModelSource, license: str | None) -> str:
    """The YAML header. Values are written as JSON, a subset of YAML, so strings need no escaping rules of our own."""
    fields: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    fields["tags"] = ["megatron-bridge", "megaboa"]
    if license:
        fields["license"] = license
    model = folder.run.model
    if model["init"] == "pretrained" and source.revision:  # from the hub; a local path means nothing to others
        fields["base_model"] = model["hf"]
    return "---\n" + "".join(f"{name}: {json.dumps(value)}\n" for name, value in fields.items()) + "---\n"


def _training(folder: RunFolder, source: ModelSource, iteration: int, evaluation: Evaluated | None) -> dict[str, Any]:
    run = as_trained(folder)
    training, parallel = run.training, run.parallel
    layout = ", ".join(
        f"{name} {parallel[name]}" for name in (*NAMES, "fsdp") if parallel.get(name) not in (None, 1, "none")
    )
    start = "the source's weights" if run.model["init"] == "pretrained" else "random weights"
    if source.revision and run.model["init"] == "pretrained":
        start = f"{run.model['hf']} at {source.revision}"
    if parent := run.parent:
        start = f"iteration {parent.iteration} of {parent.experiment}: {parent.run}"
    rows = {
        "parameters": f"{source.params:,}",
        "started from": start,
        "tokens seen": f"{_tokens(folder, iteration):,}",
        "sequence length": training["seq_length"],
        "global batch": f"{training['global_batch_size']} sequences",
        "precision": training["precision"],
        "optimizer": f"{run.optimizer['name']}, peak learning rate {run.optimizer['lr']:g}",
        "layout": f"{run.world_size} rank(s)" + (f", {layout}" if layout else ""),
        "seed": training["seed"],
    }
    if evaluation:
        rows["validation loss"] = f"{evaluation.losses[LM_LOSS]:.4f}"
    return rows


def _tokens(folder: RunFolder, iteration: int) -> int:
    """Tokens seen up to this iteration, including those of parent runs."""
    training, own = as_trained(folder).training, iteration - folder.run.steps_before
    return _tokens_before(folder) + own * training["global_batch_size"] * training["seq_length"]


def _tokens_before(folder: RunFolder) -> int:
    """Tokens seen by parent runs."""
    parent = folder.run.parent
    return _tokens(folder.parent_folder, parent.iteration) if parent else 0


def _data_of_parents(folder: RunFolder) -> list[str]:
    """What the run's parent read up to the checkpoint, the parent's own parent, and so on."""
    sections = []
    while (parent := folder.run.parent) and (folder := folder.parent_folder):
        sections.append(_table(f"Data of {parent}", _data(folder, parent.iteration, _corpora_as_read(folder))))
    return sections


def _corpora_as_read(folder: RunFolder) -> dict[str, Corpus]:
    """The corpora of a parent whose manifests still are those that it was trained with: its experiment may have changed
    since."""
    found = {name: read_if_there(Corpus, path) for name, path in folder.corpus_manifests.items()}
    train = read_if_there(TrainRecord, folder.train_manifest)
    identity = train and read_if_there(Identity, RunStore(Path(train.store)).identity)
    return {
        name: corpus
        for name, corpus in found.items()
        if corpus and (identity is None or identity.corpora.get(name) == corpus.digest)
    }


def _data(folder: RunFolder, iteration: int, corpora: dict[str, Corpus]) -> dict[str, str]:
    """Training data, each with its share of the blend and the tokens read; corpora only used for evaluation say so."""
    trained = split_blends(folder.run.data).get("train", {})
    own = _tokens(folder, iteration) - _tokens_before(folder)
    rows = {}
    for name in folder.corpus_manifests:
        corpus = corpora.get(name)
        share = trained.get(name, 0) / (sum(trained.values()) or 1)
        use = (
            f"{share:.4g} of the blend, about {share * own:,.0f} tokens read" if share else "not trained on, evaluated"
        )
        if corpus is None:
            rows[name] = f"{use}; the corpus has changed since, or is gone"
            continue
        if corpus.examples:  # token counts would include padding
            rows[name] = f"{corpus.documents:,} examples, digest {corpus.digest[:12]}"
            continue
        rows[name] = f"{use}; {corpus.documents:,} documents, {corpus.tokens:,} tokens, digest {corpus.digest[:12]}"
    return rows or {"none": "the recipe's" if folder.run.is_recipe else "mock data"}


def _table(title: str, rows: dict[str, Any]) -> str:
    lines = [f"| {name} | {str(value).replace('|', chr(92) + '|')} |" for name, value in rows.items()]
    return "\n".join([f"## {title}\n", "| | |", "|---|---|", *lines]) + "\n"
