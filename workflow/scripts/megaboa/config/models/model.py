"""Models, and tokenizers that are trained on the spot or made of the files of others."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from megaboa import conversion
from megaboa.config.models.section import Name, Section, key
from megaboa.data import tokenizer_files
from megaboa.data.tokenizer_files import BYTES, FILES, MOST_TOKENS, SPECIAL_TOKENS
from megaboa.layout import Layout
from megaboa.records import Tree

TRAINED_TOKENS = 512


class Tokenizer(Section):
    """Either trained, or of the files of others: GPT-2's two, SentencePiece's, or those that Megatron's TikTokenizer
    reads.
    """

    train_on: Name | None = key(None, "corpus whose text the tokenizer is trained on")
    vocab_size: Annotated[int, Field(ge=260)] | None = key(
        None,
        f"size of the trained byte-level BPE vocabulary, by default {TRAINED_TOKENS}; largest size of tiktoken's",
    )
    vocab: str | None = key(None, "GPT-2's vocab.json (Megatron's --vocab-file), instead of train_on")
    merges: str | None = key(None, "GPT-2's merges.txt (Megatron's --merge-file)")
    sentencepiece: str | None = key(None, "a SentencePiece model, unigram or BPE, instead of train_on")
    tiktoken: str | None = key(None, "the JSON that Megatron's TikTokenizer reads, instead of train_on")
    tiktoken_pattern: Literal["v1", "v2"] = key("v2", "how text is split (Megatron's --tiktoken-pattern)")
    tiktoken_num_special_tokens: Annotated[int, Field(ge=len(SPECIAL_TOKENS))] = key(
        1000, "ids reserved for special tokens (Megatron's --tiktoken-num-special-tokens)"
    )

    @model_validator(mode="after")
    def _one_origin(self) -> Tokenizer:
        if (self.vocab is None) != (self.merges is None):
            raise ValueError("vocab and merges belong together: set both or none")
        if [self.train_on, self.vocab, self.sentencepiece, self.tiktoken].count(None) != 3:
            raise ValueError("needs one of train_on, sentencepiece, tiktoken, or vocab and merges")
        if self.vocab_size is not None and (self.vocab or self.sentencepiece):
            raise ValueError("vocab_size is of a tokenizer that is trained, and these files have their own: remove it")
        if self.tiktoken is None and {"tiktoken_pattern", "tiktoken_num_special_tokens"} & self.model_fields_set:
            raise ValueError(
                "tiktoken_pattern and tiktoken_num_special_tokens are of tiktoken: name its file, or remove them"
            )
        least = self.tiktoken_num_special_tokens + BYTES
        if self.tiktoken and (self.vocab_size or MOST_TOKENS) < least:
            raise ValueError(f"vocab_size must be {least} or more: special tokens, and one for each byte")
        return self

    @property
    def files(self) -> dict[str, str]:
        """By key; none of one that is trained."""
        named = {name: getattr(self, name) for name in FILES}
        return {name: path for name, path in named.items() if path is not None}

    @property
    def size(self) -> int:
        """How many tokens it has."""
        if self.tiktoken is not None:
            known = tokenizer_files.size(self.tiktoken, "tiktoken", self.tiktoken_num_special_tokens)
            return min(known, self.vocab_size or MOST_TOKENS)
        for kind in ("vocab", "sentencepiece"):
            if path := getattr(self, kind):
                return tokenizer_files.size(path, kind)
        return self.vocab_size or TRAINED_TOKENS


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
