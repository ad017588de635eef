"""What would fail late, or never end, if nobody looked before the ranks start."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from megaboa import files
from megaboa.results import RunFolder

SPLITS = ("training", "validation", "test")


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


def check_documents(folder: RunFolder) -> None:
    """Every split that has a share of a corpus must get documents: Megatron looks for the first one for ever."""
    for corpus, manifest in folder.corpus_manifests.items():
        documents = files.read_json(manifest)["documents"]
        split = folder.run["data"].get("split")
        for name in empty_splits(split, documents) if split else ():
            raise UnusableInputError(
                f"run {folder.name}: corpus {corpus!r} has {documents} documents, and with data.split {split!r} none "
                f"of them is left for {name}. Take more documents, a larger share, or a share of 0."
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
