"""Documents to an indexed corpus of tokens, a batch at a time, so that memory does not grow with the corpus."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from megaboa.data.errors import InputError
from megaboa.data.indexed import IndexedWriter, token_dtype
from megaboa.data.tokenizer import Reference, load

BATCH_DOCUMENTS = 1000
BATCH_CHARACTERS = 10_000_000
SECONDS_BETWEEN_LINES = 10


def tokenize(texts: Iterable[str], reference: Reference, append_eod: bool, prefix: Path) -> dict[str, Any]:
    """Write `<prefix>.bin` and `<prefix>.idx`; return their numbers of documents and tokens and their type."""
    tokenizer = load(reference)
    if append_eod and tokenizer.eos_token_id is None:
        raise InputError(f"tokenizer {reference.path} has no end-of-text token; set the corpus's `append_eod` to false")
    end = [tokenizer.eos_token_id] if append_eod else []
    with IndexedWriter(prefix, token_dtype(len(tokenizer))) as writer:
        progress = Progress(prefix.name)
        for batch in batches(texts):
            # As Megatron's own tokenizer does it: with the special tokens that the tokenizer itself puts around text.
            for ids in tokenizer(batch, return_attention_mask=False, verbose=False)["input_ids"]:
                if ids:
                    writer.add(ids + end)
            progress.show(writer.documents, writer.tokens)
    return {"documents": writer.documents, "tokens": writer.tokens, "dtype": writer.dtype.name}


def batches(texts: Iterable[str]) -> Iterator[list[str]]:
    """Lists of documents, bounded in number and (but for a single long document) in characters."""
    batch: list[str] = []
    characters = 0
    for text in texts:
        batch.append(text)
        characters += len(text)
        if len(batch) == BATCH_DOCUMENTS or characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


class Progress:
    """A line on stderr every few seconds of long work."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.started = self.shown = time.monotonic()

    def show(self, documents: int, tokens: int) -> None:
        now = time.monotonic()
        if now - self.shown < SECONDS_BETWEEN_LINES:
            return
        self.shown = now
        rate = tokens / (now - self.started)
        print(
            f"{self.name}: {documents:,} documents, {tokens:,} tokens, {rate:,.0f} tokens/s",
            file=sys.stderr,
            flush=True,
        )
