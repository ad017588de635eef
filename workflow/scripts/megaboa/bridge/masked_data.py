"""Data for BERT and T5: megatron-core's masking datasets, over the same corpora that GPT reads.

Core's datasets mask words in samples of whole sentences, and need a corpus whose documents are split into sentences
(Megatron-LM's `--split-sentences`). Corpora written here have one sequence per document, which is split into pieces of
equal length when it is read. A corpus that was split before (`megatron:`) is read by its own sentences.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from megatron.bridge.data import utils
from megatron.bridge.training.config import GPTDatasetConfig
from megatron.core.datasets.bert_dataset import BERTMaskedWordPieceDataset
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.masked_dataset import MaskedWordPieceDataset
from megatron.core.datasets.t5_dataset import T5MaskedWordPieceDataset
from numpy.typing import NDArray

LONGEST_SENTENCE = 512  # limit of core's helpers: documents with a longer sentence are left out
NO_TOKEN = -1  # padding in samples, until masks are made


@dataclass
class MaskedDatasetConfig(GPTDatasetConfig):
    """Settings of core's masked datasets, under core's names; the values are Megatron-LM's."""

    piece_tokens: int | None = None  # for documents that aren't split into sentences; None: an eighth of a sample
    masking_probability: float = 0.15
    short_sequence_probability: float = 0.1
    masking_max_ngram: int = 3
    masking_do_full_word: bool = True
    masking_do_permutation: bool = False
    masking_use_longer_ngrams: bool = False
    masking_use_geometric_distribution: bool = False

    def __init__(self, **given: Any) -> None:
        own = set(type(self).__dataclass_fields__) - set(GPTDatasetConfig.__dataclass_fields__)
        for name in own & set(given):
            setattr(self, name, given.pop(name))
        super().__init__(**given)

    @classmethod
    def like(cls, dataset: GPTDatasetConfig, **given: Any) -> Self:
        """A configuration with the settings of a recipe's common dataset, and those given."""
        names = [field.name for field in dataclasses.fields(GPTDatasetConfig) if field.init]
        common = {name: getattr(dataset, name) for name in names}
        return cls(**{**common, "sequence_length": given.get("seq_length", dataset.seq_length), **given})

    @property
    def piece(self) -> int:
        return min(self.piece_tokens or max(2, self.seq_length // 8), LONGEST_SENTENCE)

    @property
    def marks(self) -> tuple[str, ...]:
        """Special tokens that the objective needs; the tokenizer may lack them."""
        raise NotImplementedError


@dataclass
class BertDatasetConfig(MaskedDatasetConfig):
    """`classification_head`: samples have two segments, and the second follows the first or precedes it."""

    classification_head: bool = True

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)

    @property
    def marks(self) -> tuple[str, ...]:
        return ("cls", "sep", "mask")


@dataclass
class T5DatasetConfig(MaskedDatasetConfig):
    """`sentinels`: number of spans that can be masked in a sample (Megatron-LM's `--vocab-extra-ids`)."""

    sequence_length_decoder: int = 128
    sentinels: int = 100
    masking_max_ngram: int = 10
    masking_use_geometric_distribution: bool = True

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)

    @property
    def sequence_length_encoder(self) -> int:
        return self.seq_length

    @property
    def marks(self) -> tuple[str, ...]:
        return ("mask", "bos", "eos", *(f"sentinel {number}" for number in range(self.sentinels)))


class Marked:
    """A tokenizer with the special tokens of a masked dataset: its own, or ids after its vocabulary."""

    def __init__(self, tokenizer: Any, marks: tuple[str, ...]):
        self._tokenizer = tokenizer
        ids = dict(zip(marks, range(tokenizer.vocab_size, tokenizer.vocab_size + len(marks)), strict=True))
        self._ids = {mark: (_own(tokenizer, mark), added) for mark, added in ids.items()}
        self.added = len(marks)

    def __getattr__(self, name: str) -> Any:
        ids = self.__dict__.get("_ids", {})
        if name in ids:
            own, added = ids[name]
            return added if own is None else own
        return getattr(self.__dict__["_tokenizer"], name)

    @property
    def additional_special_tokens_ids(self) -> list[int]:
        """T5's sentinels, in the order in which spans use them."""
        return [added for mark, (_, added) in self._ids.items() if mark.startswith("sentinel ")]


def _own(tokenizer: Any, mark: str) -> int | None:
    try:
        found = getattr(tokenizer, mark)
    except Exception:  # tokenizers differ in what they raise for a missing token
        return None
    return found if isinstance(found, int) and found >= 0 else None


class Pieces:
    """Documents split into pieces of equal length, with the interface of a corpus of sentences."""

    def __init__(self, whole: IndexedDataset, size: int):
        self._whole, self._size = whole, size
        self.path_prefix = whole.path_prefix
        lengths = whole.sequence_lengths.astype(np.int64)
        pieces = -(-lengths // size)
        self.document_indices = np.concatenate([[0], np.cumsum(pieces)]).astype(np.int64)
        self.sequence_lengths = np.full(self.document_indices[-1], size, dtype=np.int32)
        there = pieces > 0
        ends = self.document_indices[1:][there] - 1
        self.sequence_lengths[ends] = (lengths - (pieces - 1) * size)[there]

    def __len__(self) -> int:
        return len(self.sequence_lengths)

    def __getitem__(self, number: int) -> NDArray:
        document = int(np.searchsorted(self.document_indices, number, side="right")) - 1
        begin = int(number - self.document_indices[document]) * self._size
        return self._whole.get(document, offset=begin, length=int(self.sequence_lengths[number]))


@contextlib.contextmanager
def _process_group() -> Iterator[None]:
    """A process group for core, which asks for the rank: there is none when the index is built before the run."""
    alone = not torch.distributed.is_initialized()
    if alone:
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        if alone:
            torch.distributed.destroy_process_group()


class _OfPieces(MaskedWordPieceDataset):
    """Changes to core's dataset that both objectives need."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        # Core marks the end of a sample by the tokenizer's padding token, and derives masks and segments from its id,
        # which is only right if that is 0. Besides, a document may contain that token.
        self._pad_token_id = NO_TOKEN

    def _build_sample_index(self, *arguments: Any) -> NDArray:
        with _process_group():
            return super()._build_sample_index(*arguments)

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: MaskedDatasetConfig) -> IndexedDataset | Pieces:
        whole = IndexedDataset(dataset_path, mmap=config.mmap_bin_files)
        has_sentences = len(whole.sequence_lengths) > len(whole.document_indices) - 1
        return whole if has_sentences else Pieces(whole, config.piece)

    @staticmethod
    def _key_config_attributes() -> list[str]:
        return [*MaskedWordPieceDataset._key_config_attributes(), "piece"]

    @property
    def tokens(self) -> int:
        """Number of tokens in the documents that samples are drawn from."""
        begins, lengths = self.dataset.document_indices, self.dataset.sequence_lengths
        sums = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        return int((sums[begins[self.indices + 1]] - sums[begins[self.indices]]).sum())

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {name: np.maximum(value, 0) for name, value in super().__getitem__(number).items()}


class BertDataset(_OfPieces, BERTMaskedWordPieceDataset):
    @staticmethod
    def _key_config_attributes() -> list[str]:
        return [*_OfPieces._key_config_attributes(), "classification_head"]


class T5Dataset(_OfPieces, T5MaskedWordPieceDataset):
    @staticmethod
    def _key_config_attributes() -> list[str]:
        return [*_OfPieces._key_config_attributes(), "sequence_length_decoder", "sentinels"]


def build(sizes: list[int], config: MaskedDatasetConfig, *_: Any, **__: Any) -> tuple[Any, Any, Any]:
    """Datasets for training, validation and test, as Bridge asks for them."""
    if config.mock:
        raise ValueError("data: words are masked in a text, and there is none: name a corpus")
    asked = copy.copy(config)
    asked.tokenizer = Marked(config.tokenizer, config.marks)
    kind = BertDataset if isinstance(config, BertDatasetConfig) else T5Dataset
    return BlendedMegatronDatasetBuilder(kind, sizes, lambda: True, asked).build()


# Bridge takes the first class that matches, and ours are also subclasses of GPT's.
utils._REGISTRY = {MaskedDatasetConfig: build, **utils._REGISTRY}
