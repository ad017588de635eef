"""The contents of pipeline stages, and the number of micro-batches in flight there."""

from __future__ import annotations

from dataclasses import dataclass

from megaboa.check.facts import Facts


@dataclass(frozen=True)
class Stage:
    """Contents of one pipeline rank: the numbers of its layers, by virtual stage."""

    number: int
    chunks: tuple[tuple[int, ...], ...]
    embedding: bool
    loss: bool
    mtp: int = 0

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(layer for chunk in self.chunks for layer in chunk)


def stages(f: Facts) -> list[Stage]:
    """The stages of a legal layout."""
    pp, chunks = f.layout.pp, _chunks(f)
    found = []
    for rank in range(pp):
        own = [chunk for number, chunk in enumerate(chunks) if number % pp == rank]
        layers = tuple(tuple(part for part in chunk if isinstance(part, int)) for chunk in own)
        parts = [part for chunk in own for part in chunk]
        found.append(Stage(rank, layers, "embedding" in parts, "loss" in parts, parts.count("mtp")))
    return found


def _chunks(f: Facts) -> list[list[int | str]]:
    """The contents of every virtual stage, in the order of the data flow."""
    if f.layout.stages is not None:
        return _numbered(f.layout.stages)
    sizes = _sizes(f)
    result: list[list[int | str]] = []
    first = 0
    for size in sizes:
        result.append(list(range(first, first + size)))
        first += size
    result[0].insert(0, "embedding")
    result[-1] += ["mtp"] * f.model.mtp_layers + ["loss"]
    return result


def _numbered(layout: tuple[tuple[str, ...], ...]) -> list[list[int | str]]:
    number, result = 0, []
    for stage in layout:
        parts: list[int | str] = []
        for part in stage:
            parts.append(number if part == "decoder" else part)
            number += part == "decoder"
        result.append(parts)
    return result


def _sizes(f: Facts) -> list[int]:
    """Layers per virtual stage."""
    layout, layers = f.layout, f.model.layers or 0
    pp, chunks = layout.pp, layout.chunks
    first, last = layout.first_stage_layers, layout.last_stage_layers
    if first is None and last is None:
        each = (layers + layout.embedding_counts + layout.loss_counts) // (pp * chunks)
        sizes = [each] * (pp * chunks)
        sizes[0] -= layout.embedding_counts
        sizes[-1] -= layout.loss_counts
        return sizes
    ends = (first is not None) + (last is not None)
    between = (layers - (first or 0) - (last or 0)) // max(pp - ends, 1)
    per_rank = [between] * pp
    per_rank[0] = between if first is None else first
    per_rank[-1] = between if last is None else last
    return [size // chunks for _ in range(chunks) for size in per_rank]


def in_flight(f: Facts, stage: int) -> float:
    """Maximum number of micro-batches whose activations a stage keeps, as multiples of all its layers
    (one-forward-one-backward)."""
    count, pp, chunks = f.microbatches or 1, f.layout.pp, f.layout.chunks
    if chunks == 1:
        return min(pp - stage, count)
    first = (pp - stage - 1) * 2 + (chunks - 1) * (f.layout.group or pp)  # schedules.py, get_pp_rank_microbatches
    return min(first + 1, count * chunks) / chunks
