"""One rank of a run: read its specification, build Bridge's configuration, train."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megaboa import files, records
from megaboa.bridge import process, wheels
from megaboa.check.facts import Facts
from megaboa.check.graphs import full_graph_has_whole_blocks_of_attention
from megaboa.check.rule import finding
from megaboa.errors import InputError, one_sentence
from megaboa.paths import RunFolder
from megaboa.records import Identity
from megaboa.run import checkpoints, gpu_sampler
from megaboa.run.identity import identity_of
from megaboa.store_paths import AttemptFolder, RunStore

REPLAYS_ALL_LENGTHS = (9, 15, 1)  # version of cuDNN
WORD_SECONDS = 0.5  # between two looks by a rank


def main() -> None:
    wanted = arguments()
    store, attempt = RunStore(wanted.store), AttemptFolder(wanted.attempt)
    folder = RunFolder(wanted.run, files.read_json(attempt.asked))
    process.reached["started"] = process.started()
    process.prepare(folder.run.device, folder.launch.cpus_per_rank)
    process.reached["imported"] = time.time()
    if identity_of(folder) != records.read(Identity, store.identity):
        sys.exit(f"what run {folder.name} reads (corpora, model, image) was made again while it started; call again")
    if wanted.verified:
        wait_for_word(wanted.verified)
        process.reached["verified"] = time.time()
    if not wanted.capture:  # not under a profiler, which would record the sampler too
        gpu_sampler.start(folder, attempt)
    train(folder, store, attempt, wanted)


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, required=True, help="the run's folder below results/")
    parser.add_argument("--store", type=Path, required=True, help="the run's payload folder")
    parser.add_argument("--attempt", type=Path, required=True, help="the attempt's folder in the store")
    parser.add_argument("--claim", type=int, default=0, help="number of the supervisor's claim; 0: it has none")
    parser.add_argument("--resume-from", type=int, default=0, help="iteration of the checkpoint to continue from")
    parser.add_argument("--parent", type=Path, help="folder of the parent's checkpoints, where that one is among them")
    parser.add_argument("--verified", type=Path, help="file that is empty until that checkpoint may be loaded")
    parser.add_argument("--local-copies", metavar="NAME", help="copy the state to the nodes, under this name")
    parser.add_argument("--capture", action="store_true", help="profile the first steps instead of training")
    parser.add_argument("--skip", action="append", default=[], help="steps whose batches are left out, as in 40-45")
    return parser.parse_args(words)


def wait_for_word(path: Path) -> None:
    """Wait until the file has content. Its mere existence may be reported late by a file server."""
    while not path.read_text():
        time.sleep(WORD_SECONDS)


def steps_of(ranges: list[str]) -> list[int]:
    """`40-42` as [40, 41, 42]."""
    bounds = [tuple(map(int, text.split("-"))) for text in ranges]
    return [step for first, last in bounds for step in range(first, last + 1)]


def train(folder: RunFolder, store: RunStore, attempt: AttemptFolder, wanted: argparse.Namespace) -> None:
    from megatron.bridge.training import checkpointing, initialize, setup
    from megatron.bridge.training.finetune import finetune
    from megatron.bridge.training.pretrain import pretrain
    from megatron.bridge.utils.cuda_graph import is_full_iteration_cuda_graph

    from megaboa.bridge import (
        configuration,
        continuation,
        datasets,
        finetuning,
        forward_steps,
        local_copies,
        parallel_reads,
        profilers,
        validation,
    )
    from megaboa.bridge.callbacks import CheckpointMarker, EndRecord, Fence, StepWriter
    from megaboa.bridge.config_facts import facts_of
    from megaboa.bridge.nudge import Nudge
    from megaboa.bridge.pace import PaceWriter
    from megaboa.bridge.routing_writer import RoutingWriter
    from megaboa.bridge.sample_writer import SampleWriter

    run, inputs = folder.run, configuration.Inputs.read(folder)
    config = configuration.build(run, inputs)
    # A profile reads fewer samples than the run's index is made for.
    cache = store.index_cache if wanted.capture or not folder.index else Path(folder.index.cache)
    load = checkpoints.folder(wanted.parent or store.checkpoints, wanted.resume_from) if wanted.resume_from else None
    configuration.place(config, folder.launch, store, attempt, load, cache)
    changes: list[str] = []  # of what was asked for
    if run.is_tuned:
        finetuning.begin(config, folder, Path(folder.index.cache), resumes=bool(load))
    if load:
        theirs = continuation.saved_with(config.checkpoint.load)
        continuation.refuse_other_rows(config, theirs)
        if not wanted.parent or run.parent.load.optimizer:
            changes += continuation.keep_buckets(config, theirs)
        if wanted.parent:
            continuation.configure(config, theirs, run.parent, wanted.parent, wanted.resume_from)
            continuation.keep_own_settings(checkpointing, theirs)
    config.train.iterations_to_skip = [*config.train.iterations_to_skip, *steps_of(wanted.skip)]
    if wanted.capture:
        configuration.profile(config, folder.profile)
    if run.device == "cpu":
        from megaboa.bridge import cpu

        cpu.refuse(config)
    with one_sentence():
        if run.device == "cuda" and is_full_iteration_cuda_graph(config.model):
            refuse_lengths(facts_of(config, run, folder.launch, folder.profile), cudnn_version())
        profilers.attach_wanted(config, folder.profile.tool if wanted.capture else "none", attempt)
    kind = forward_steps.kind_of(config.model, run)
    forward = forward_step = forward_steps.step_of(kind, run)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    process.leave_in_time(sys.modules[pretrain.__module__])
    parallel_reads.install()
    if not config.checkpoint.async_save:
        process.save_in_foreground()
    wheels.keep_compiled_helpers(initialize)
    changes += wheels.without_missing_kernels(config.model, run.overrides)
    if rank == 0:
        wheels.say(changes)

    copies = None
    if name := wanted.local_copies:
        with one_sentence():
            newer_than = None if wanted.parent else wanted.resume_from  # a parent's settings belong to its checkpoint
            copies = local_copies.attach(config, checkpointing, folder, store, attempt, name, newer_than)
    callbacks = [EndRecord(attempt, rank)]
    if run.data.get("reset_attention_mask"):
        callbacks.append(datasets.MaskFromData())
    if run.data.get("validation_sets") and not wanted.capture:
        callbacks.append(validation.ValidationSets(run.data, inputs.corpora, forward_step))
    if (noise := run.training.get("nudge")) and (wanted.parent or not wanted.resume_from):
        callbacks.append(Nudge(noise, lambda: copies is not None and copies.taken))
    if folder.launch.samples and not wanted.capture:
        samples = SampleWriter(attempt.samples / f"{rank}.jsonl", kind.tokens)
        callbacks.append(samples)
        forward = samples.listening(forward)
    if folder.launch.routing and not wanted.capture:
        callbacks.append(RoutingWriter(attempt.routing / f"{rank}.jsonl"))
    if wanted.claim and int(os.environ["LOCAL_RANK"]) == 0:
        callbacks.append(Fence(store.claims, wanted.claim, attempt.stop_now))
    if rank == 0:
        saves, background = config.checkpoint.save is not None, config.checkpoint.async_save
        found = records.Found(train_iters=config.train.train_iters, saves=saves, async_save=background)
        records.write(store.found, found)
        callbacks.append(CheckpointMarker(store.checkpoints))
    if rank == world_size - 1:
        writer = StepWriter(attempt.steps, process.reached)
        callbacks.append(writer)
        writer.follow(setup)
        if copies:
            copies.copied = writer.copied
        if config.logger.mlflow_experiment and not wanted.capture:
            continue_mlflow_run(store, config.logger.mlflow_tracking_uri)
    asked = folder.launch.recovery and folder.launch.recovery.stragglers
    if asked and asked.measure and world_size > 1 and not wanted.capture:
        callbacks.append(PaceWriter(attempt))  # comes last, when the checkpoint is marked and its time is recorded
    begin = finetune if run.is_tuned and config.checkpoint.pretrained_checkpoint != finetuning.NOWHERE else pretrain
    begin(config, forward, callbacks=callbacks)
    if copies:
        copies.forget_at(config.train.train_iters)


def cudnn_version() -> tuple[int, ...] | None:
    """Version of the cuDNN that Transformer Engine has loaded, which may differ from PyTorch's."""
    if not wheels.is_installed("transformer_engine_torch"):
        return None
    from transformer_engine.pytorch.utils import get_cudnn_version

    return get_cudnn_version()


def refuse_lengths(facts: Facts, here: tuple[int, ...] | None) -> None:
    """Refuse sequence lengths that this cuDNN can't replay. Preflight could only warn, because it doesn't know the
    version.

    With an older one the run would end in an illegal memory access or, even worse, train with wrong gradients.
    """
    broken = full_graph_has_whole_blocks_of_attention(facts)
    if broken and here and here < REPLAYS_ALL_LENGTHS:
        found = finding(full_graph_has_whole_blocks_of_attention, broken)
        raise InputError(f"{found}; here it is {'.'.join(map(str, here))}")


def continue_mlflow_run(store: RunStore, tracking_uri: str | None) -> None:
    """Let Bridge's logger continue the previous attempt's MLflow run instead of starting a new one.

    Bridge logs its whole configuration as parameters, and MLflow refuses changes to them (such as what is loaded), so
    existing ones stay as they are. For W&B, the environment makes all attempts one run (run/command.py).
    """
    import mlflow

    place = files.digest(tracking_uri or os.environ.get("MLFLOW_TRACKING_URI"))  # the address may contain a password
    earlier = files.read_json(store.mlflow_run) if store.mlflow_run.exists() else None
    if earlier and earlier["place"] == place:
        os.environ["MLFLOW_RUN_ID"] = earlier["run_id"]
    start_run, log_params = mlflow.start_run, mlflow.log_params

    def start(*args: Any, **kwargs: Any) -> Any:
        run = start_run(*args, **kwargs)
        files.write_json(store.mlflow_run, {"place": place, "run_id": run.info.run_id})
        return run

    def log_new(params: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        known = mlflow.active_run().data.params
        return log_params({name: value for name, value in params.items() if name not in known}, *args, **kwargs)

    mlflow.start_run, mlflow.log_params = start, log_new
