"""Tokenizers and corpora: specifications, manifests, and the index that runs read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from megaboa.records.base import IF_SET, Record, Tree

# --- what the plan asks for: specs/corpora, specs/tokenizers ----------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TextSpec(Record):
    """Which text is read, and how documents are found in it."""

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
    """Tokens that somebody else has written: `<prefix>.bin` and `<prefix>.idx`."""

    prefix: str
    weight: float | None = field(default=None, metadata=IF_SET)  # None: that of its tokens


@dataclass(frozen=True, kw_only=True)
class CorpusSpec(TextSpec):
    store: str
    # `kind` manifest, model or path, and under `manifest` or `path` which; None where pairs come without one.
    tokenizer: dict[str, str] | None
    pairs: tuple[Pair, ...] = field(default=(), metadata=IF_SET)  # instead of text
    min_characters: int
    deduplicate: bool
    filter: str | None = field(default=None, metadata=IF_SET)  # a Python file with a function `keep`
    append_eod: bool
    prepend_bos: bool | None
    encoder: Literal["auto", "gigatoken", "tokenizers"]
    messages: str | None = field(default=None, metadata=IF_SET)  # field with a conversation, instead of text
    prompt: str | None = field(default=None, metadata=IF_SET)  # or fields with a prompt and its answer
    answer: str | None = field(default=None, metadata=IF_SET)

    @property
    def example_keys(self) -> tuple[str, ...]:
        """The fields of an example for fine-tuning; none where the corpus is text or tokens."""
        return tuple(filter(None, (self.messages, self.prompt, self.answer)))


@dataclass(frozen=True, kw_only=True)
class TokenizerSpec(Record):
    """One to be trained on text, or made of the files of others."""

    name: str
    store: str
    train_on: TextSpec | None
    vocab_size: int
    vocab: str | None = field(default=None, metadata=IF_SET)
    merges: str | None = field(default=None, metadata=IF_SET)
    sentencepiece: str | None = field(default=None, metadata=IF_SET)
    tiktoken: str | None = field(default=None, metadata=IF_SET)
    pattern: str | None = field(default=None, metadata=IF_SET)  # of tiktoken, as its special tokens
    special_tokens: int | None = field(default=None, metadata=IF_SET)


# --- tokenizers/<tokenizer>.json --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Tokenizer(Record):
    """One that the experiment trained, or made of the files of others."""

    name: str
    path: str
    digest: str
    vocab_size: int


# --- data/<corpus>/: sources.json, shard-N-of-M.json, verification.json -----------------------------------------------


@dataclass(frozen=True, kw_only=True)
class HubShard(Record):
    """One of the shards in which a dataset of the hub comes."""

    id: str
    subset: str | None
    split: str
    revision: str
    number: int
    count: int
    folder: str | None = field(default=None, metadata=IF_SET)  # of a subset, in the hub's branch of Parquet files


@dataclass(frozen=True, kw_only=True)
class SourceFile(Record):
    """One file of a corpus. A file of a hub's dataset has no path; `stream` says which it is."""

    path: str
    kind: str  # jsonl, text, source (text that may be no UTF-8), parquet, arrow, stream, bin, idx
    packed: str | None = None
    size: int = 1
    changed: int = 0  # modification time in nanoseconds
    sha256: str = ""
    stream: HubShard | None = None


@dataclass(frozen=True, kw_only=True)
class FrozenTokenizer(Record):
    """A tokenizer as `transformers` loads it, in a file that `tokenizers` alone can read."""

    path: str
    digest: str
    file: str
    size: int
    eos: int | None
    bos: int | None


@dataclass(frozen=True, kw_only=True)
class FilterVersion(Record):
    """A filter of the user's, as it was when the corpus's files were listed."""

    path: str
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Sources(Record):
    """sources.json: what a corpus is made of, and the folder of the store that its tokens go to."""

    name: str
    files: tuple[SourceFile, ...]
    tokenizer: FrozenTokenizer | None
    identity: Tree  # whose digest names the folder
    folder: str
    filter: FilterVersion | None = field(default=None, metadata=IF_SET)


@dataclass(frozen=True, kw_only=True)
class ShardMade(Record):
    """shard-N-of-M.json: its path; None if the corpus existed already."""

    folder: str | None


@dataclass(frozen=True, kw_only=True)
class Verification(Record):
    """verification.json: how many documents were compared with their source."""

    corpus: str
    digest: str
    compared: int
    decoded_exactly: int


# --- facts.json of a shard and of a corpus in the store, and data/<corpus>.json ---------------------------------------


@dataclass(frozen=True, kw_only=True)
class BadRecords(Record):
    """Records that can't be used, and the first of them."""

    records: int = 0
    samples: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Filtered(Record):
    """Records that the user's filter has dropped: how many for each reason, and the first of them."""

    records: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    samples: dict[str, list[str]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Compared(Record):
    """How much of the text went through both encoders."""

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
    lengths: tuple[int, ...]  # documents by the power of two below their length


@dataclass(frozen=True, kw_only=True)
class Shard(Record):
    # Documents that stand one behind the other in the source: which file, where they begin, how many of each key.
    segments: tuple[tuple[int, int, list[int]], ...]
    columns: tuple[Column, ...]
    dtype: str
    bad: BadRecords
    encoder: str
    refused: str | None  # why gigatoken can't use the tokenizer
    compared: Compared
    filtered: Filtered | None = field(default=None, metadata=IF_SET)  # None: there is no filter


@dataclass(frozen=True, kw_only=True)
class Dataset(Record):
    """One text key of a corpus, or one of its pairs, as Megatron reads it."""

    key: str
    documents: int
    tokens: int
    bytes_per_token: float | None  # None where the text isn't known
    largest_token: int
    dropped: dict[str, int]
    sizes: dict[str, int]  # by file
    sha256: dict[str, str]
    lengths: tuple[int, ...]
    frequent: tuple[tuple[int | str, ...], ...]  # token, its count, in manifests its text
    prefix: str = field(default="", metadata=IF_SET)  # in manifests: path without an ending
    by_file: tuple[tuple[int, int], ...] = field(default=(), metadata=IF_SET)  # in the store: documents of each
    dtype: str = field(default="", metadata=IF_SET)  # of a pair, whose type may be another than that of others
    weight: float | None = field(default=None, metadata=IF_SET)  # of a pair, where it was given


@dataclass(frozen=True, kw_only=True)
class Examples(Record):
    """What a corpus for fine-tuning holds: a JSONL file of conversations, or of prompts and their answers."""

    kind: Literal["messages", "pairs"]
    count: int
    turns: int  # of the assistant
    size: int
    sha256: str
    path: str = field(default="", metadata=IF_SET)  # in manifests
    by_file: tuple[tuple[int, int], ...] = field(default=(), metadata=IF_SET)  # in the store: examples of each


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
    """A file of a corpus, and how many documents its first text key has."""

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
    is_given: bool = field(default=False, metadata=IF_SET)  # pairs of the user's, which are never written to
    identity: Tree  # that of sources.json without the files


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
    """What runs read of a corpus of their blend."""

    name: str
    weight: float
    tokens_asked: int
    tokens: int  # available
    epochs: float


@dataclass(frozen=True, kw_only=True)
class ShownExample(Record):
    """An example as it is trained on: pieces of its text, each with whether its tokens count in the loss."""

    corpus: str
    tokens: int
    pieces: tuple[tuple[str, bool], ...]


@dataclass(frozen=True, kw_only=True)
class ExamplesRead(Record):
    """What a template makes of the training examples; tokens before examples are cut to the sequence."""

    examples: int
    tokens: int
    counted: int  # tokens that count in the loss
    longest: int
    cut: int  # examples that are longer than the sequence
    silent: int  # examples of which no token counts once they are cut
    positions: int  # in all samples, padding included
    template: str  # where it is from: the tokenizer, a file, none
    shown: ShownExample


@dataclass(frozen=True, kw_only=True)
class DataIndex(Record):
    """Megatron's index of the data that some runs share."""

    name: str
    cache: str
    samples: dict[str, int]  # by split
    corpora: tuple[CorpusRead, ...]
    max_epochs: float
    warnings: tuple[str, ...] = ()
    examples: ExamplesRead | None = field(default=None, metadata=IF_SET)  # of runs that are fine-tuned
