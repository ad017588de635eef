"""Checks before the ranks start, for inputs that would make them fail late or hang."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megaboa.blends import bounds_of, shares_of_splits
from megaboa.data.pairs import require_same
from megaboa.errors import InputError
from megaboa.formats import counted
from megaboa.image import image_file
from megaboa.index_file import read_header
from megaboa.paths import RunFolder
from megaboa.records import Corpus, Dataset, Examples, ImportRecord, ModelSource, Sources, read, read_if_there
from megaboa.scheduler.registry import cluster

SPLIT_NAMES = ("training", "validation", "test")


class UnusableInputError(InputError):
    """An unusable input of a run, or an unsuitable machine."""


def removed(folder: RunFolder) -> str | None:
    """What to do about files of the run's results that were removed since it was submitted; None if all are there."""
    model, tokenizer = folder.model_manifest, folder.tokenizer_manifest
    source = folder.source_manifest if folder.run.has_source else None
    index = folder.launch.index and folder.experiment_folder.index(folder.launch.index)
    needed = (folder.file("run"), model, source, tokenizer, *folder.corpus_manifests.values(), index)
    gone = next((path for path in needed if path and not path.exists()), None)
    return gone and (
        f"{gone} was removed while the run was submitted or trained, and it is needed until the run's end. "
        "Call again: the results are made again, and the run resumes from its checkpoints in the store"
    )


def check_nodes(folder: RunFolder, nodes: Sequence[str]) -> None:
    """Check that there are as many nodes as the run needs; a machine without a scheduler is one."""
    wanted = folder.launch.nodes
    if len(nodes) < wanted:
        raise UnusableInputError(
            f"run {folder.name}: resources.nodes is {wanted}, but here is {len(nodes)} ({', '.join(nodes)}). "
            f"For several nodes use {cluster().name}: {cluster().several(wanted)}."
        )


def check_image(folder: RunFolder) -> None:
    """Check that the ranks' image is the one that was tested."""
    if folder.image and (problem := image_file.changed(folder.image)):
        raise UnusableInputError(f"run {folder.name}: {problem}")


def check_data(folder: RunFolder) -> None:
    """Check that corpora match their manifests and the model, and that every split has something to read."""
    check_corpora(folder)
    check_documents(folder, folder.run.data.get("split") or (folder.preflight and folder.preflight.split))


def check_weights(folder: RunFolder) -> None:
    """Check that the files of the imported checkpoint have the sizes that they had when it was proved."""
    if not folder.run.is_pretrained:
        return
    manifest = read(ImportRecord, folder.model_manifest)
    root = Path(manifest.checkpoint).parent
    for name, size in manifest.files.items():  # empty in manifests of older versions
        found = (root / name).stat().st_size if (root / name).exists() else None
        if found != size:
            what = "is missing" if found is None else f"has {found} bytes, and its manifest says {size}"
            raise UnusableInputError(
                f"run {folder.name}: models.{manifest.name}: {root / name} {what}. "
                f"Import the model again: remove {root} and {folder.model_manifest}."
            )


def check_index(folder: RunFolder) -> None:
    """Check that the index is there. Otherwise all runs that share it would build it, in the same folder at the same
    time."""
    if folder.index and not (cache := Path(folder.index.cache)).is_dir():
        raise UnusableInputError(
            f"run {folder.name}: the index of its data is not in {cache} any more. Make it again: remove "
            f"{cache.parent}, and call `snakemake --forcerun index`."
        )


def check_corpora(folder: RunFolder) -> None:
    """Check that files of corpora are unchanged: training would use a truncated or replaced file, or fail during its
    start."""
    vocab_size = read(ModelSource, folder.source_manifest).vocab_size if folder.run.has_source else None
    for corpus, path in folder.corpus_manifests.items():
        manifest = read(Corpus, path)
        if manifest.examples and (problem := examples_problem(manifest.examples)):
            raise UnusableInputError(
                f"run {folder.name}: corpora.{corpus}: {problem}. "
                f"Make the corpus again: remove {Path(manifest.examples.path).parent} and {path}."
            )
        for dataset in manifest.datasets:
            problem = dataset_problem(dataset, dataset.dtype or manifest.dtype, manifest.is_given)
            if problem and manifest.is_given:
                raise UnusableInputError(
                    f"run {folder.name}: corpora.{corpus}.megatron: {problem}. "
                    "If the change is meant, call again: the files are checked again, and trained on as another corpus."
                )
            if problem:
                raise UnusableInputError(
                    f"run {folder.name}: corpora.{corpus}: {problem}. "
                    f"Make the corpus again: remove {Path(dataset.prefix).parent} and {path}."
                )
            if vocab_size is not None and dataset.largest_token >= vocab_size:
                raise UnusableInputError(
                    f"run {folder.name}: corpora.{corpus}: {dataset.prefix}.bin holds token "
                    f"{dataset.largest_token}, and the vocabulary of the model {folder.run.model['name']!r} is "
                    f"{vocab_size}. Write the corpus with the model's tokenizer (corpora.{corpus}.tokenizer), or take "
                    f"a model with a larger vocabulary."
                )
        if manifest.is_given:
            check_unchanged(folder, corpus)


def check_unchanged(folder: RunFolder, corpus: str) -> None:
    """Check that the user's own files were not rewritten, even with the same size, since their checksums were taken."""
    listed = read_if_there(Sources, folder.experiment_folder.corpus(corpus).sources)
    for file in listed.files if listed else ():
        try:
            require_same(file)
        except InputError as error:
            raise UnusableInputError(
                f"run {folder.name}: corpora.{corpus}.megatron: {error}. "
                "The next call of Snakemake checks it again, and trains on it as another corpus."
            ) from None


def dataset_problem(dataset: Dataset, dtype: str, is_given: bool) -> str | None:
    """How the files of a dataset differ from its manifest; None if they don't."""
    folder, prefix = Path(dataset.prefix).parent, dataset.prefix
    for name, size in dataset.sizes.items():
        if not (folder / name).is_file():
            return f"{folder / name} is missing"
        if (found := (folder / name).stat().st_size) != size:
            return f"{folder / name} has {found} bytes, and its manifest says {size}"
    try:
        header = read_header(f"{prefix}.idx")
    except ValueError as error:
        return str(error)
    expected = {
        "token type": (header.dtype, dtype),
        "number of sequences": (header.sequences, dataset.documents),
        "number of documents": (header.boundaries - 1, dataset.documents),
    }
    if is_given:  # other tools may put several sequences into a document; GPT's samples are drawn from sequences
        del expected["number of documents"]
    for what, (found, wanted) in expected.items():
        if found != wanted:
            return f"{prefix}.idx has the {what} {found}, and its manifest says {wanted}"
    return None


def check_documents(folder: RunFolder, split: str | None) -> None:
    """Check that every split has documents in every corpus that it reads: Megatron would search for the first one
    forever.

    `split` is data.split or, for a recipe, the split in Bridge's configuration.
    """
    data = folder.run.data
    if folder.run.is_tuned:
        check_examples(folder, split)
        return
    named = "data.split" if data.get("split") == split else "dataset.split"
    for corpus, manifest in folder.corpora.items():
        for dataset in (part for part in manifest.datasets if part.tokens):
            which = f" of {dataset.key!r}" if len(manifest.datasets) > 1 else ""
            is_split = split and corpus in (data.get("blend") or {})
            for name in empty_splits(split, dataset.documents) if is_split else ():
                raise UnusableInputError(
                    f"run {folder.name}: corpus {corpus!r} has {counted(dataset.documents, 'document')}{which}, and "
                    f"with {named} {split!r} none of them is left for {name}. Take more documents, a larger share, or "
                    f"a share of 0{'' if named == 'data.split' else ', by data.split'}."
                )
        if not manifest.examples and not any(part.tokens for part in manifest.datasets):
            raise UnusableInputError(
                f"run {folder.name}: corpus {corpus!r} has no tokens at all. Give corpora.{corpus}.source more text, "
                f"or take the corpus out of data."
            )


def examples_problem(examples: Examples) -> str | None:
    path = Path(examples.path)
    if not path.is_file():
        return f"{path} is missing"
    if (found := path.stat().st_size) != examples.size:
        return f"{path} has {found} bytes, and its manifest says {examples.size}"
    return None


def check_examples(folder: RunFolder, split: str | None) -> None:
    """Check that every split has examples in every corpus that splits share."""
    for corpus, manifest in folder.corpora.items():
        shared = split and corpus in (folder.run.data.get("blend") or {})
        for name in empty_splits(split, manifest.documents) if shared else ():
            raise UnusableInputError(
                f"run {folder.name}: corpus {corpus!r} has {counted(manifest.documents, 'example')}, and with "
                f"data.split {split!r} none of them is left for {name}. Take more examples, a larger share, or a share "
                f"of 0."
            )


def empty_splits(split: str, documents: int) -> list[str]:
    """Names of the splits with a share above 0 that get no document, by Megatron's rounding."""
    bounds = bounds_of(split, documents)
    return [
        name
        for name, share, (begin, end) in zip(SPLIT_NAMES, shares_of_splits(split), bounds, strict=True)
        if share > 0 and begin == end
    ]
