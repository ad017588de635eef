"""Whether a model can be imported by the ranks that its `conversion` asks for."""

from __future__ import annotations

import dataclasses

from megaboa.conversion import Layout
from megaboa.preflight import experts, facts, pipeline, tensors
from megaboa.preflight.rule import Rule, finding

# Of all rules those that are about what a rank holds. By the key of `conversion` that breaks them.
RULES: tuple[tuple[str, Rule], ...] = (
    ("tp", tensors.heads_divide),
    ("tp", tensors.key_value_groups_divide),
    ("tp", tensors.feed_forward_divides),
    ("pp", pipeline.layers_fill_the_stages),
    ("ep", experts.expert_parallelism_needs_experts),
    ("ep", experts.experts_divide),
    ("tp", experts.expert_width_divides),
    ("tp", experts.biased_experts_are_not_cut),
)


def problems(model: facts.Model, layout: Layout) -> list[tuple[str, str]]:
    """Keys of `conversion`, and what is wrong with their values; nothing where nobody knows the model yet."""
    asked = facts.Layout(layout.ranks, **dataclasses.asdict(layout), etp=layout.expert_tp)
    whole = facts.Facts(asked, model)
    found = [(key, finding(rule, broken).message) for key, rule in RULES if (broken := rule(whole))]
    if model.vocab_rows is not None and model.vocab_rows % layout.tp:
        found.append(("tp", f"{layout.tp} doesn't divide the {model.vocab_rows} rows of the vocabulary: use pp or ep"))
    return found
