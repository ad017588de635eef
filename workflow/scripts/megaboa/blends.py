"""Corpora of a run's data section: blends, splits and validation sets. Standard library only."""

from __future__ import annotations

from megaboa.records import Tree

SPLITS = ("train", "valid", "test")  # Megatron's names and order

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


def named(blend: Blend) -> str:
    """A blend as plan.tsv and the report name it: `wiki`, or `wiki:0.7,code:0.3`."""
    return next(iter(blend)) if len(blend) == 1 else ",".join(f"{name}:{weight:g}" for name, weight in blend.items())


def validation_sets(data: Tree) -> dict[str, Blend]:
    return data.get("validation_sets") or {}


def is_held_out(data: Tree, blend: Blend) -> bool:
    """Whether a validation set is the share of `data.blend` that training holds out, not a corpus of its own."""
    return any(name in (data.get("blend") or {}) for name in blend)


def set_problem(data: Tree, blend: Blend) -> str | None:
    """Why a validation set would contain training text or can't be built; None if neither."""
    trained = split_blends(data).get("train", {})
    shared = [name for name in blend if name in trained]
    if not shared:
        return None
    if not data.get("blend"):
        return f"names {shared[0]!r}, which blend_per_split.train trains on in whole: name another corpus"
    if len(shared) < len(blend):
        other = next(name for name in blend if name not in trained)
        return (
            f"mixes {shared[0]!r}, of which data.split holds out a share, with {other!r}, which isn't trained on: "
            "make two sets of them"
        )
    return None
