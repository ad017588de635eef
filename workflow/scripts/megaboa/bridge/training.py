"""A rank's training: Bridge's configuration, its callbacks, and its loop.

The CPU backend, where it is needed, must be active before this module is imported.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron.bridge.training import checkpointing, finetune, initialize, pretrain, setup
from megatron.bridge.training.callbacks import Callback
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.utils.cuda_graph import is_full_iteration_cuda_graph

from megaboa import records
from megaboa.bridge import (
    balancing,
    configuration,
    continuation,
    cudnn,
    datasets,
    finetuning,
    forward_steps,
    local_copies,
    parallel_reads,
    prediction,
    process,
    profilers,
    te_mlp,
    trackers,
    validation,
    wheels,
)
from megaboa.bridge.callbacks import CheckpointMarker, EndRecord, Fence, StepWriter
from megaboa.bridge.config_facts import facts_of
from megaboa.bridge.nudge import Nudge
from megaboa.bridge.pace import PaceWriter
from megaboa.bridge.routing_writer import RoutingWriter
from megaboa.bridge.sample_writer import SampleWriter
from megaboa.errors import one_sentence
from megaboa.paths import RunFolder
from megaboa.records import RunSpec
from megaboa.run import checkpoints
from megaboa.store_paths import AttemptFolder, RunStore


@dataclass(frozen=True)
class Rank:
    """What a rank was started for."""

    folder: RunFolder
    store: RunStore
    attempt: AttemptFolder
    wanted: argparse.Namespace

    @property
    def run(self) -> RunSpec:
        return self.folder.run

    @property
    def number(self) -> int:
        return int(os.environ["RANK"])

    @property
    def world_size(self) -> int:
        return int(os.environ["WORLD_SIZE"])

    @property
    def is_last(self) -> bool:
        return self.number == self.world_size - 1


def train(rank: Rank) -> None:
    inputs = configuration.Inputs.read(rank.folder)
    config, changes = _configured(rank, inputs)
    _adapt(config, rank, changes)
    kind = forward_steps.kind_of(config.model, rank.run)
    forward = forward_steps.step_of(kind, rank.run)
    copies = _copies(config, rank)
    callbacks = [*_of_the_run(rank, inputs, forward, copies)]
    if rank.run.is_tuned and config.model.num_moe_experts:
        callbacks.append(balancing.Balancing(config))
        forward = callbacks[-1].install(forward)
    if rank.run.is_tuned and config.model.mtp_num_layers:
        forward = prediction.masked(forward)
    if rank.folder.launch.samples and not rank.wanted.capture:
        samples = SampleWriter(rank.attempt.samples / f"{rank.number}.jsonl", kind.tokens)
        callbacks.append(samples)
        forward = samples.listening(forward)
    callbacks += _records(config, rank, copies)
    tuned = rank.run.is_tuned and config.checkpoint.pretrained_checkpoint != finetuning.NOWHERE
    begin = finetune.finetune if tuned else pretrain.pretrain
    begin(config, forward, callbacks=callbacks)
    if copies:
        copies.forget_at(config.train.train_iters)


def _configured(rank: Rank, inputs: configuration.Inputs) -> tuple[ConfigContainer, list[str]]:
    """Bridge's configuration, and what differs from what was asked for."""
    folder, store, run, wanted = rank.folder, rank.store, rank.run, rank.wanted
    config = configuration.build(run, inputs)
    # A profile reads fewer samples than the run's index is made for.
    cache = store.index_cache if wanted.capture or not folder.index else Path(folder.index.cache)
    load = checkpoints.folder(wanted.parent or store.checkpoints, wanted.resume_from) if wanted.resume_from else None
    configuration.place(config, folder.launch, store, rank.attempt, load, cache)
    changes: list[str] = []
    if run.is_tuned:
        finetuning.begin(config, folder, Path(folder.index.cache), resumes=bool(load))
    if load:
        theirs = continuation.saved_with(config.checkpoint.load)
        continuation.refuse_other_rows(config, theirs)
        changes += continuation.keep_positions(config, theirs)
        if not wanted.parent or run.parent.load.optimizer:
            changes += continuation.keep_buckets(config, theirs)
        if wanted.parent:
            continuation.configure(config, theirs, run.parent, wanted.parent, wanted.resume_from)
            continuation.keep_own_settings(checkpointing, theirs)
    config.train.iterations_to_skip = [*config.train.iterations_to_skip, *wanted.skip]
    if wanted.capture:
        configuration.profile(config, folder.profile)
    if run.device == "cpu":
        from megaboa.bridge import cpu

        cpu.refuse(config)
    with one_sentence():
        if run.device == "cuda" and is_full_iteration_cuda_graph(config.model):
            cudnn.refuse_lengths(facts_of(config, run, folder.launch, folder.profile), cudnn.version())
        profilers.attach_wanted(config, folder.profile.tool if wanted.capture else "none", rank.attempt)
    return config, changes


def _adapt(config: ConfigContainer, rank: Rank, changes: list[str]) -> None:
    """Change what Bridge does in this process; rank 0 says what differs from what was asked for."""
    process.leave_in_time(pretrain)
    parallel_reads.install()
    if not config.checkpoint.async_save:
        process.save_in_foreground()
    wheels.keep_compiled_helpers(initialize)
    missing = wheels.without_missing_kernels(config.model, rank.run.overrides)
    te_mlp.complete(config.model)
    if rank.number == 0:
        wheels.say([*changes, *missing])


def _copies(config: ConfigContainer, rank: Rank) -> local_copies.LocalCopies | None:
    """Copies of the state on the nodes, if they are wanted."""
    wanted = rank.wanted
    if not wanted.local_copies:
        return None
    newer_than = None if wanted.parent else wanted.resume_from  # a parent's settings belong to its checkpoint
    with one_sentence():
        return local_copies.attach(
            config, checkpointing, rank.folder, rank.store, rank.attempt, wanted.local_copies, newer_than
        )


def _of_the_run(
    rank: Rank,
    inputs: configuration.Inputs,
    forward: forward_steps.ForwardStep,
    copies: local_copies.LocalCopies | None,
) -> Iterator[Callback]:
    """The callbacks that take part in the training."""
    run, wanted = rank.run, rank.wanted
    yield EndRecord(rank.attempt, rank.number)
    if run.data.get("reset_attention_mask"):
        yield datasets.MaskFromData()
    if run.data.get("validation_sets") and not wanted.capture:
        yield validation.ValidationSets(run, inputs.corpora, forward)
    if (noise := run.training.get("nudge")) and (wanted.parent or not wanted.resume_from):
        yield Nudge(noise, lambda: copies is not None and copies.taken)


def _records(config: ConfigContainer, rank: Rank, copies: local_copies.LocalCopies | None) -> Iterator[Callback]:
    """The callbacks that record it."""
    launch, store, attempt, wanted = rank.folder.launch, rank.store, rank.attempt, rank.wanted
    if launch.routing and not wanted.capture:
        yield RoutingWriter(attempt.routing / f"{rank.number}.jsonl")
    if wanted.claim and int(os.environ["LOCAL_RANK"]) == 0:
        yield Fence(store.claims, wanted.claim, attempt.stop_now)
    if rank.number == 0:
        saves, background = config.checkpoint.save is not None, config.checkpoint.async_save
        found = records.Found(train_iters=config.train.train_iters, saves=saves, async_save=background)
        records.write(store.found, found)
        yield CheckpointMarker(store.checkpoints)
    if rank.is_last:
        writer = StepWriter(attempt.steps, process.reached)
        yield writer
        writer.follow(setup)
        if copies:
            copies.copied = writer.copied
        if config.logger.mlflow_experiment and not wanted.capture:
            trackers.continue_mlflow_run(store, config.logger.mlflow_tracking_uri)
    asked = launch.recovery and launch.recovery.stragglers
    if asked and asked.measure and rank.world_size > 1 and not wanted.capture:
        yield PaceWriter(attempt)  # comes last, when the checkpoint is marked and its time is recorded
