"""Models, and tokenizers that are trained on the spot."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from megaboa.config.models.section import Name, Section, key


class Tokenizer(Section):
    train_on: Name = key(description="corpus whose text the tokenizer is trained on")
    vocab_size: Annotated[int, Field(ge=260)] = key(512, "size of the byte-level BPE vocabulary")


class Model(Section):
    """Exactly one of `hf`, `config` and `recipe`."""

    hf: str | None = key(None, "Hugging Face id, or path of a local folder with config.json and weights")
    revision: str | None = key(None, "commit, tag or branch of the Hugging Face id")
    config: dict[str, Any] | None = key(
        None, "a Hugging Face config written out (`model_type: qwen3`, ...): a model made on the spot"
    )
    recipe: str | None = key(
        None, "a Python file with `configure(...)`, or the name of a pretraining recipe of Megatron-Bridge"
    )
    args: dict[str, Any] = key({}, "arguments for the recipe's function")
    tokenizer: str | None = key(None, "name under `tokenizers`, or Hugging Face id or folder; default: the model's own")
    init: Literal["pretrained", "scratch"] = key(
        "scratch", "start from the imported weights, or from random ones drawn by Megatron"
    )
    seed: NonNegativeInt = key(0, "seed of the weights of a model made from `config`")
    params: PositiveInt | None = key(
        None, "number of parameters, for expressions, where it can't be told from the model's config"
    )

    @model_validator(mode="after")
    def _one_origin(self) -> Model:
        given = [name for name in ("hf", "config", "recipe") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"needs exactly one of hf, config and recipe; given: {', '.join(given) or 'none'}")
        if self.config is not None and not isinstance(self.config.get("model_type"), str):
            raise ValueError("config needs model_type, such as `model_type: qwen3`")
        if self.revision and not self.hf:
            raise ValueError("revision belongs to hf: remove it, or name a model with hf")
        if self.args and not self.recipe:
            raise ValueError("args belong to recipe: remove them, or name a recipe")
        if self.init == "pretrained" and self.recipe:
            raise ValueError("init: pretrained needs hf or config, because a recipe has no weights to import")
        return self
