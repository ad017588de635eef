"""What a rank writes down while it trains: one JSON line per event, through Bridge's callbacks.

The console is no source for this: it drops NaN losses and spreads its lines over ranks.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from megatron.bridge.training.callbacks import Callback, CallbackContext

from megaboa import files
from megaboa.results import AttemptFolder
from megaboa.run import checkpoints
from megaboa.run.claims import newest as newest_claim

FENCE_SECONDS = 5.0


class StepWriter(Callback):
    """Events of the run as the last rank sees them (it holds the last pipeline stage, where the loss is)."""

    def __init__(self, path: Path):
        self._stream = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        self._started = 0.0
        self._lr: float | None = None
        self._last_written = time.time()

    def on_train_start(self, context: CallbackContext) -> None:
        self._write("train_start", context)

    def on_train_step_start(self, context: CallbackContext) -> None:
        self._lr = context.optimizer.param_groups[0]["lr"]
        self._started = time.perf_counter()

    def on_train_step_end(self, context: CallbackContext) -> None:
        losses = {name: float(value) for name, value in (context.loss_dict or {}).items()}
        self._write(
            "step",
            context,
            step=int(context.state.train_state.step) + 1,  # Bridge counts it only after this callback
            seconds=time.perf_counter() - self._started,
            loss=losses.get("lm loss"),
            grad_norm=None if context.grad_norm is None else float(context.grad_norm),
            lr=self._lr,
            tokens=_tokens_per_step(context.state.cfg),
            skipped=bool(context.skipped_iter),
            losses=losses,
        )

    def on_eval_end(self, context: CallbackContext) -> None:
        losses = {name: float(value) for name, value in (context.total_loss_dict or {}).items()}
        end = int(context.state.train_state.consumed_valid_samples)
        self._write("eval", context, losses=losses, samples=[end - _samples_per_evaluation(context.state.cfg), end])

    def on_checkpoint_save(self, context: CallbackContext) -> None:
        self._write("save", context, seconds=time.time() - self._last_written)

    def on_train_end(self, context: CallbackContext) -> None:
        self._write("end", context)

    def _write(self, event: str, context: CallbackContext, **fields: Any) -> None:
        self._last_written = time.time()
        line = {"event": event, "time": self._last_written, "step": context.state.train_state.step, **fields}
        os.write(self._stream, (json.dumps(line, sort_keys=True) + "\n").encode())


class CheckpointMarker(Callback):
    """Rank 0 marks a checkpoint as complete when the save is over on every rank."""

    def __init__(self, folder: Path):
        self._folder = folder

    def on_checkpoint_save(self, context: CallbackContext) -> None:
        checkpoints.mark_complete(self._folder)


class Fence(Callback):
    """Ends a rank whose run has been given to somebody else.

    A node that SLURM has lost sight of may still reach the file system: its ranks must not go on writing.
    """

    def __init__(self, claims: Path, claim: int):
        self._claims, self._claim = claims, claim
        self._looked = time.monotonic()

    def on_train_step_end(self, context: CallbackContext) -> None:
        if time.monotonic() - self._looked < FENCE_SECONDS:
            return
        self._looked = time.monotonic()
        if (newest := newest_claim(self._claims)) > self._claim:
            sys.stderr.write(
                f"megaboa: claim {newest} of this run is newer than ours, {self._claim}: we were given up\n"
            )
            sys.stderr.flush()
            os._exit(1)


class EndRecord(Callback):
    """Every rank says at which step its training ended: the proof of completion for runs that save nothing.

    And how much memory of its GPU was in use at most, in bytes: by tensors, and held for them.
    """

    def __init__(self, attempt: AttemptFolder, rank: int):
        self._path = attempt.end_record(rank)

    def on_train_end(self, context: CallbackContext) -> None:
        files.write_json(self._path, {"step": int(context.state.train_state.step), **_peak_memory()})


def _peak_memory() -> dict[str, int]:
    if not torch.version.cuda or not torch.cuda.is_initialized():
        return {}
    return {"peak_allocated": torch.cuda.max_memory_allocated(), "peak_reserved": torch.cuda.max_memory_reserved()}


def _samples_per_evaluation(config: Any) -> int:
    return config.validation.eval_iters * (config.validation.eval_global_batch_size or config.train.global_batch_size)


def _tokens_per_step(config: Any) -> int:
    return config.train.global_batch_size * config.dataset.seq_length
