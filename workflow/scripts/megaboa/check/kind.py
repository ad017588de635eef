"""Restrictions by the kind of a run's model (megaboa/model_kinds.py)."""

from __future__ import annotations

from megaboa.check.facts import Facts
from megaboa.check.rule import Broken
from megaboa.layout import AXES
from megaboa.model_kinds import BY_NAME, OWN


def kind_takes_the_layout(f: Facts) -> Broken | None:
    """T5 is split over tensor parallel ranks alone (core's T5Model keeps encoder and decoder on every stage), and so is
    Qwen2.5-VL (its first stage sends what gloo refuses), BERT over those and pipeline stages: nothing else refuses the
    others, and they train something else or fail in the first step."""
    kind = BY_NAME[f.model.kind]
    if kind.name == OWN or kind.splits is None:
        return None
    for axis in AXES:
        size = f.layout.set_size(axis.name)
        if size > 1 and axis.name not in kind.splits:
            takes = " and ".join(f"parallel.{name}" for name in kind.splits)
            return Broken(f"parallel.{axis.name}", f"{size}: {kind.text} is split by {takes} and data alone", (1,))
    return None


def kind_takes_the_sequences(f: Facts) -> Broken | None:
    """Sequence parallelism is of decoders: BERT's pooler and T5's two sequence lengths have not been tried with it."""
    kind = BY_NAME[f.model.kind]
    if not f.layout.sp or kind.splits is None or "cp" in kind.splits or kind.name == OWN:
        return None
    return Broken("parallel.sp", f"true for {kind.text}", ("false",))


def hybrid_layers_have_kernels(f: Facts) -> Broken | None:
    """Mamba layers are calculated by the package mamba_ssm, whose kernels need a GPU."""
    kind = BY_NAME[f.model.kind]
    if kind.package is None or f.cluster.device != "cpu":
        return None
    return Broken("device", f"cpu: {kind.text} needs the package {kind.package}, whose kernels need a GPU", ("cuda",))


RULES = (kind_takes_the_layout, kind_takes_the_sequences, hybrid_layers_have_kernels)
