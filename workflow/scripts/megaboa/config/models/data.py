"""Corpora, and what a run reads of them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    WithJsonSchema,
    model_validator,
)

from megaboa.blends import MAIN
from megaboa.config.models.section import Fraction, Name, Section, key
from megaboa.data.sources import as_list, file_stems, paths, placed
from megaboa.errors import InputError
from megaboa.files import canonical
from megaboa.records import Tree


def _weights(value: Any) -> Any:
    """A single corpus is a blend of one."""
    if isinstance(value, str):
        return {value: 1.0}
    if value is None or isinstance(value, dict):
        return value
    raise ValueError("must be the name of a corpus, or a mapping from corpora to weights")


_BLEND_SCHEMA = [
    {"type": "string"},
    {"type": "object", "additionalProperties": {"type": "number", "exclusiveMinimum": 0}, "minProperties": 1},
]
Blend = Annotated[
    dict[Name, PositiveFloat],
    Field(min_length=1),
    BeforeValidator(_weights),
    WithJsonSchema({"anyOf": _BLEND_SCHEMA}),
]
OptionalBlend = Annotated[
    Annotated[dict[Name, PositiveFloat], Field(min_length=1)] | None,
    BeforeValidator(_weights),
    WithJsonSchema({"anyOf": [*_BLEND_SCHEMA, {"type": "null"}]}),
]


def _not_main(name: str) -> str:
    if name == MAIN:
        raise ValueError("is what tables and figures call the validation data of the split: name the set otherwise")
    return name


SetName = Annotated[Name, AfterValidator(_not_main)]
OF_PAIRS = {"megatron", "split", "tokenizer"}  # keys that mean something where tokens are given
# Keys that mean something where examples for fine-tuning are given.
OF_EXAMPLES = {"source", "messages", "prompt", "answer", "subset", "split", "revision", "limit", "max_document_mb"}
OF_EXAMPLES |= {"on_bad_record"}
# Keys that decide which texts are read of a source.
OF_SOURCE = ("subset", "split", "revision", "filter", "text_key", "messages", "prompt", "answer")


def origins(corpus: Tree) -> frozenset[str]:
    """Each source of a corpus with these fields, and each file of it, with what else decides which texts are read of
    it; not how many, and how they are tokenized. Corpora that share one have texts in common."""
    texts = {} if corpus.get("pairs") else {name: corpus.get(name) for name in OF_SOURCE}
    if texts.get("filter"):
        texts["filter"] = placed(texts["filter"])
    named = [placed(one) for one in as_list(corpus["source"])]
    files = [] if corpus.get("pairs") else [file for one in named for file in _files(one)]
    return frozenset(canonical([one, texts]) for one in (*named, *files))


def _files(source: str) -> list[str]:
    try:
        return paths(source)
    except InputError:  # it is reported where files are looked for
        return []


class Corpus(Section):
    """Either `source`, or `megatron`."""

    source: Annotated[str, Field(min_length=1)] | Annotated[list[str], Field(min_length=1)] | None = key(
        None,
        "files (.jsonl, .txt, both also .gz and .zst, .parquet, .arrow), a folder that `save_to_disk` "
        "wrote, a glob of them, `hf:owner/name` on the hub, or `python-stdlib`: the sources of Python's own library; "
        "or a list of these",
    )
    megatron: Annotated[str, Field(min_length=1)] | Annotated[list[str | int | float], Field(min_length=1)] | None = (
        key(
            None,
            "instead of source: tokens that are written already, as `.bin` and `.idx`: a prefix, a glob or a list of "
            'them, weights and prefixes ("0.3 a 0.7 b"), or a file of these',
        )
    )
    text_key: Annotated[str, Field(min_length=1)] | Annotated[list[str], Field(min_length=1)] = key(
        "text", "field with the text, nested as `a.b`; several fields make a dataset each"
    )
    messages: Annotated[str, Field(min_length=1)] | None = key(
        None,
        "for fine-tuning, instead of text_key: field with a conversation, a list of turns with `role` and `content` "
        "(or `from` and `value`)",
    )
    prompt: Annotated[str, Field(min_length=1)] | Annotated[list[str], Field(min_length=1)] | None = key(
        None,
        "for fine-tuning, with `answer` instead of messages: field with a prompt, or several, joined by blank lines",
    )
    answer: Annotated[str, Field(min_length=1)] | None = key(None, "field with the answer to `prompt`")
    separator: Annotated[str, Field(min_length=1)] | None = key(
        None, "separator between the documents of a text file; default: a file is one document"
    )
    subset: str | None = key(None, "configuration of a dataset on the hub")
    split: str = key("train", "split of a dataset on the hub, of a folder with several, or of a file of prefixes")
    revision: str | None = key(None, "commit, tag or branch of a dataset on the hub")
    limit: PositiveInt | None = key(None, "use only the first N records (in one shard)")
    shards: PositiveInt = key(1, "number of parallel jobs; doesn't change the result")
    min_characters: NonNegativeInt = key(0, "skip shorter documents")
    deduplicate: bool = key(False, "skip documents whose text equals that of an earlier one")
    filter: str | None = key(
        None,
        "a Python file with `keep(record)`, which returns True, False, or the reason to drop a record; dropped records "
        "are counted and shown",
    )
    on_bad_record: Literal["error", "skip"] = key(
        "error", "a bad record ends the job, or is skipped, counted and shown"
    )
    max_document_mb: PositiveInt = key(
        128, "a longer record is bad; the job requests 20 times this size in memory", le=1024
    )
    tokenizer: str | None = key(None, "name under `tokenizers`, or a Hugging Face id or folder; default: the model's")
    append_eod: bool = key(True, "end every document with the tokenizer's end-of-text token")
    prepend_bos: bool | None = key(None, "begin every document with the BOS token; default: as the tokenizer does")
    encoder: Literal["auto", "gigatoken", "tokenizers"] = key(
        "auto", "auto: gigatoken if it supports the tokenizer and equals `tokenizers` on a sample of every shard"
    )

    @model_validator(mode="after")
    def _one_origin(self) -> Corpus:
        if (self.source is None) == (self.megatron is None):
            raise ValueError(f"needs exactly one of source and megatron; given: {'both' if self.source else 'none'}")
        if self.megatron is not None and (others := sorted(self.model_fields_set - OF_PAIRS)):
            raise ValueError(f"megatron names tokens, which are read as they are: remove {' and '.join(others)}")
        return self

    @property
    def has_examples(self) -> bool:
        """For fine-tuning, and not text."""
        return any(value is not None for value in (self.messages, self.prompt, self.answer))

    @model_validator(mode="after")
    def _whole_examples(self) -> Corpus:
        if not self.has_examples or self.megatron is not None:
            return self
        if (self.prompt is None) != (self.answer is None) or (self.messages is None) == (self.prompt is None):
            raise ValueError("examples for fine-tuning need messages, or prompt and answer: set the one or the other")
        if others := sorted(self.model_fields_set - OF_EXAMPLES):
            raise ValueError(
                f"holds examples for fine-tuning, which are not tokenized here: remove {' and '.join(others)}"
            )
        return self

    @model_validator(mode="after")
    def _distinct_keys(self) -> Corpus:
        stems = file_stems("", self.text_key)
        if len(set(stems)) < len(stems):
            raise ValueError(f"the keys of text_key give files of the same name: {', '.join(self.text_key)}")
        return self


class BlendPerSplit(Section):
    """A blend of its own for every split; a split without one has no data."""

    train: Blend = key(description="training data: a corpus, or corpora with weights", short="data")
    valid: OptionalBlend = key(None, "validation data; default: none", short="valid")
    test: OptionalBlend = key(None, "data of the test at the end; default: none", short="test")


class FimTokens(Section):
    """Tokens that the tokenizer must have; the defaults are Qwen's."""

    prefix: str = key("<|fim_prefix|>", "token before the text that precedes the gap")
    middle: str = key("<|fim_middle|>", "token before the text that fills the gap")
    suffix: str = key("<|fim_suffix|>", "token before the text that follows the gap")
    pad: str = key("<|fim_pad|>", "token that pads samples that have become shorter")
    eod: str = key("<|endoftext|>", "token between documents; text is never moved across it")


class Fim(Section):
    """Fill-in-the-middle: documents are cut in three, and their middle is moved to the end."""

    rate: Fraction = key(0.5, "share of documents that are rearranged", short="fim")
    spm_rate: Fraction = key(0.5, "share of these in which the text after the gap comes first", short="spm")
    tokens: FimTokens = key(FimTokens(), "the tokens between the parts")
    split_sample: str | None = key(
        None, "token at which documents are split into fragments, each rearranged separately"
    )
    fragment_rate: Fraction | None = key(None, "share of the fragments that are rearranged")
    no_prefix: str | None = key(None, "documents and fragments that begin with this text are left as they are")

    @model_validator(mode="after")
    def _fragments(self) -> Fim:
        if (self.split_sample is None) != (self.fragment_rate is None):
            raise ValueError("split_sample and fragment_rate belong together: set both or none")
        return self


class Data(Section):
    blend: OptionalBlend = key(
        None, "a corpus, or corpora with weights; default: the only corpus there is", short="data"
    )
    blend_per_split: BlendPerSplit | None = key(None, "a blend for each split, in place of blend and split")
    split: str = key(
        "98,1,1",
        "shares of documents, in their order, for training, validation and test",
        short="split",
        pattern=r"^\d+(\.\d+)?(,\d+(\.\d+)?){2}$",
    )
    validation_sets: dict[SetName, Blend] = key(
        {},
        "further validation sets by name, each with its own loss; of corpora that the run or its parents train on, the "
        "held-out part",
    )
    reset_position_ids: bool = key(False, "positions restart at 0 after every end-of-text token", short="resetpos")
    reset_attention_mask: bool = key(False, "block attention across end-of-text tokens", short="resetmask")
    eod_mask_loss: bool = key(False, "leave out the loss of the prediction after an end-of-text token", short="eodmask")
    fim: Fim | None = key(None, "fill-in-the-middle; off")
    max_epochs: PositiveFloat = key(4.0, "warn if a corpus is read more often than this")
    num_workers: NonNegativeInt = key(2, "data loader processes per rank; on the CPU always 0")

    @model_validator(mode="after")
    def _one_blend(self) -> Data:
        if self.blend_per_split is not None and self.blend is not None:
            raise ValueError("blend and blend_per_split are both set: remove one")
        if self.blend_per_split is not None and "split" in self.model_fields_set:
            raise ValueError("split shares out the documents of blend: remove it, or blend_per_split")
        return self
