"""Which corpora a run reads, and what of them: a reading of its data section. Standard library only."""

from __future__ import annotations

from megaboa.records import Tree

SPLITS = ("train", "valid", "test")  # as Megatron calls and orders them

Blend = dict[str, float]


def corpora(data: Tree) -> list[str]:
    """Every corpus that the section names, once."""
    found = [*split_blends(data).values(), *validation_sets(data).values()]
    return list(dict.fromkeys(name for blend in found for name in blend))


def split_blends(data: Tree) -> dict[str, Blend]:
    """The blend that each split is drawn from; splits that share one blend share its documents out."""
    if data.get("blend"):
        return dict.fromkeys(SPLITS, data["blend"])
    given = data.get("blend_per_split") or {}
    return {split: given[split] for split in SPLITS if given.get(split)}


def validation_sets(data: Tree) -> dict[str, Blend]:
    return data.get("validation_sets") or {}


def is_held_out(data: Tree, blend: Blend) -> bool:
    """Whether a validation set is the share of `data.blend` that training leaves out, and not corpora of its own."""
    return any(name in (data.get("blend") or {}) for name in blend)


def set_problem(data: Tree, blend: Blend) -> str | None:
    """Why a validation set would hold text that is trained on, or can't be had; None if all is well."""
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
