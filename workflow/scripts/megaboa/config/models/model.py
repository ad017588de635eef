"""Models, and tokenizers that are trained on the spot or made of GPT-2's files."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from megaboa import conversion
from megaboa.config.models.section import Name, Section, key
from megaboa.data.tokenizer import END_OF_TEXT
from megaboa.layout import Layout
from megaboa.records import Tree


class Tokenizer(Section):
    """Either `train_on`, or `vocab` and `merges`."""

    train_on: Name | None = key(None, "corpus whose text the tokenizer is trained on")
    vocab_size: Annotated[int, Field(ge=260)] = key(512, "size of the byte-level BPE vocabulary that is trained")
    vocab: str | None = key(None, "GPT-2's vocab.json (Megatron's --vocab-file), instead of train_on")
    merges: str | None = key(None, "GPT-2's merges.txt (Megatron's --merge-file)")

    @model_validator(mode="after")
    def _one_origin(self) -> Tokenizer:
        if (self.vocab is None) != (self.merges is None):
            raise ValueError("vocab and merges belong together: set both or none")
        if (self.train_on is None) == (self.vocab is None):
            raise ValueError("needs either train_on, or vocab and merges")
        if self.vocab is not None and "vocab_size" in self.model_fields_set:
            raise ValueError("vocab_size is of a tokenizer that is trained, and vocab has its own: remove one")
        return self

    @property
    def size(self) -> int:
        """How many tokens it has."""
        if self.vocab is None:
            return self.vocab_size
        path = Path(self.vocab).expanduser()
        return _entries(str(path), path.stat().st_mtime_ns)


@functools.cache
def _entries(vocab: str, _changed: int) -> int:
    known = json.loads(Path(vocab).read_text(encoding="utf-8"))
    return len(known) + (END_OF_TEXT not in known)


class Conversion(Section):
    """By how many ranks a model is imported and exported. The weights are the same, and so are their places."""

    tp: PositiveInt = key(1, "tensor parallel size of the ranks that import the model, export it, and prove both")
    pp: PositiveInt = key(1, "pipeline parallel size of these ranks")
    ep: PositiveInt = key(1, "expert parallel size of these ranks; there are pp * max(tp, ep)")
    nodes: PositiveInt = key(1, "nodes for these ranks")

    @model_validator(mode="after")
    def _fits(self) -> Conversion:
        if max(self.tp, self.ep) % min(self.tp, self.ep):
            raise ValueError(f"tp {self.tp} and ep {self.ep} share the same ranks: make one a multiple of the other")
        if (ranks := self.ranks) % self.nodes:
            raise ValueError(f"{ranks} ranks can't be spread evenly over {self.nodes} nodes")
        return self

    @property
    def ranks(self) -> int:
        return self.layout.world_size or 1

    @property
    def layout(self) -> Layout:
        return conversion.layout(self.tp, self.pp, self.ep)


class Model(Section):
    """One of `hf` and `config`, or a `recipe`, or both: then the recipe decides how the model is trained."""

    hf: str | None = key(None, "Hugging Face id, or path of a local folder with config.json and weights")
    revision: str | None = key(None, "commit, tag or branch of the Hugging Face id")
    config: Tree | None = key(
        None, "an inline Hugging Face config (`model_type: qwen3`, ...), from which a new model is made"
    )
    recipe: str | None = key(
        None,
        "a Python file with `configure(...)`, or the name of a recipe that `megaboa recipes` lists; with `hf` or "
        "`config` it trains that model, which can be imported and exported",
    )
    args: Tree = key({}, "arguments for the recipe's function")
    tokenizer: str | None = key(None, "name under `tokenizers`, or Hugging Face id or folder; default: the model's own")
    init: Literal["pretrained", "scratch"] = key(
        "scratch", "start from the imported weights, or from random ones drawn by Megatron"
    )
    seed: NonNegativeInt = key(0, "seed of the weights of a model made from `config`")
    conversion: Conversion = key(Conversion(), "by how many ranks it is imported and exported; default: by one process")
    params: PositiveInt | None = key(
        None, "number of parameters, for expressions, if the model's config doesn't determine it"
    )

    @model_validator(mode="after")
    def _one_origin(self) -> Model:
        if self.hf is not None and self.config is not None:
            raise ValueError("has both hf and config: the weights are either there or made, so remove one")
        if not (self.has_source or self.recipe):
            raise ValueError("needs hf, config or recipe; none is given")
        if self.config is not None and not isinstance(self.config.get("model_type"), str):
            raise ValueError("config needs model_type, such as `model_type: qwen3`")
        if self.revision and not self.hf:
            raise ValueError("revision belongs to hf: remove it, or name a model with hf")
        if self.args and not self.recipe:
            raise ValueError("args belong to recipe: remove them, or name a recipe")
        if self.init == "pretrained" and not self.has_source:
            raise ValueError("init: pretrained needs hf or config too, because a recipe has no weights to import")
        return self

    @property
    def has_source(self) -> bool:
        """Whether there is a Hugging Face folder of it, to import from and to export to."""
        return self.hf is not None or self.config is not None
