"""The course of a run: its steps, what happens at some of them, what it starts from, and when it is profiled."""

from __future__ import annotations

from megaboa.check.facts import Facts
from megaboa.check.rule import Broken, warning

ON_GPUS = {"nsys": "nsys sees the steps of a GPU only", "memory": "snapshots are of CUDA's allocator"}


def warmup_ends_before_the_decay(f: Facts) -> Broken | None:
    """Warm-up is shorter than the decay (which ends with the run, unless told otherwise);
    optimizer_param_scheduler.py asserts it after the model was built."""
    end = f.training.decay_iters or f.training.iters
    if end is None or f.training.warmup_iters < end:
        return None
    text = f"{f.training.warmup_iters} steps of warm-up, and the decay ends at step {end}"
    return Broken("schedule.warmup_iters", text, (end - 1,))


def wsd_decays_after_warmup(f: Facts) -> Broken | None:
    """WSD's decay begins when warm-up is over: a longer one lets the rate fall there, at once, to where the decay would
    be by then. Where no length is set, which NVIDIA's own recipes do, Bridge takes that of the run."""
    training, key = f.training, "schedule.wsd_decay_iters"
    length, end = training.wsd_decay_iters, training.decay_iters or training.iters
    if training.decay != "WSD" or end is None or training.warmup_iters >= end:
        return None
    room = end - training.warmup_iters
    if length is None:
        text = f"null with schedule.decay: WSD, so the decay lasts as long as the run ({end} steps), and the rate is "
        text += "never constant" + (": it drops at once after warm-up" if training.warmup_iters else "")
        return warning(key, text, (min(room, max(1, end // 10)),))
    if length <= room:
        return None
    text = f"{length}, and the decay has {room} steps, from the end of warm-up to step {end}: the rate would drop there"
    return Broken(key, text, (room,))


def inverse_square_root_follows_warmup(f: Facts) -> Broken | None:
    """The inverse square root is of the samples since the first, in units of warm-up: without one the rate falls by the
    root of the batch size after the first step."""
    training = f.training
    if training.decay != "inverse-square-root" or training.warmup_iters or (training.gbs or 0) < 4:
        return None
    text = f"0 with schedule.decay: inverse-square-root: step 2 has the rate lr / sqrt({training.gbs})"
    return warning("schedule.warmup_iters", text, (1,))


def weight_decay_keeps_to_its_style(f: Facts) -> Broken | None:
    """Weight decay that changes rises, by `linear` or `cosine`: optimizer_param_scheduler.py asserts it in the first
    step. With one value such a style does nothing, as where `optimizer.weight_decay` replaces both ends."""
    first, last, style = f.training.first_weight_decay, f.training.last_weight_decay, f.training.weight_decay_style
    if first is None or last is None or (first == last and style == "constant"):
        return None
    key, ends = "scheduler.weight_decay_incr_style", "scheduler.start_weight_decay and end_weight_decay"
    if last < first:
        return Broken("scheduler.end_weight_decay", f"{last:g}, less than at the start ({first:g})", (first,))
    if style == "constant":
        text = f"constant, and weight decay begins with {first:g} and ends with {last:g}"
        return Broken(key, text, ("linear", "cosine"))
    if first < last:
        return None
    return warning(key, f"{style}, and weight decay is {first:g} from beginning to end: set {ends} by overrides")


def checkpoints_come_before_the_end(f: Facts) -> Broken | None:
    """A save interval longer than the run saves the last step only: after a failure it starts from step 0."""
    interval, start, iters = f.training.save_interval, f.training.steps_before, f.training.iters
    if not interval or iters is None or (start // interval + 1) * interval <= iters:
        return None
    steps = f"steps {start + 1} to {iters}" if start else f"a run of {iters} steps"
    said = f"{interval} in {steps} saves only the last"
    return warning("checkpoint.save_interval", said, (max(1, (iters - start) // 2),))


def copies_on_nodes_can_be_resumed(f: Facts) -> Broken | None:
    """Copies on nodes (checkpoint.local) are of what a rank can save and load for itself, between checkpoints; the
    partner is another node."""
    every, interval, key = f.training.copied_every, f.training.save_interval, "checkpoint.local"
    if every is None:
        return None
    if f.training.task != "pretrain":
        return Broken(key, f"set with task: {f.training.task}, which resumes from checkpoints alone", ("null",))
    if f.layout.fsdp != "none":
        return Broken(key, f"set with parallel.fsdp: {f.layout.fsdp}, whose state no rank saves for itself", ("null",))
    if f.training.is_layer_wise:
        return Broken(key, f"set with the optimizer {f.training.optimizer}, which saves files of its own", ("null",))
    if interval == 0:
        text = "0 with checkpoint.local: copies need a checkpoint to fall back on"
        return Broken("checkpoint.save_interval", text, (every + 1,))
    if interval and every >= interval:
        text = f"{every}, and every {interval} steps a checkpoint is saved anyway"
        return Broken("checkpoint.local.every", text, (interval // 2 or "null",))
    if f.training.copied_to_partner and f.cluster.nodes == 1:
        return Broken("checkpoint.local.partner", "true with one node, which has no partner", ("false",))
    return None


def tokens_are_in_the_vocabulary(f: Facts) -> Broken | None:
    """The model's vocabulary holds the tokenizer's: setup.py refuses a smaller one, and a token beyond it would read
    memory that isn't the embedding's."""
    model = f.model
    if model.vocab_size is None or model.tokenizer_vocab is None or model.tokenizer_vocab <= model.vocab_size:
        return None
    text = f"the tokenizer has {model.tokenizer_vocab} tokens, the model's vocabulary {model.vocab_size}"
    return Broken("model.vocab_size", text, (model.tokenizer_vocab,))


def embeddings_are_tied_as_in_the_checkpoint(f: Facts) -> Broken | None:
    """An imported model ties its embeddings as the checkpoint does: otherwise the output layer is missing, or thrown
    away."""
    model = f.model
    if not model.pretrained or model.tied is None or model.source_tied is None or model.tied == model.source_tied:
        return None
    return Broken(
        "model.share_embeddings_and_output_weights",
        f"{str(model.tied).lower()}, and the checkpoint's tie_word_embeddings is {str(model.source_tied).lower()}",
        (str(model.source_tied).lower(),),
    )


def profiler_has_a_gpu(f: Facts) -> Broken | None:
    """nsys and memory snapshots need a GPU: on the CPU there is nothing to record."""
    why = ON_GPUS.get(f.training.profiler)
    if why is None or f.cluster.device == "cuda":
        return None
    text = f"{f.training.profiler} has nothing to record with device: {f.cluster.device}: {why}"
    return Broken("profile.tool", text, ("pytorch", "viztracer"))


def nsys_is_at_hand(f: Facts) -> Broken | None:
    """Ranks that are captured find nsys on their PATH. Only checked if they use this machine's programs: a cluster's
    nodes may have others.
    """
    if f.training.profiler != "nsys" or f.cluster.has_nsys is not False:
        return None
    text = "there is no nsys on the PATH here: if the nodes have none either, the capture ends at once"
    return warning("profile.tool", text, ("pytorch",))


def profiled_steps_begin_with_the_first(f: Facts) -> Broken | None:
    """Steps count from 1: for an earlier one Bridge captures nothing, or refuses to start."""
    begin, end = f.training.profile_steps
    if f.training.profiler == "none" or begin >= 1:
        return None
    return Broken("profile.steps", f"[{begin}, {end}]: there is no step {begin}", ([1, max(end, 2)],))


def profiled_steps_are_in_the_run(f: Facts) -> Broken | None:
    """The profiled steps are steps of the run; its last step may be the last that is profiled."""
    iters, (begin, end) = f.training.iters, f.training.profile_steps
    if f.training.profiler == "none" or iters is None or end <= iters + 1:
        return None
    last = iters + 1
    return Broken(
        "profile.steps", f"[{begin}, {end}] in a run of {iters} steps", ([max(last - (end - begin), 1), last],)
    )


def profiled_ranks_are_in_the_run(f: Facts) -> Broken | None:
    """Profiled ranks exist: for others nothing is written."""
    world, ranks = f.layout.world_size, f.training.profile_ranks
    beyond = [rank for rank in ranks if world is not None and rank >= world]
    if f.training.profiler == "none" or not beyond:
        return None
    return Broken(
        "profile.ranks", f"{beyond} of {world} ranks", ([rank for rank in ranks if rank < (world or 0)] or [0],)
    )


def nsys_goes_without_fault_tolerance(f: Facts) -> Broken | None:
    """Nsight Systems and the fault tolerance package exclude each other: Bridge's plugins switch nsys off, with a
    warning only."""
    if not (f.training.profiler == "nsys" or f.profiling.nsys) or not f.training.fault_tolerance:
        return None
    return warning("ft.enable_ft_package", "true with the nsys profiler, which Bridge then switches off", (False,))


def nsys_is_around_the_ranks(f: Facts) -> Broken | None:
    """Bridge only marks the steps for nsys: without `nsys profile` around the rank nothing is written."""
    if not f.profiling.nsys:
        return None
    text = "true while training, where no nsys is around the ranks: set profile.tool: nsys instead"
    return warning("profiling.use_nsys_profiler", text, (False,))


def one_profiler_at_a_time(f: Facts) -> Broken | None:
    """Not nsys and PyTorch's profiler in one process; ProfilingConfig.finalize asserts it."""
    if not (f.profiling.nsys and f.profiling.pytorch):
        return None
    return Broken("profiling.use_pytorch_profiler", "true together with profiling.use_nsys_profiler: true", (False,))


def profiler_is_started_and_stopped(f: Facts) -> Broken | None:
    """Bridge's profiling during training covers at least one step and ends before the run: otherwise it is never
    stopped, and silently writes nothing.
    """
    profiling, iters = f.profiling, f.training.iters
    if not profiling.is_on:
        return None
    begin, end = profiling.start, profiling.end
    if end <= begin:
        return warning("profiling.profile_step_end", f"{end} is not after profile_step_start: {begin}", (begin + 1,))
    if iters is not None and end > iters:
        return warning("profiling.profile_step_end", f"{end} in a run of {iters} steps", (iters,))
    return None


def profiler_is_on_a_rank(f: Facts) -> Broken | None:
    """Bridge's profiling during training has a rank of the run. An empty list means every rank, but no rank for the
    memory history: then it silently records nothing.
    """
    profiling, world = f.profiling, f.layout.world_size
    if not profiling.is_on:
        return None
    if profiling.memory and not profiling.ranks:
        text = "[] with record_memory_history, which then records nothing"
        return warning("profiling.profile_ranks", text, ([0],))
    if world is not None and profiling.ranks and min(profiling.ranks) >= world:
        return warning("profiling.profile_ranks", f"{list(profiling.ranks)} of {world} ranks", ([0],))
    return None


RULES = (
    warmup_ends_before_the_decay,
    wsd_decays_after_warmup,
    inverse_square_root_follows_warmup,
    weight_decay_keeps_to_its_style,
    checkpoints_come_before_the_end,
    copies_on_nodes_can_be_resumed,
    tokens_are_in_the_vocabulary,
    embeddings_are_tied_as_in_the_checkpoint,
)
# Of the profile stage, and Bridge's own where an override or a recipe switches one on while training.
PROFILERS = (
    profiler_has_a_gpu,
    nsys_is_at_hand,
    profiled_steps_begin_with_the_first,
    profiled_steps_are_in_the_run,
    profiled_ranks_are_in_the_run,
    nsys_goes_without_fault_tolerance,
    nsys_is_around_the_ranks,
    one_profiler_at_a_time,
    profiler_is_started_and_stopped,
    profiler_is_on_a_rank,
)
