"""Whether what ran is what is asked for now, and what was asked for then."""

from __future__ import annotations

from typing import Any

from megaboa.files import digest
from megaboa.harmless import without_harmless
from megaboa.observe.steps import Row


def drift(asked: dict[str, Any], identity: dict[str, Any], train: dict[str, Any], final: list[Row]) -> list[str]:
    """Reasons not to believe a run: `asked` is its run.json, `identity` what its store says that it is."""
    reasons = []
    if digest(identity) != train["identity"]:
        reasons.append("the store holds another run than the one that train.json is about")
    if changed := sorted(_differences(without_harmless(asked), without_harmless(identity["run"]))):
        reasons.append(f"the configuration has drifted since it was trained: {', '.join(changed)}")
    expected = _tokens_per_step(asked)
    other = sorted({row["tokens"] for row in final if row["tokens"] is not None} - {expected})
    if expected and other:
        reasons.append(f"steps of {' and '.join(map(str, other))} tokens instead of {expected}")
    return reasons


def _differences(one: Any, other: Any, path: str = "") -> set[str]:
    if isinstance(one, dict) and isinstance(other, dict):
        names = one.keys() | other.keys()
        return set().union(*(_differences(one.get(name), other.get(name), f"{path}{name}.") for name in names))
    return set() if one == other else {path.rstrip(".")}


def _tokens_per_step(asked: dict[str, Any]) -> int | None:
    """None where the recipe, or an override, decides."""
    training = asked.get("training", {})
    if asked.get("overrides") or not training.get("global_batch_size") or not training.get("seq_length"):
        return None
    return training["global_batch_size"] * training["seq_length"]
