"""All rules by subject, and their findings for a run."""

from __future__ import annotations

from dataclasses import replace

from megaboa.check import (
    adapters,
    course,
    device,
    experts,
    fit,
    graphs,
    kind,
    needs_image,
    pipeline,
    ranks_and_batches,
    sharding,
    tensors,
)
from megaboa.check.facts import Facts
from megaboa.check.rule import Finding, Rule, finding, sentence

SUBJECTS: dict[str, tuple[Rule, ...]] = {
    "The kind of model": kind.RULES,
    "Ranks and batches": ranks_and_batches.RULES,
    "Tensors, sequences and numbers": tensors.RULES,
    "Pipelines": pipeline.RULES,
    "Experts": experts.RULES,
    "FSDP and the distributed optimizer": sharding.RULES,
    "CUDA graphs, recomputation, offloading": graphs.RULES,
    "Adapters": adapters.RULES,
    "The course of a run": course.RULES,
    "The device": device.RULES,
    "Profilers": course.PROFILERS,
}
FITS_TP = ("resources.gpus_per_node", "model.vocab_size")  # keys whose nearest legal values depend on parallel.tp
RULES = tuple(rule for rules in SUBJECTS.values() for rule in rules)


def check(facts: Facts) -> list[Finding]:
    """All broken rules, errors first. The memory check is skipped if there are errors."""
    broken_rules = [(rule, broken) for rule in RULES if (broken := rule(facts))]
    if any(broken.key == "parallel.tp" and broken.level == "error" for _, broken in broken_rules):
        # Don't propose what would fit a size that is itself refused.
        broken_rules = [
            (rule, replace(broken, nearest=()) if broken.key in FITS_TP else broken) for rule, broken in broken_rules
        ]
    found = [finding(rule, broken) for rule, broken in broken_rules]
    if all(one.level != "error" for one in found) and (broken := fit.memory_suffices(facts, is_legal)):
        found.append(finding(fit.memory_suffices, broken))
    return sorted(found, key=lambda one: one.level != "error")


def is_of_device(found: Finding) -> bool:
    """Whether a finding is due to the device, so that the run may be legal on another one."""
    return any(found.rule == rule.__name__ for rule in device.RULES)


def is_legal(facts: Facts) -> bool:
    """Whether no rule is broken with an error, apart from that for memory, which isn't checked."""
    return not any((broken := rule(facts)) and broken.level == "error" for rule in RULES)


def markdown() -> str:
    """The tables of docs/reference/rules.md."""
    lines = []
    for subject, rules in SUBJECTS.items():
        lines += [f"### {subject}", "", "| rule | what must hold, and what enforces it |", "|---|---|"]
        lines += [f"| `{rule.__name__}` | {sentence(rule)} |" for rule in rules]
        lines.append("")
    lines += ["### What needs the image", "", "| rule | what stays unchecked without it |", "|---|---|"]
    lines += [f"| `{rule.__name__}` | {sentence(rule)} |" for rule in needs_image.RULES]
    lines += ["", "### Memory", "", "| rule | what must hold, and what enforces it |", "|---|---|"]
    lines.append(f"| `{fit.memory_suffices.__name__}` | {sentence(fit.memory_suffices)} |")
    return "\n".join(lines)
