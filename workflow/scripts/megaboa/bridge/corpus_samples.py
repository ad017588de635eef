"""Reads corpora through megatron-core's own classes."""

from __future__ import annotations

import tempfile

import numpy as np

from megaboa.records import Dataset

SAMPLES, LENGTH = 20, 64


def read_as_training_does(dataset: Dataset, vocab_size: int) -> list[str]:
    """Problems when a corpus is read through GPTDataset, whose samples must consist of the corpus's tokens."""
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from megatron.core.datasets.utils import Split

    indexed = IndexedDataset(dataset.prefix)
    documents = len(indexed)
    if (documents, int(indexed.sequence_lengths.sum(dtype=np.int64))) != (dataset.documents, dataset.tokens):
        return [f"{dataset.prefix}: megatron-core counts {documents} documents"]
    few = np.arange(min(documents, 1000), dtype=np.int32)
    length = min(LENGTH, int(indexed.sequence_lengths[few].sum()) - 1)  # a sample has one more token than its length
    if length < 1:
        return []
    with tempfile.TemporaryDirectory() as cache:
        config = GPTDatasetConfig(
            random_seed=1,
            sequence_length=length,
            split="1",
            path_to_cache=cache,
            tokenizer=_Vocabulary(vocab_size),
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            create_attention_mask=False,
        )
        samples = GPTDataset(indexed, dataset.prefix, few, None, Split.train, config)
        found = []
        for number in range(min(SAMPLES, len(samples))):
            tokens = samples[number]["tokens"].numpy()
            if len(tokens) != length or tokens.max() >= vocab_size:
                found.append(f"{dataset.prefix}: GPTDataset gives a wrong sample {number}")
        return found


class _Vocabulary:
    """The parts of a tokenizer that GPTDataset needs."""

    def __init__(self, size: int) -> None:
        self.vocab_size = size
        self.eod = self.pad = size - 1
        self.unique_identifiers = {"class": type(self).__name__, "vocab_size": size}
