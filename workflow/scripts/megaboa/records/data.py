"""Tokenizers and corpora: specifications, manifests, and the index that runs read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from megaboa.records.base import IF_SET, Record, Tree

# --- what the plan asks for: specs/corpora, specs/tokenizers ----------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TextSpec(Record):
    """The text to read, and how documents are found in it."""

    name: str  # of the corpus
    source: str | list[str]
    text_key: str | list[str]
    separator: str | None
    subset: str | None
    split: str
    revision: str | None
    limit: int | None
    max_document_mb: int
    on_bad_record: Literal["error", "skip"]


@dataclass(frozen=True, kw_only=True)
class Pair(Record):
    """An existing pair of token files in Megatron's format: `<prefix>.bin` and `<prefix>.idx`."""

    prefix: str
    weight: float | None = field(default=None, metadata=IF_SET)  # None: proportional to its tokens


@dataclass(frozen=True, kw_only=True)
class CorpusSpec(TextSpec):
    store: str
    # `kind` is manifest, model or path, and the key `manifest` or `path` locates it; None for pairs without a
    # tokenizer.
    tokenizer: dict[str, str] | None
    pairs: tuple[Pair, ...] = field(default=(), metadata=IF_SET)  # instead of text
    min_characters: int
    deduplicate: bool
    filter: str | None = field(default=None, metadata=IF_SET)  # a Python file with a function `keep`
    append_eod: bool
    prepend_bos: bool | None
    encoder: Literal["auto", "gigatoken", "tokenizers"]
    messages: str | None = field(default=None, metadata=IF_SET)  # field with a conversation, instead of text
    prompt: str | list[str] | None = field(default=None, metadata=IF_SET)  # its fields, and its answer's
    answer: str | None = field(default=None, metadata=IF_SET)

    @property
    def example_keys(self) -> tuple[str, ...]:
        """The fields of an example for fine-tuning; empty if the corpus is text or tokens."""
        prompt = (self.prompt,) if isinstance(self.prompt, str) else self.prompt or ()
        return tuple(filter(None, (self.messages, *prompt, self.answer)))


@dataclass(frozen=True, kw_only=True)
class TokenizerSpec(Record):
    """A tokenizer to be trained on text, or converted from existing files."""

    name: str
    store: str
    train_on: TextSpec | None
    vocab_size: int
    vocab: str | None = field(default=None, metadata=IF_SET)
    merges: str | None = field(default=None, metadata=IF_SET)
    sentencepiece: str | None = field(default=None, metadata=IF_SET)
    tiktoken: str | None = field(default=None, metadata=IF_SET)
    pattern: str | None = field(default=None, metadata=IF_SET)  # for tiktoken, as are special_tokens
    special_tokens: int | None = field(default=None, metadata=IF_SET)


# --- tokenizers/<tokenizer>.json --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Tokenizer(Record):
    """A tokenizer that the experiment trained, or converted from existing files."""

    name: str
    path: str
    digest: str
    vocab_size: int


# --- data/<corpus>/: sources.json, shard-N-of-M.json, verification.json -----------------------------------------------


@dataclass(frozen=True, kw_only=True)
class HubShard(Record):
    """One of the shards that a dataset on the hub consists of."""

    id: str
    subset: str | None
    split: str
    revision: str
    number: int
    count: int
    folder: str | None = field(default=None, metadata=IF_SET)  # the subset's, in the hub's branch of Parquet files


@dataclass(frozen=True, kw_only=True)
class SourceFile(Record):
    """One file of a corpus. A file of a dataset on the hub has no path, but a `stream`."""

    path: str
    kind: str  # jsonl, text, source (text, perhaps not UTF-8), parquet, arrow, stream, bin, idx
    packed: str | None = None
    size: int = 1
    changed: int = 0  # modification time in nanoseconds
    sha256: str = ""
    stream: HubShard | None = None


@dataclass(frozen=True, kw_only=True)
class FrozenTokenizer(Record):
    """A tokenizer as `transformers` loads it, saved to a file that `tokenizers` alone can read."""

    path: str
    digest: str
    file: str
    size: int
    eos: int | None
    bos: int | None


@dataclass(frozen=True, kw_only=True)
class FilterVersion(Record):
    """The user's filter, as it was when the corpus's files were listed."""

    path: str
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Sources(Record):
    """sources.json: the files of a corpus, and the store folder that its tokens go to."""

    name: str
    files: tuple[SourceFile, ...]
    tokenizer: FrozenTokenizer | None
    identity: Tree  # its digest names the folder
    folder: str
    filter: FilterVersion | None = field(default=None, metadata=IF_SET)


@dataclass(frozen=True, kw_only=True)
class ShardMade(Record):
    """shard-N-of-M.json: the shard's path; None if the corpus existed already."""

    folder: str | None


@dataclass(frozen=True, kw_only=True)
class Verification(Record):
    """verification.json: the number of documents that were compared with their source."""

    corpus: str
    digest: str
    compared: int
    decoded_exactly: int


# --- facts.json of a shard and of a corpus in the store, and data/<corpus>.json ---------------------------------------


@dataclass(frozen=True, kw_only=True)
class BadRecords(Record):
    """Number of unusable records, and the first of them."""

    records: int = 0
    samples: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Filtered(Record):
    """Number of records that the user's filter dropped, by reason, and the first of them."""

    records: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    samples: dict[str, list[str]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Compared(Record):
    """The amount of text that both encoders tokenized."""

    documents: int
    characters: int


@dataclass(frozen=True, kw_only=True)
class Column(Record):
    """One text key of a shard."""

    documents: int
    tokens: int
    text_bytes: int
    empty: int  # documents without tokens
    dropped: dict[str, int]  # documents by reason
    lengths: tuple[int, ...]  # histogram of lengths, by powers of two


@dataclass(frozen=True, kw_only=True)
class Shard(Record):
    # Runs of consecutive documents in the source: number of the file, start in it, number of documents for each key.
    segments: tuple[tuple[int, int, list[int]], ...]
    columns: tuple[Column, ...]
    dtype: str
    bad: BadRecords
    encoder: str
    refused: str | None  # why gigatoken can't use the tokenizer
    compared: Compared
    filtered: Filtered | None = field(default=None, metadata=IF_SET)  # None if the corpus has no filter


@dataclass(frozen=True, kw_only=True)
class Dataset(Record):
    """One text key of a corpus, or one of its pairs, as Megatron reads it."""

    key: str
    documents: int
    tokens: int
    bytes_per_token: float | None  # None if the text isn't available
    largest_token: int
    dropped: dict[str, int]
    sizes: dict[str, int]  # by file
    sha256: dict[str, str]
    lengths: tuple[int, ...]
    frequent: tuple[tuple[int | str, ...], ...]  # token, its count and, in manifests, its text
    prefix: str = field(default="", metadata=IF_SET)  # in manifests: path without suffix
    by_file: tuple[tuple[int, int], ...] = field(default=(), metadata=IF_SET)  # in the store: documents in each file
    unknown: int = field(default=0, metadata=IF_SET)  # tokens that stand for text which the tokenizer doesn't know
    # Of a pair whose documents consist of several sequences; `documents` counts the sequences, from which GPT's samples
    # are drawn.
    whole_documents: int = field(default=0, metadata=IF_SET)
    dtype: str = field(default="", metadata=IF_SET)  # a pair's, which may differ from other pairs'
    weight: float | None = field(default=None, metadata=IF_SET)  # the pair's weight, if it was given


@dataclass(frozen=True, kw_only=True)
class Examples(Record):
    """Contents of a corpus for fine-tuning: a JSONL file of conversations, or of prompts and their answers."""

    kind: Literal["messages", "pairs"]
    count: int
    turns: int  # by the assistant
    size: int
    sha256: str
    path: str = field(default="", metadata=IF_SET)  # in manifests
    by_file: tuple[tuple[int, int], ...] = field(default=(), metadata=IF_SET)  # in the store: examples in each file


@dataclass(frozen=True, kw_only=True)
class CorpusFacts(Record):
    """Facts about the merged shards."""

    datasets: tuple[Dataset, ...]
    dtype: str
    documents: int
    tokens: int
    bad: BadRecords
    encoders: tuple[str, ...]
    refused: str | None
    compared: Compared
    filtered: Filtered | None = field(default=None, metadata=IF_SET)
    examples: Examples | None = field(default=None, metadata=IF_SET)  # instead of datasets


@dataclass(frozen=True, kw_only=True)
class TextRead(Record):
    """A file of a corpus, and the number of documents of its first text key."""

    path: str
    kind: str
    size: int
    sha256: str
    documents: int


@dataclass(frozen=True, kw_only=True)
class Corpus(CorpusFacts):
    """data/<corpus>.json"""

    name: str
    digest: str
    source: str | list[str]
    sources: tuple[TextRead, ...]
    tokenizer: str | None
    tokenizer_digest: str | None
    filter: FilterVersion | None = field(default=None, metadata=IF_SET)
    is_given: bool = field(default=False, metadata=IF_SET)  # the user's own pairs, which are never written to
    identity: Tree  # as in sources.json, but without the files


# --- data/indexes/<id>.json -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class IndexSpec(Record):
    """specs/indexes/<id>.json: an index, and which of the runs that share it builds it."""

    name: str
    store: str
    run: str
    key: Tree | None  # the part of a run's identity that decides which samples are drawn
    max_epochs: float


@dataclass(frozen=True, kw_only=True)
class CorpusRead(Record):
    """How much runs read of a corpus of their blend, or of one of its weighted prefixes."""

    name: str
    prefix: str = field(default="", metadata=IF_SET)  # empty: the whole corpus
    weight: float  # in the blend
    tokens_asked: int  # by the run itself
    tokens_before: int = field(default=0, metadata=IF_SET)  # of the samples before, which are a parent's
    tokens: int  # available
    epochs: float


@dataclass(frozen=True, kw_only=True)
class EvaluationRead(Record):
    """How much one evaluation reads of a validation set: of that corpus of it, or weighted prefix, which it has read
    in whole first."""

    key: str  # of the set: data.split, data.validation_sets.law
    corpus: str
    prefix: str = field(default="", metadata=IF_SET)  # empty: the whole corpus
    unit: Literal["tokens", "samples"]
    asked: int
    there: int
    eval_iters: int
    most: int  # eval_iters up to which nothing is read twice


@dataclass(frozen=True, kw_only=True)
class ShownExample(Record):
    """An example as a run trains on it: pieces of its text, each with a flag that says whether its tokens count in the
    loss."""

    corpus: str
    tokens: int
    pieces: tuple[tuple[str, bool], ...]


@dataclass(frozen=True, kw_only=True)
class ExamplesRead(Record):
    """Statistics of the templated training examples; `tokens` are counted before examples are cut to the sequence."""

    examples: int
    tokens: int
    counted: int  # tokens that count in the loss
    longest: int
    cut: int  # examples longer than the sequence
    silent: int  # examples without a token that counts, once they are cut
    positions: int  # in all samples, padding included
    template: str  # its origin: the tokenizer, a file, none
    shown: ShownExample


@dataclass(frozen=True, kw_only=True)
class DataIndex(Record):
    """Megatron's index of the data that some runs share."""

    name: str
    cache: str
    samples: dict[str, int]  # by split
    corpora: tuple[CorpusRead, ...]
    evaluations: tuple[EvaluationRead, ...] = field(default=(), metadata=IF_SET)  # unknown of older indexes
    max_epochs: float
    warnings: tuple[str, ...] = ()
    examples: ExamplesRead | None = field(default=None, metadata=IF_SET)  # only for fine-tuned runs
