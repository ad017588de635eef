"""The model card of an export: the model, its training, its data, and its results."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from megaboa.blends import split_blends
from megaboa.bridge.as_trained import as_trained
from megaboa.layout import NAMES
from megaboa.paths import ADAPTER, CARD, CHAT_TEMPLATE, RunFolder, run_of
from megaboa.records import (
    LM_LOSS,
    Corpus,
    DataIndex,
    Evaluated,
    ExamplesRead,
    ExportRecord,
    Identity,
    ModelSource,
    Origin,
    Parent,
    RunSpec,
    TrainRecord,
    Tree,
    read_if_there,
)
from megaboa.run.versions import folder_of
from megaboa.store_paths import RunStore

TAKEN = ("license", "license_name", "license_link", "base_model")  # from a local base's card
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
        _table("Data", _data(folder, iteration, corpora_as_read(folder))),
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
    model, given = folder.run.model, {}
    if model["init"] == "pretrained" and source.revision:
        given = {"base_model": model["hf"]}
    elif model["init"] == "pretrained":  # a local path means nothing to others, but its own card may
        given = _head(Path(source.folder or source.path, CARD))
    if license:
        given = {"base_model": given.get("base_model"), "license": license}
    fields |= {name: given[name] for name in TAKEN if given.get(name)}
    lines = (f"{name}: {json.dumps(value, default=str)}\n" for name, value in fields.items())
    return f"---\n{''.join(lines)}---\n"


def _head(card: Path) -> Tree:
    """The front matter of a model card; empty if there is none that can be read."""
    text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
    found = None
    with contextlib.suppress(yaml.YAMLError):
        found = yaml.safe_load(text.split("\n---", 1)[0].removeprefix("---")) if text.startswith("---") else None
    return found if isinstance(found, dict) else {}


def origin(folder: Path) -> Origin | None:
    """The run of which a local folder is an export, by the manifest next to the link to it."""
    run = run_of(folder)
    if not folder.is_symlink() or folder.name != run.export.stem:
        return None
    export = read_if_there(ExportRecord, run.export)
    if export is None or Path(export.path).parts[-4:] != folder.resolve().parts[-4:]:
        return None
    tokens = None
    with contextlib.suppress(FileNotFoundError):  # it is another clone's, or its run has been removed
        run = folder_of(run, RunStore(Path(export.checkpoint).parents[1]))
        tokens = _tokens_seen(run, export.iteration)
    return Origin(
        experiment=run.experiment, run=run.name, iteration=export.iteration, export=export.digest, tokens=tokens
    )


def _training(folder: RunFolder, source: ModelSource, iteration: int, evaluation: Evaluated | None) -> dict[str, Any]:
    run = as_trained(folder)
    training, parallel = run.training, run.parallel
    layout = ", ".join(
        f"{name} {parallel[name]}" for name in (*NAMES, "fsdp") if parallel.get(name) not in (None, 1, "none")
    )
    rows = {
        "parameters": f"{source.params:,}",
        "started from": _start(run, source),
        **_seen_before(run, source),
        "tokens seen": _tokens_seen(folder, iteration),
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


def _start(run: RunSpec, source: ModelSource) -> str:
    if parent := run.parent:
        return f"iteration {parent.iteration} of {parent.experiment}: {parent.run}"
    if run.model["init"] != "pretrained":
        return "random weights"
    if run.model.get("config"):
        return "random weights" + (f", drawn from seed {run.model['seed']}" if "seed" in run.model else "")
    if source.revision:
        return f"{run.model['hf']} at {source.revision}"
    if origin := source.origin:
        return f"iteration {origin.iteration} of {origin.experiment}: {origin.run}, export {origin.export[:12]}"
    return f"the weights in the local folder {Path(run.model['hf']).name}, digest {source.digest[:12]}"


def _seen_before(run: RunSpec, source: ModelSource) -> dict[str, str]:
    """The tokens that the run of the base model has seen, if it is an export."""
    tokens = source.origin.tokens if source.origin and not run.parent and run.model["init"] == "pretrained" else None
    return {"tokens seen before": tokens} if tokens else {}


def _tokens_seen(folder: RunFolder, iteration: int) -> str:
    """Tokens seen up to this iteration, including those of parent runs. Examples for fine-tuning are padded."""
    lineage = list(_lineage(folder, iteration))
    positions = sum(_positions(one, until) for one, until in lineage)
    if not any(one.run.is_tuned for one, _ in lineage):
        return f"{positions:,}"
    counts = [_without_padding(one, until) for one, until in lineage]
    known = [count for count in counts if count is not None]
    if len(known) < len(counts):
        return f"{positions:,}, padding included"
    return f"about {sum(known):,} without padding, in {positions:,} positions"


def _lineage(folder: RunFolder, iteration: int) -> Iterator[tuple[RunFolder, int]]:
    """The run and those that it continues from, each with its last iteration that counts."""
    yield folder, iteration
    if (parent := folder.run.parent) and (before := folder.parent_folder):
        yield from _lineage(before, parent.iteration)


def _positions(folder: RunFolder, iteration: int) -> int:
    """Positions of a run's own sequences up to this iteration; all hold tokens, unless examples are padded."""
    training, own = as_trained(folder).training, iteration - folder.run.steps_before
    return own * training["global_batch_size"] * training["seq_length"]


def _epochs(folder: RunFolder, iteration: int, corpora: dict[str, Corpus]) -> tuple[float, ExamplesRead] | None:
    """How often a fine-tuned run has read its examples up to this iteration, and their statistics; None if the index is
    gone, or of other examples."""
    train = split_blends(folder.run.data).get("train", {})
    if not folder.file("launch").exists() or not folder.launch.index or not train.keys() <= corpora.keys():
        return None
    index = read_if_there(DataIndex, folder.experiment_folder.index(folder.launch.index))
    if index is None or index.examples is None:
        return None
    samples = (iteration - folder.run.steps_before) * as_trained(folder).training["global_batch_size"]
    return samples / index.samples["train"], index.examples


def _without_padding(folder: RunFolder, iteration: int) -> int | None:
    """Tokens of a run's own sequences; None if they aren't known."""
    if not folder.run.is_tuned:
        return _positions(folder, iteration)
    found = _epochs(folder, iteration, corpora_as_read(folder))
    return found and round(found[0] * found[1].tokens)


def _data_of_parents(folder: RunFolder) -> list[str]:
    """What the run's parent read up to the checkpoint, the parent's own parent, and so on."""
    sections = []
    while (parent := folder.run.parent) and (folder := folder.parent_folder):
        sections.append(_table(f"Data of {parent}", _data(folder, parent.iteration, corpora_as_read(folder))))
    return sections


def corpora_as_read(folder: RunFolder) -> dict[str, Corpus]:
    """The corpora of a run whose manifests still are those that it was trained with: a parent's experiment may have
    changed since."""
    found = {name: read_if_there(Corpus, path) for name, path in folder.corpus_manifests.items()}
    identity = _identity(folder)
    return {
        name: corpus
        for name, corpus in found.items()
        if corpus and (identity is None or identity.corpora.get(name) == corpus.digest)
    }


def _data(folder: RunFolder, iteration: int, corpora: dict[str, Corpus]) -> dict[str, str]:
    """Training data, each with its share of the blend and the tokens read; corpora only used for evaluation say so, and
    what parents trained on of them."""
    trained = split_blends(folder.run.data).get("train", {})
    rows = {}
    for name in folder.corpus_manifests:
        corpus = corpora.get(name)
        share = trained.get(name, 0) / (sum(trained.values()) or 1)
        use = f"{share:.4g} of the blend" if share else _evaluated(folder, name, corpora)
        if share and not folder.run.is_tuned:
            use += f", about {share * _positions(folder, iteration):,.0f} tokens read"
        elif share and (read := _epochs(folder, iteration, corpora)):
            epochs, examples = read
            use += f", about {epochs * examples.tokens:,.0f} tokens read"
            use += f": {epochs:.3g} times its {examples.examples:,} examples for training"
        if corpus is None:
            rows[name] = f"{use}; the corpus has changed since, or is gone"
            continue
        if corpus.examples:
            rows[name] = f"{use}; {corpus.documents:,} examples, digest {corpus.digest[:12]}"
            continue
        rows[name] = f"{use}; {corpus.documents:,} documents, {corpus.tokens:,} tokens, digest {corpus.digest[:12]}"
    return rows or {"none": "the recipe's" if folder.run.is_recipe else "mock data"}


def _evaluated(folder: RunFolder, name: str, corpora: dict[str, Corpus]) -> str:
    """How a corpus is used that is only evaluated."""
    if split := folder.run.held_out.get(name):
        return f"evaluated on the share for validation of split {split}; parents trained on that for training"
    digest = corpora[name].digest if name in corpora else None
    parent = next((str(parent) for parent, trained in _trained_by_parents(folder) if digest in trained), None)
    return f"evaluated in whole; {parent} trained on it" if parent else "not trained on, evaluated"


def _trained_by_parents(folder: RunFolder) -> Iterator[tuple[Parent, set[str]]]:
    """The parents, each with the digests of the corpora that it trained on."""
    while (parent := folder.run.parent) and (folder := folder.parent_folder) and folder.file("run").exists():
        identity = _identity(folder)
        digests = identity.corpora if identity else {}
        yield parent, {digests[name] for name in split_blends(folder.run.data).get("train", {}) if name in digests}


def _identity(folder: RunFolder) -> Identity | None:
    """The identity with which a run was trained; None if it is gone."""
    train = read_if_there(TrainRecord, folder.train_manifest)
    return train and read_if_there(Identity, RunStore(Path(train.store)).identity)


def _table(title: str, rows: dict[str, Any]) -> str:
    lines = [f"| {name} | {str(value).replace('|', chr(92) + '|')} |" for name, value in rows.items()]
    return "\n".join([f"## {title}\n", "| | |", "|---|---|", *lines]) + "\n"
