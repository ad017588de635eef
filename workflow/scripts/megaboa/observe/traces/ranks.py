"""Which rank holds which part of the model, and who is slow among those that do the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

# Differences below this are noise.
NOTICEABLE = 0.02
# The same rank is the slowest in this share of the steps: it is slow, not unlucky.
PERSISTENT = 0.7


@dataclass(frozen=True)
class Layout:
    """How a run is divided; ranks count through tp, cp, (ep,) dp and then pp, as Megatron has them."""

    world_size: int
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    vpp: int = 1
    microbatches: int | None = None

    @classmethod
    def of_run(cls, run: dict[str, Any]) -> Layout | None:
        """From run.json; None for a recipe, which may divide the model as it likes."""
        if run["model"].get("recipe"):
            return None
        sizes = {name: run["parallel"].get(name) or 1 for name in ("tp", "pp", "cp", "ep", "vpp")}
        per_replica = sizes["tp"] * sizes["pp"] * sizes["cp"]
        sizes["etp"] = run["parallel"].get("etp") or sizes["tp"]
        training = run["training"]
        samples = training["micro_batch_size"] * run["world_size"] // per_replica
        return cls(run["world_size"], **sizes, microbatches=training["global_batch_size"] // samples)

    def stage(self, rank: int) -> int:
        return rank // (self.world_size // self.pp)

    @property
    def dimensions(self) -> int:
        """Along how many ways the run is divided among ranks."""
        data = self.world_size // (self.tp * self.pp * self.cp)
        return sum(size > 1 for size in (self.tp, self.pp, self.cp, data)) + (self.ep > 1)

    def part(self, rank: int) -> str:
        """Ranks of one part do the same work: pipeline stage, and experts, where they are divided."""
        name = f"stage {self.stage(rank)}" if self.pp > 1 else "the whole model"
        if self.ep == 1:
            return name
        return f"{name}, experts {rank % (self.world_size // self.pp) // self.etp % self.ep}"

    @property
    def ideal_bubble(self) -> float | None:
        """Share of a step that a pipeline stands still for filling and draining, if all stages take equally long."""
        if self.pp == 1 or not self.microbatches:
            return None
        return (self.pp - 1) / (self.microbatches * self.vpp + self.pp - 1)


def stragglers(parts: dict[str, list[int]], work: dict[int, dict[int, float]], hosts: dict[int, str]) -> list[dict]:
    """For every part that several captured ranks hold: who is slow, and whether always.

    `work` is each rank's milliseconds by step, without communication: in that a fast rank waits for a slow one.
    """
    return [_part(part, ranks, work, hosts) for part, ranks in parts.items() if len(ranks) > 1]


def _part(part: str, ranks: list[int], work: dict[int, dict[int, float]], hosts: dict[int, str]) -> dict[str, Any]:
    steps = sorted(set.intersection(*(set(work[rank]) for rank in ranks)))
    if not steps:
        return {"part": part, "ranks": ranks, "n": 0, "verdict": "no steps in common"}
    table = np.array([[work[rank][step] for step in steps] for rank in ranks])
    medians = np.median(table, axis=1)
    middle = float(np.median(medians))
    slowest = np.array(ranks)[table.argmax(axis=0)]
    spread = float((medians.max() - medians.min()) / middle) if middle else 0.0
    by_step = float(np.median((table.max(axis=0) - table.min(axis=0)) / np.maximum(np.median(table, axis=0), 1e-9)))
    worst = ranks[int(medians.argmax())]
    share = float((slowest == worst).mean())
    if spread > NOTICEABLE and share >= PERSISTENT:
        verdict = "persistent"
    else:
        verdict = "rotating" if by_step > NOTICEABLE else "even"
    return {
        "part": part,
        "ranks": ranks,
        "n": len(steps),
        "fastest": ranks[int(medians.argmin())],
        "slowest": worst,
        "slowest_host": hosts.get(worst),
        "slowest_in": share,
        "spread": spread,
        "spread_by_step": by_step,
        "verdict": verdict,
        "median_ms": {str(rank): float(value) for rank, value in zip(ranks, medians, strict=True)},
    }


def by_host(found: list[dict[str, Any]]) -> list[str]:
    """Hosts that have a persistently slow rank."""
    return sorted({row["slowest_host"] for row in found if row["verdict"] == "persistent" and row["slowest_host"]})
