"""Fine-tuning in the plan: its part of a run's identity, and its restrictions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megaboa import blends
from megaboa.config.models.experiment import Experiment
from megaboa.config.problems import show
from megaboa.fields import AT_ENDS_OF_TEXT
from megaboa.records import ADAPTERS, NO_TEMPLATE, Tree

SAMPLES = 2  # version of what bridge/tuned_samples.py makes; raised when tokens, masks or cuts would change
OF_ADAPTERS = ("rank", "alpha", "dropout", "targets")
# Keys of `data` for how text is cut into samples, or masked.
OF_TEXT = ("validation_sets", *AT_ENDS_OF_TEXT, "fim")


def spec(config: Experiment) -> Tree:
    """The section for run.json. It includes the template's text, so that changing the template's file makes it another
    run, and the version of the samples, which decide the losses."""
    wanted = config.tuning
    found = {"samples": SAMPLES, "template": _text(wanted.template)} | wanted.model_dump(include={"loss_on", "pack"})
    if config.task in ADAPTERS:
        found |= wanted.model_dump(mode="json", include=set(OF_ADAPTERS))
    return found


def facts(config: Experiment) -> Tree:
    """The facts about fine-tuning."""
    wanted, magnitudes = config.tuning, config.task == "dora"
    packed = {"packed": wanted.pack} if config.task != "pretrain" else {}
    if config.task not in ADAPTERS:
        return packed
    return packed | {
        "adapter_rank": wanted.rank,
        "adapter_targets": tuple(wanted.targets),
        "adapter_magnitudes": magnitudes,
    }


def _text(template: str | None) -> str | None:
    if template in (None, NO_TEMPLATE):
        return template
    return Path(template).expanduser().read_text(encoding="utf-8")


def problems(config: Experiment, model: str) -> Iterator[tuple[tuple[str, ...], str]]:
    """Restrictions that the run violates: keys and problems."""
    data = config.data.model_dump()
    used = blends.corpora(data)
    examples = [name for name in used if name in config.corpora and config.corpora[name].has_examples]
    if config.task == "pretrain":
        if examples:
            yield (
                ("data", "blend"),
                f"{examples[0]!r} holds examples for fine-tuning: set task to sft, lora or dora, or name a corpus of "
                "text",
            )
        return
    if not used:
        yield ("corpora",), f"is missing: task: {config.task} needs a corpus with messages, or with prompt and answer"
    for name in used:
        if name not in examples:
            yield (
                ("data", "blend"),
                f"{name!r} holds text, and task: {config.task} needs examples: set corpora.{name}.messages, or prompt "
                "and answer",
            )
    for key in OF_TEXT:
        if data[key]:
            yield ("data", key), f"applies to text, and task: {config.task} reads examples: remove it"
    if any(len(blend) > 1 for blend in blends.split_blends(data).values()):
        yield ("data", "blend"), "mixes corpora of examples: give one corpus several sources instead"
    yield from _template_problems(config, examples)
    yield from _model_problems(config, model)


def _template_problems(config: Experiment, examples: list[str]) -> Iterator[tuple[tuple[str, ...], str]]:
    template, where = config.tuning.template, ("tuning", "template")
    if template == NO_TEMPLATE:
        chats = [name for name in examples if config.corpora[name].messages]
        if chats:
            yield where, f"is `none`, and {chats[0]!r} holds conversations, which a template makes text of: name one"
        if config.tuning.loss_on == "last-answer":
            yield (
                ("tuning", "loss_on"),
                "last-answer is of conversations, and without a template there are none: answers",
            )
    elif template is not None and not Path(template).expanduser().is_file():
        yield where, f"there is no file {show(template)}: check the path"


def _model_problems(config: Experiment, model: str) -> Iterator[tuple[tuple[str, ...], str]]:
    wanted, task = config.models[model], config.task
    if wanted.recipe is not None:
        remedy = f"remove models.{model}.recipe" if wanted.has_source else "set it to pretrain, or name another model"
        yield (
            ("task",),
            f"{task} takes a model from Hugging Face or an inline config, and {model!r} has a recipe: {remedy}",
        )
    if task == "sft" and wanted.init == "scratch" and config.continue_from is None:
        yield (
            ("models", model, "init"),
            "is scratch, and sft needs a trained model: set it to pretrained, or name a run with continue_from",
        )
    if config.tuning.pack and config.training.micro_batch_size > 1:
        yield (
            ("training", "micro_batch_size"),
            f"{config.training.micro_batch_size}: packed sequences go through the model one by one: set it to 1, or "
            "tuning.pack to false",
        )
    if config.tuning.pack and config.device == "cpu":
        yield ("tuning", "pack"), "packed sequences need a GPU's attention: set it to false for device: cpu"
    if task in ADAPTERS and config.parallel.fsdp != "none":
        yield ("parallel", "fsdp"), f"shards all weights, and {task} trains adapters alone: set it to none"


def changes_random_weights(config: Experiment, model: str) -> bool:
    """Whether adapters change random weights. They can only be timed, because no checkpoint has the weights."""
    return config.task in ADAPTERS and config.models[model].init == "scratch" and config.continue_from is None


def warning(config: Experiment, model: str) -> str | None:
    if changes_random_weights(config, model):
        return (
            f"task: {config.task} changes random weights, which no checkpoint holds: good for measuring alone. To "
            f"train, set models.{model}.init to pretrained, or continue_from"
        )
    return None
