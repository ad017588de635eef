"""Bridge's fill-in-the-middle dataset, made to work and to give every sample the same text whenever it is read."""

from __future__ import annotations

from typing import Any

import numpy as np
from megatron.bridge.data import utils
from megatron.bridge.data.datasets.fim_dataset import GPTFIMDataset
from numpy.typing import NDArray


class FillInTheMiddle(GPTFIMDataset):
    """Bridge 0.6.2 fails at the first sample, as Megatron-Core has come to want the documents' lengths, too.

    And it draws from one generator for all samples, so that what a sample holds would depend on those read before it:
    a resumed run, or one with another number of loader processes, would train on another text.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        names = self.config.fim_extra_tokens
        ids = (self.prefix_tok_id, self.middle_tok_id, self.suffix_tok_id, self.pad_tok_id, self.eod_tok_id)
        known = set(self.config.tokenizer.vocab)
        for part, found in zip(("prefix", "middle", "suffix", "pad", "eod"), ids, strict=True):
            if found is None or names[part] not in known:
                raise ValueError(
                    f"data.fim.tokens.{part}: the tokenizer has no token {names[part]!r}: name one that it has"
                )

    def _query_document_sample_shuffle_indices(self, idx: int) -> tuple[NDArray, NDArray, list[int]]:
        self.np_rng = np.random.RandomState([self.config.random_seed, self.index_split.value, idx])
        text, documents = super()._query_document_sample_shuffle_indices(idx)
        return text, documents, [len(text)]


def install() -> None:
    """Bridge looks its class up by this name."""
    utils.GPTFIMDataset = FillInTheMiddle
