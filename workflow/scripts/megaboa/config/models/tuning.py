"""Fine-tuning: which tokens count, and what is trained where the model itself is frozen."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from megaboa.config.models.section import Count, Section, Share, key

Target = Annotated[str, StringConstraints(pattern=r"^[\w.*]+$")]


class Tuning(Section):
    template: str | None = key(
        None,
        "chat template, a Jinja file; `none`: prompts and answers are joined as they are; default: the tokenizer's own",
        short="template",
    )
    loss_on: Literal["answers", "last-answer", "everything"] = key(
        "answers",
        "tokens that count in the loss: all turns of the assistant, its last one, or every token",
        short="losson",
    )
    pack: bool = key(False, "join several examples to one sequence, which can't see each other (on GPUs)", short="pack")
    rank: Count = key(32, "rank of the adapters", short="rank")
    alpha: Count = key(32, "scale of the adapters: what they add is multiplied by alpha / rank", short="alpha")
    dropout: Share = key(0.0, "dropout before the adapters", short="adapterdropout")
    targets: Annotated[list[Target], Field(min_length=1)] = key(
        ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"],
        "Megatron's layers that get adapters; wildcards as in `*.layers.0.*.linear_qkv`, with numbers for pp 1",
        short="targets",
    )
