"""Recording of a rank's training: one JSON line per event, through Bridge's callbacks.

The console can't be the source, because it drops NaN losses and spreads its lines over ranks.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from megatron.bridge.training.callbacks import Callback, CallbackContext
from megatron.core.num_microbatches_calculator import get_current_running_global_batch_size

from megaboa import files
from megaboa.check import flops
from megaboa.check.facts import Facts, Model, Training
from megaboa.records import (
    LM_LOSS,
    Evaluated,
    Phase,
    RankEnd,
    Saved,
    Step,
    StepEvent,
    Tested,
    TrainEnd,
    TrainStart,
    line,
    write,
)
from megaboa.run import checkpoints
from megaboa.run.claims import newest as newest_claim
from megaboa.store_paths import AttemptFolder

FENCE_SECONDS = 5.0
# Messages of Bridge (training/setup.py), and the phase that ends with each.
SETUP = {
    "after megatron is initialized": "connected",
    "after model, optimizer, and learning rate scheduler are built": "model",
}


class StepWriter(Callback):
    """Writes the run's events as seen by the last rank, which holds the last pipeline stage, where the loss is."""

    def __init__(self, path: Path, reached: Mapping[str, float] | None = None):
        """`reached`: earlier phases that this process has completed, with their times."""
        self._stream = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        files.share(path)
        self._started = self._evaluation_started = 0.0
        self._lr: float | None = None
        for phase, when in (reached or {}).items():
            self._write(Phase(phase=phase, time=when))
        self._write(Phase(phase="configured"))

    def follow(self, setup: ModuleType) -> None:
        """Note the phases of Bridge's setup, from the messages of `megatron.bridge.training.setup` on all ranks."""
        say = setup.barrier_and_log

        def heard(text: str) -> None:
            say(text)
            if phase := SETUP.get(text):
                self._write(Phase(phase=phase))

        setup.barrier_and_log = heard

    def on_data_init_start(self, context: CallbackContext) -> None:
        self._write(Phase(phase="built"))  # the model and its optimizer are built, and a checkpoint is loaded

    def on_train_start(self, context: CallbackContext) -> None:
        gpu = torch.cuda.get_device_name() if torch.version.cuda and torch.cuda.is_initialized() else None
        ranks, flops = int(os.environ.get("WORLD_SIZE", 1)), _flops_per_token(context.state.cfg)
        self._write(TrainStart(step=_step(context), world_size=ranks, gpu=gpu, flops_per_token=flops))

    def on_train_step_start(self, context: CallbackContext) -> None:
        self._lr = context.optimizer.param_groups[0]["lr"]
        self._started = time.perf_counter()

    def on_train_step_end(self, context: CallbackContext) -> None:
        losses = _floats(context.loss_dict)
        step = Step(
            step=_step(context) + 1,  # Bridge only increments it after this callback
            seconds=time.perf_counter() - self._started,
            loss=losses.get(LM_LOSS),
            grad_norm=None if context.grad_norm is None else float(context.grad_norm),
            lr=self._lr,
            tokens=_tokens_per_step(context.state.cfg),
            skipped=bool(context.skipped_iter),
            losses=losses,
        )
        self._write(step)

    def on_eval_start(self, context: CallbackContext) -> None:
        self._evaluation_started = time.time()

    def on_eval_end(self, context: CallbackContext) -> None:
        end = int(context.state.train_state.consumed_valid_samples)
        samples = (end - _samples_per_evaluation(context.state.cfg), end)
        seconds, losses = time.time() - self._evaluation_started, _floats(context.total_loss_dict)
        self._write(Evaluated(step=_step(context), seconds=seconds, losses=losses, samples=samples))

    def on_test_start(self, context: CallbackContext) -> None:
        self._evaluation_started = time.time()

    def on_test_end(self, context: CallbackContext) -> None:
        seconds, losses = time.time() - self._evaluation_started, _floats(context.total_loss_dict)
        self._write(Tested(step=_step(context), seconds=seconds, losses=losses))

    def on_checkpoint_save(self, context: CallbackContext) -> None:
        self._write(Saved(step=_step(context), seconds=time.time() - self._last_written))

    def copied(self, step: int, seconds: float) -> None:
        """Record a save to copies on the nodes (`bridge/local_copies.py`).

        Bridge's callback only covers checkpoints.
        """
        self._write(Saved(step=step, seconds=seconds, local=True))

    def on_train_end(self, context: CallbackContext) -> None:
        self._write(TrainEnd(step=_step(context)))

    def _write(self, event: StepEvent) -> None:
        self._last_written = event.time
        files.write_all(self._stream, line(event) + "\n")


class CheckpointMarker(Callback):
    """Marks a checkpoint as complete, on rank 0, when the save is finished on every rank."""

    def __init__(self, folder: Path):
        self._folder = folder

    def on_checkpoint_save(self, context: CallbackContext) -> None:
        checkpoints.mark_complete(self._folder)


class Fence(Callback):
    """Ends a rank whose run another process has claimed, and receives stop requests if signals don't arrive.

    A node that the scheduler has lost may still reach the file system, but its ranks must stop writing. One rank per
    node checks this; when it exits, no other rank completes a step or starts a save, because these synchronize all
    ranks.
    """

    def __init__(self, claims: Path, claim: int, stop_now: Path):
        self._claims, self._claim, self._stop_now = claims, claim, stop_now
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
        if self._stop_now.exists():
            # Act as if the supervisor's signal had arrived: after each step Bridge asks all ranks whether one has
            # received it, so that they save and end at the same step, no matter which of them saw the file first.
            signal.raise_signal(signal.SIGTERM)


class EndRecord(Callback):
    """Records at which step every rank's training ended, which proves completion for runs that save nothing, and the
    peak of GPU memory in bytes: allocated by tensors, and reserved."""

    def __init__(self, attempt: AttemptFolder, rank: int):
        self._path = attempt.end_record(rank)

    def on_train_end(self, context: CallbackContext) -> None:
        end = RankEnd(step=_step(context))
        if torch.version.cuda and torch.cuda.is_initialized():
            allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
            end = replace(end, peak_allocated=allocated, peak_reserved=reserved)
        write(self._path, end)


def _step(context: CallbackContext) -> int:
    return int(context.state.train_state.step)


def _floats(losses: Mapping[str, Any] | None) -> dict[str, float]:
    return {name: float(value) for name, value in (losses or {}).items()}


def _flops_per_token(config: Any) -> float | None:
    """Bridge's count for samples of full length; None if it can't count, which must not end the training."""
    with contextlib.suppress(Exception):
        if getattr(config.model, "vision_config", None) is not None:
            return None  # Bridge doesn't count the vision tower
        from megatron.bridge.training.utils.flop_utils import num_floating_point_operations

        counted = float(num_floating_point_operations(config, 1))
        if config.peft is not None:  # Bridge also counts gradients of frozen weights
            counted = flops.of_frozen(_sizes(config), counted)
        return counted / config.dataset.seq_length
    return None


def _sizes(config: Any) -> Facts:
    """The sizes that the attention scores' operations depend on."""
    model = config.model
    sizes = Model(layers=model.num_layers, heads=model.num_attention_heads, head_dim=model.kv_channels)
    return Facts(model=sizes, training=Training(seq_length=config.dataset.seq_length))


def _samples_per_evaluation(config: Any) -> int:
    return config.validation.eval_iters * (config.validation.eval_global_batch_size or config.train.global_batch_size)


def _tokens_per_step(config: Any) -> int:
    """Tokens of the step just done. The size of the batch may vary in some versions of Megatron."""
    return get_current_running_global_batch_size() * config.dataset.seq_length
