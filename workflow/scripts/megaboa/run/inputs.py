"""What would fail late, or never end, if nobody looked before the ranks start."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from megaboa import files
from megaboa.results import RunFolder

SPLITS = ("training", "validation", "test")

# The beginning of an .idx file, as Megatron-Core writes it: version, type of tokens, and how many there are of what.
INDEX_MAGIC = b"MMIDIDX\x00\x00"
INDEX_HEADER = struct.Struct("<9sQBQQ")
INDEX_VERSION = 1
DTYPES = {4: "int32", 8: "uint16"}


class UnusableInputError(Exception):
    """The message is what the user reads."""


def check_nodes(folder: RunFolder, nodes: Sequence[str]) -> None:
    """A run gets the nodes that it asks for; a machine without SLURM is one."""
    wanted = folder.launch["nodes"]
    if len(nodes) < wanted:
        raise UnusableInputError(
            f"run {folder.name}: resources.nodes is {wanted}, but here is {len(nodes)} ({', '.join(nodes)}). "
            f"Several nodes are had from SLURM: `snakemake --profile slurm`, or `salloc --nodes={wanted}` by hand."
        )


def check_data(folder: RunFolder) -> None:
    """The run's corpora are as their manifests say, fit the model, and give every split something to read."""
    check_corpora(folder)
    check_documents(folder)


def check_weights(folder: RunFolder) -> None:
    """The imported checkpoint that the run starts from is as large as it was when it was proved."""
    if folder.run["model"]["init"] != "pretrained":
        return
    manifest = files.read_json(folder.model_manifest)
    root = Path(manifest["checkpoint"]).parent
    for name, size in manifest.get("files", {}).items():  # none in the manifests of older versions
        found = (root / name).stat().st_size if (root / name).exists() else None
        if found != size:
            what = "is missing" if found is None else f"has {found} bytes, and its manifest says {size}"
            raise UnusableInputError(
                f"run {folder.name}: models.{manifest['name']}: {root / name} {what}. "
                f"Import the model again: remove {root} and {folder.model_manifest}."
            )


def check_index(folder: RunFolder) -> None:
    """The ranks would build it again, all runs that share it in the same folder at the same time."""
    if folder.index and not (cache := Path(folder.index["cache"])).is_dir():
        raise UnusableInputError(
            f"run {folder.name}: the index of its data is not in {cache} any more. Make it again: remove "
            f"{cache.parent}, and call `snakemake --forcerun index`."
        )


def check_corpora(folder: RunFolder) -> None:
    """A file that was cut off or exchanged would be trained on, or end a rank in the middle of its start."""
    vocab_size = None if folder.run["model"].get("recipe") else files.read_json(folder.source_manifest)["vocab_size"]
    for corpus, path in folder.corpus_manifests.items():
        manifest = files.read_json(path)
        for dataset in manifest["datasets"]:
            if problem := dataset_problem(dataset, manifest["dtype"]):
                raise UnusableInputError(
                    f"run {folder.name}: corpora.{corpus}: {problem}. "
                    f"Make the corpus again: remove {Path(dataset['prefix']).parent} and {path}."
                )
            if vocab_size is not None and dataset["largest_token"] >= vocab_size:
                raise UnusableInputError(
                    f"run {folder.name}: corpora.{corpus}: {dataset['prefix']}.bin holds token "
                    f"{dataset['largest_token']}, and the vocabulary of the model {folder.run['model']['name']!r} is "
                    f"{vocab_size}. Write the corpus with the model's tokenizer (corpora.{corpus}.tokenizer), or take "
                    f"a model with a larger vocabulary."
                )


def dataset_problem(dataset: dict[str, Any], dtype: str) -> str | None:
    """How the files of a dataset differ from its manifest; None if they don't."""
    folder, prefix = Path(dataset["prefix"]).parent, dataset["prefix"]
    for name, size in dataset["sizes"].items():
        if not (folder / name).is_file():
            return f"{folder / name} is missing"
        if (found := (folder / name).stat().st_size) != size:
            return f"{folder / name} has {found} bytes, and its manifest says {size}"
    with open(f"{prefix}.idx", "rb") as stream:
        head = stream.read(INDEX_HEADER.size)
    if len(head) < INDEX_HEADER.size or not head.startswith(INDEX_MAGIC):
        return f"{prefix}.idx is no index of Megatron's"
    _, version, code, sequences, boundaries = INDEX_HEADER.unpack(head)
    expected = {
        "version": (version, INDEX_VERSION),
        "token type": (DTYPES.get(code, f"code {code}"), dtype),
        "number of sequences": (sequences, dataset["documents"]),
        "number of documents": (boundaries - 1, dataset["documents"]),
    }
    for what, (found, wanted) in expected.items():
        if found != wanted:
            return f"{prefix}.idx has the {what} {found}, and its manifest says {wanted}"
    return None


def check_documents(folder: RunFolder) -> None:
    """Every split that reads a corpus must get documents of it: Megatron looks for the first one for ever."""
    data = folder.run["data"]
    for corpus, manifest in folder.corpus_manifests.items():
        read = files.read_json(manifest)
        for dataset in (part for part in read["datasets"] if part["tokens"]):
            which = f" of {dataset['key']!r}" if len(read["datasets"]) > 1 else ""
            split = data.get("split") if corpus in (data.get("blend") or {}) else None
            for name in empty_splits(split, dataset["documents"]) if split else ():
                raise UnusableInputError(
                    f"run {folder.name}: corpus {corpus!r} has {dataset['documents']} documents{which}, and with "
                    f"data.split {split!r} none of them is left for {name}. Take more documents, a larger share, or a "
                    f"share of 0."
                )
        if not any(part["tokens"] for part in read["datasets"]):
            raise UnusableInputError(
                f"run {folder.name}: corpus {corpus!r} has no tokens at all. Give corpora.{corpus}.source more text, "
                f"or take the corpus out of data."
            )


def empty_splits(split: str, documents: int) -> list[str]:
    """Names of the splits with a share above 0 that get no document, counted as Megatron counts."""
    shares = [float(share) for share in split.split(",")]
    ends = [0.0, *accumulate(share / sum(shares) for share in shares)]
    bounds = [round(end * documents) for end in ends]
    return [
        name
        for name, share, (begin, end) in zip(SPLITS, shares, pairwise(bounds), strict=True)
        if share > 0 and begin == end
    ]
