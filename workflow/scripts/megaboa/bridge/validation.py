"""Further validation sets. Bridge evaluates one; the others follow, by Bridge's own `evaluate`."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator

import numpy as np
import torch
from megatron.bridge.data.samplers import build_pretraining_data_loader
from megatron.bridge.training.callbacks import Callback, CallbackContext
from megatron.bridge.training.eval import evaluate
from megatron.bridge.training.utils.pg_utils import get_pg_collection
from megatron.core.rerun_state_machine import RerunDataIterator
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.utils import get_model_config
from torch.utils.data import DataLoader

from megaboa.bridge import datasets
from megaboa.metrics import VALIDATION_SET
from megaboa.records import LM_LOSS, RunSpec


class ValidationSets(Callback):
    """Adds a loss `valid/<name>` to those of every evaluation, so that Bridge logs it as it logs the main one.

    It belongs on every rank, and before whatever writes the losses down. Each evaluation reads the same first samples
    of a set. Nothing else changes: a run trains bit for bit as it does without further sets.
    """

    def __init__(self, run: RunSpec, corpora: datasets.Corpora, forward_step: Callable):
        self._run, self._corpora, self._forward_step = run, corpora, forward_step
        self._loaders: dict[str, DataLoader] = {}

    def on_train_start(self, context: CallbackContext) -> None:
        config, group = context.state.cfg, get_pg_collection(context.model).dp
        sets = datasets.build_validation_sets(config, self._run, self._corpora)
        self._loaders = {
            name: build_pretraining_data_loader(
                dataset,
                consumed_samples=0,
                dataloader_type="single",
                micro_batch_size=config.validation.eval_micro_batch_size or config.train.micro_batch_size,
                num_workers=config.dataset.num_workers,
                data_sharding=config.dataset.data_sharding,
                pin_memory=config.dataset.pin_memory,
                data_parallel_rank=group.rank(),
                data_parallel_size=group.size(),
            )
            for name, dataset in sets.items()
        }

    def on_eval_end(self, context: CallbackContext) -> None:
        for name, loader in self._loaders.items():
            with _nothing_else_changed(context):
                losses, _, _ = evaluate(
                    context.state,
                    self._forward_step,
                    RerunDataIterator(iter(loader)),
                    context.model,
                    None,
                    get_model_config(context.model[0]),
                )
            if losses and LM_LOSS in losses:  # only ranks of the last pipeline stage have losses
                context.total_loss_dict[f"{VALIDATION_SET}{name}"] = losses[LM_LOSS]


@contextlib.contextmanager
def _nothing_else_changed(context: CallbackContext) -> Iterator[None]:
    """Restore everything that `evaluate` counts or switches, and all random number states."""
    train_state, tracker = context.state.train_state, get_cuda_rng_tracker()
    consumed = train_state.consumed_valid_samples
    states = random.getstate(), np.random.get_state(), torch.get_rng_state(), torch.cuda.get_rng_state()
    tracked = tracker.get_states()
    try:
        yield
    finally:
        train_state.consumed_valid_samples = consumed
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        torch.cuda.set_rng_state(states[3])
        tracker.set_states(tracked)
        for chunk in context.model:
            chunk.eval()
