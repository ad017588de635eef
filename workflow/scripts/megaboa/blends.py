"""Corpora of a run's data section: blends, splits and validation sets. Standard library only."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path

from megaboa.formats import some_of
from megaboa.records import Corpus, Tree

SPLITS = ("train", "valid", "test")  # Megatron's names and order

MANY = 10  # with more kinds of files, they aren't languages or subjects
RECIPES = "its recipe's split"  # where data.split isn't set
MAIN = "main"  # what tables and figures call the validation data of the split

Blend = dict[str, float]


def corpora(data: Tree) -> list[str]:
    """Every corpus that the data section names, without duplicates."""
    found = [*split_blends(data).values(), *validation_sets(data).values()]
    return list(dict.fromkeys(name for blend in found for name in blend))


def split_blends(data: Tree) -> dict[str, Blend]:
    """The blend of each split. Splits with the same blend divide its documents among them."""
    if data.get("blend"):
        return dict.fromkeys(SPLITS, data["blend"])
    given = data.get("blend_per_split") or {}
    return {split: given[split] for split in SPLITS if given.get(split)}


def in_shares(data: Tree) -> Tree:
    """The data section with the weights of each blend as shares of their sum: equal blends are equal in any unit."""
    found = data | ({"blend": _shares(data["blend"])} if "blend" in data else {})
    several = {key: data[key] for key in ("blend_per_split", "validation_sets") if data.get(key)}
    return found | {key: {name: _shares(blend) for name, blend in blends.items()} for key, blends in several.items()}


def _shares(blend: Blend | None) -> Blend | None:
    return blend and {name: round(weight / sum(blend.values()), 12) for name, weight in blend.items()}


def named(blend: Blend) -> str:
    """A blend as plan.tsv and the report name it: `wiki`, or `wiki:0.7,code:0.3`."""
    return next(iter(blend)) if len(blend) == 1 else ",".join(f"{name}:{weight:g}" for name, weight in blend.items())


def validation_sets(data: Tree) -> dict[str, Blend]:
    return data.get("validation_sets") or {}


def key_of_validation(data: Tree) -> str:
    """The key that decides which documents the main validation data consists of."""
    return "data.split" if data.get("blend") else "data.blend_per_split.valid"


def is_held_out(data: Tree, blend: Blend) -> bool:
    """Whether a validation set is the share of `data.blend` that training holds out, not a corpus of its own."""
    return any(name in (data.get("blend") or {}) for name in blend)


def shares_of_splits(split: str) -> list[float]:
    """The shares of `98,1,1`, of which the first documents of a corpus are the training's: 0.98, 0.01, 0.01."""
    given = [float(share) for share in re.findall(r"[.0-9]+", split)]  # Megatron's own parsing
    return [share / sum(given) for share in given] + [0.0] * (len(SPLITS) - len(given))


def bounds_of(split: str, documents: int) -> list[tuple[int, int]]:
    """For every split its first document, and the one after its last."""
    ends = [0.0, *accumulate(shares_of_splits(split))]
    return list(pairwise(round(end * documents) for end in ends))


def files_held_out(corpora: Mapping[str, Corpus], data: Tree) -> list[str]:
    """Warnings of corpora whose validation data is of some kinds of their files alone, as splits take documents in
    order. Files whose paths differ in numbers alone are shards of one kind; of many kinds, as where names are random,
    nothing is said. A file that is one document is in one split anyway."""
    said = []
    for name in (data.get("blend") or {}) if data.get("split") else ():
        files = [file for file in corpora[name].sources if file.documents]
        documents = sum(file.documents for file in files)
        begin, end = bounds_of(data["split"], documents)[SPLITS.index("valid")]
        ends = accumulate(file.documents for file in files)
        touched = [
            file.path for file, last in zip(files, ends, strict=True) if begin < last and last - file.documents < end
        ]
        kinds = {_without_numbers(file.path) for file in files}
        leaves_kinds_out = begin < end and {*map(_without_numbers, touched)} < kinds
        if leaves_kinds_out and len(kinds) <= MANY and documents >= 2 * len(files):
            names = [Path(path).name for path in touched]
            said.append(
                f"corpus {name!r}: the validation data (data.split) is documents {begin:,} to {end - 1:,} of "
                f"{documents:,}, which are of {len(touched)} of its {len(files)} files ({some_of(names)}): if the "
                "files differ, by language or subject, make a corpus of each, or shuffle the documents"
            )
    return said


def _without_numbers(path: str) -> str:
    return re.sub(r"\d+", "", path)


def split_of_set(data: Tree, blend: Blend, held_out: Mapping[str, str]) -> str | None:
    """The split whose share for validation a set is; None if it is whole corpora. `held_out`: by corpus the split of a
    parent that trained on it."""
    if is_held_out(data, blend):
        return str(data.get("split", RECIPES))
    return next((held_out[name] for name in blend if name in held_out), None)


def documents_of_set(data: Tree, blend: Blend, held_out: Mapping[str, str]) -> str:
    """What a validation set consists of, such as `all of law`, or `law held out by 98,1,1`. Where these differ, the
    documents do."""
    split, name = split_of_set(data, blend, held_out), named(_shares(blend))
    return f"all of {name}" if split is None else f"{name} held out by {split}"


def told_apart(sets: Mapping[str, Mapping[str, Sequence[str]]]) -> dict[str, dict[str, str]]:
    """By run the names of validation sets whose documents aren't always the same: `law (all of law)`.

    `sets`: by run and set the documents, the last first; several if they changed while the run trained.
    """
    found: dict[str, set[str]] = {}
    for of_run in sets.values():
        for name, documents in of_run.items():
            found.setdefault(name, set()).update(documents)
    return {
        run: {
            name: f"{name} ({', and before '.join(documents)})"
            for name, documents in of_run.items()
            if len(found[name]) > 1
        }
        for run, of_run in sets.items()
    }


def leak(data: Tree, blend: Blend, origins: Mapping[str, Collection[object]]) -> str | None:
    """Why a blend for validation or the test would contain training text or can't be built; None if neither.
    `origins`: what the texts of each corpus come from."""
    trained = split_blends(data).get("train", {})
    shared = [name for name in blend if name in trained]
    others = [name for name in blend if name not in trained]
    if shared and not data.get("blend"):
        return f"names {shared[0]!r}, which blend_per_split.train trains on in whole: name another corpus"
    if shared and others:
        return (
            f"mixes {shared[0]!r}, of which data.split holds out a share, with {others[0]!r}, which isn't trained on: "
            "make two sets of them"
        )
    for name in others:
        if equal := next((one for one in trained if not set(origins[name]).isdisjoint(origins[one])), None):
            return f"names {name!r}, which has the source of {equal!r}, and that is trained on: name another corpus"
    return None
