"""Recording of samples: which ones every step reads, on the ranks of a run whose data order is compared with another's.

A digest of each sample's tokens is recorded, as the model gets them, and not a number in the index. So another index,
another shuffle or another text shows too.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.bridge.training.callbacks import Callback, CallbackContext
from megatron.bridge.training.utils.flop_utils import get_model_chunk_vp_stage
from megatron.core import parallel_state

DIGEST_BYTES = 8


class SampleWriter(Callback):
    """Writes one line per step: a digest of each sample that this rank read for training."""

    def __init__(self, path: Path, tokens: str = "tokens"):
        """`tokens`: key of a batch for the model's input."""
        self._path, self._tokens = path, tokens
        self._read: list[str] = []

    def on_train_start(self, context: CallbackContext) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)

    def on_train_step_end(self, context: CallbackContext) -> None:
        if not self._read:  # no data on this rank, or everything in a CUDA graph
            return
        line = {"step": int(context.state.train_state.step) + 1, "samples": self._read}
        with self._path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line) + "\n")
        self._read = []

    def listening(self, forward_step: Callable[..., Any]) -> Callable[..., Any]:
        """The forward step, with everything that it reads recorded."""

        @functools.wraps(forward_step)
        def step(state: Any, data_iterator: Any, model: Any, *arguments: Any, **named: Any) -> Any:
            if data_iterator is not None and model.training and _reads_for_all(model):
                data_iterator = _Listened(data_iterator, self._read, self._tokens)
            return forward_step(state, data_iterator, model, *arguments, **named)

        return step


class _Listened:
    """An iterator of batches that records each one."""

    def __init__(self, batches: Iterator[dict[str, Any]], read: list[str], tokens: str):
        self._batches, self._read, self._tokens = batches, read, tokens

    def __iter__(self) -> _Listened:
        return self

    def __next__(self) -> dict[str, Any]:
        batch = next(self._batches)
        self._read += [digest(row) for row in batch[self._tokens]]
        return batch


def digest(tokens: torch.Tensor) -> str:
    text = tokens.detach().to("cpu", torch.int64).contiguous().numpy().tobytes()
    return hashlib.blake2b(text, digest_size=DIGEST_BYTES).hexdigest()


def _reads_for_all(model: Any) -> bool:
    """Whether this rank and chunk is the one that records, as others read the same samples."""
    return (
        parallel_state.get_tensor_model_parallel_rank() == 0
        and parallel_state.get_context_parallel_rank() == 0
        and parallel_state.get_pipeline_model_parallel_rank() == 0
        and not get_model_chunk_vp_stage(model)
    )
