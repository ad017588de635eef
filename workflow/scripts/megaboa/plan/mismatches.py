"""What speaks against continuing a run from a checkpoint: another model, course or state; and what to warn of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from megaboa.blends import documents_of_set, in_shares, named, shares_of_splits, split_blends, validation_sets
from megaboa.check.learning_rate import Schedule
from megaboa.config.problems import show
from megaboa.layout import NAMES, Layout
from megaboa.plan.parent_runs import ParentRun
from megaboa.plan.plan import Run
from megaboa.records import Identity, RunSpec, Tree, parse, read
from megaboa.store_paths import RunStore

# Keys that define a model, regardless of its initial weights.
_SAME_MODEL = ("config", "hf", "revision", "tokenizer", "recipe")
ENDING = ("linear", "cosine", "WSD")  # schedules whose rate depends on the step at which they end

Mismatch = tuple[tuple[str, ...], str]  # a key, and what is wrong with it


def mismatches(parent: ParentRun, run: Run, step: int) -> list[Mismatch]:
    """Why a run can't continue from this checkpoint: keys and problems."""
    found = list(_of_the_model(parent, run))
    if parent.run.has_adapters or run.run.is_tuned:
        return found
    return [*found, *_of_the_course(parent, run, step), *_of_the_state(parent, run, step)]


def _of_the_model(parent: ParentRun, run: Run) -> Iterator[Mismatch]:
    if difference := model_difference(parent.run.model, run.run.model):
        yield ("continue_from",), f"{parent.name} has another model: {difference}"
    if parent.run.has_adapters:
        message = (
            f"{parent.name} trained adapters (task: {parent.run.task}), and its checkpoints hold nothing else: export "
            "it, and name the exported folder as models.<name>.hf"
        )
        yield ("continue_from",), message


def _of_the_course(parent: ParentRun, run: Run, step: int) -> Iterator[Mismatch]:
    """Of steps and samples."""
    last = run.run.training.get("train_iters")
    if last is not None and last <= step:
        saved = [one for version in (parent, *parent.earlier) for one in version.kept or () if one < last]
        remedy = f", or continue from an earlier checkpoint (@{max(saved)})" if saved else ""
        message = (
            f"{last} is the step at which the run ends, and it begins after step {step} of {parent.name}: raise "
            f"it{remedy}"
        )
        yield ("training", "train_iters"), message
    batch, before = (one.training.get("global_batch_size") for one in (run.run, parent.run))
    if batch and before and batch < before:
        message = (
            f"{batch} is less than the {before} of {parent.name}, which has read samples that this run doesn't have: "
            f"set it to {before} or more"
        )
        yield ("training", "global_batch_size"), message


def _of_the_state(parent: ParentRun, run: Run, step: int) -> Iterator[Mismatch]:
    """Of what the ranks have saved."""
    own, theirs, load = run.run, parent.run, run.config.load.optimizer
    names = [one.optimizer.get("name") for one in (own, theirs)]
    if load and None not in names and names[0] != names[1]:
        message = f"{names[0]} can't take the state of {names[1]}, which {parent.name} has: set load.optimizer: false"
        yield ("optimizer", "name"), message
    spread = [one.parallel.get("ep") for one in (own, theirs)]
    if load and names == ["muon", "muon"] and None not in spread and (spread[0] > 1) != (spread[1] > 1):
        message = (
            f"muon keeps experts that are spread over ranks apart, and only one of this run and {parent.name} has any: "
            "set it above 1 in both or in neither, or set load.optimizer: false"
        )
        yield ("parallel", "ep"), message
    if load:
        yield from optimizer_mismatches(parent.name, own, theirs)
    kinds = [one.parallel.get("fsdp") == "megatron" for one in (own, theirs)]
    if kinds[0] != kinds[1]:
        message = f"checkpoints of Megatron-FSDP have their own format: set it as in {parent.name}"
        yield ("parallel", "fsdp"), message
    if load and layout_of(own) != layout_of(theirs) and not parent.is_reshardable(step):
        remedy = (
            "set it to true for that run"
            if parent.checkpoints is None
            else f"continue {parent.name} (continue_from: itself) by some steps with true, and begin with these"
        )
        message = (
            f"the optimizer's state of {parent.name} is saved by ranks of another layout (checkpoint.reshardable: "
            f"false, the default for large models): {remedy}, take its layout, or set load.optimizer: false"
        )
        yield ("continue_from",), message


def optimizer_mismatches(parent: str, own: RunSpec, theirs: RunSpec) -> list[Mismatch]:
    """Keys and problems if the optimizers' states have different forms: among Megatron-Core's optimizers, only the
    distributed one's is the same in every precision."""
    sharded = [one.parallel.get("distributed_optimizer") for one in (own, theirs)]
    if None in sharded:  # a recipe decides, so the ranks check again
        return []
    if sharded[0] != sharded[1]:
        message = (
            f"the state of {parent}'s optimizer was saved with {show(sharded[1])}, and has another format: "
            "set it as there, or set load.optimizer: false"
        )
        return [(("parallel", "distributed_optimizer"), message)]
    precisions = [one.training.get("precision") for one in (own, theirs)]
    if sharded[0] or None in precisions or (precisions[0] == "fp32") == (precisions[1] == "fp32"):
        return []
    message = (
        f"{precisions[0]} can't take the state of an optimizer in {precisions[1]}, which {parent} has, without "
        "parallel.distributed_optimizer: set load.optimizer: false"
    )
    return [(("training", "precision"), message)]


def model_difference(theirs: Tree, own: Tree) -> str | None:
    """A difference such as `config.hidden_size is 32 there, and 64 here`; None if both describe the same model."""
    for key in _SAME_MODEL:
        one, other = theirs.get(key), own.get(key)
        if isinstance(one, dict) and isinstance(other, dict):
            field = next((field for field in sorted({*one, *other}) if one.get(field) != other.get(field)), None)
            if field:
                return f"{key}.{field} is {show(one.get(field))} there, and {show(other.get(field))} here"
        elif one != other:
            return " and ".join(f"{_brief(key, value)} {place}" for value, place in ((one, "there"), (other, "here")))
    return None


def _brief(key: str, value: Any) -> str:
    return f"has no {key}" if value is None else f"has a {key}" if isinstance(value, dict) else f"has {key} {value!r}"


def layout_of(run: RunSpec) -> Tree:
    """The sizes of a run's layout, without data parallelism; of a recipe those that the file sets."""
    known = Layout.of_run(run)
    return {name: run.parallel.get(name) for name in NAMES} if known is None else known.sizes


def obstacles(run: Run, before: RunStore, step: int) -> list[str]:
    """The keys for which a run can't continue in place from this step of its earlier state."""
    if run.run.is_tuned:
        return ["task"]
    spec = parse(RunSpec, read(Identity, before.identity).run, before.identity)
    earlier = ParentRun(run.name, spec, {}, step, [step], before.checkpoints)
    found = [".".join(path) for path, _ in mismatches(earlier, run, step)]
    ends = spec.schedule.get("decay") in ENDING and not spec.schedule.get("decay_iters")
    if "training.train_iters" in found and ends and step == spec.training.get("train_iters"):
        found.append("schedule.decay")  # its rate has decayed, so that nobody means to add steps
    return found


def rises_again(parent: ParentRun, run: Run, step: int) -> str | None:
    """A warning if the parent's learning rate had decayed to its end, and this run's schedule, which ends with the run,
    is not there yet."""
    own, theirs = run.run, parent.run
    if (
        own.is_tuned
        or not run.config.load.optimizer
        or "scheduler.lr_decay_iters" in {**own.overrides, **theirs.overrides}
    ):
        return None
    decays = all(one.schedule.get("decay") in ENDING for one in (own, theirs))
    last, end = (
        own.training.get("train_iters"),
        theirs.schedule.get("decay_iters") or theirs.training.get("train_iters"),
    )
    if not decays or own.schedule.get("decay_iters") or None in (last, end) or not end <= step < last:
        return None
    return (
        f"continue_from: the learning rate had decayed to its end by step {end}, and rises again, as "
        f"the schedule now ends at step {last} (training.train_iters): schedule.decay_iters sets another end"
    )


SCHEDULING = ("scheduler.lr_", "scheduler.max_steps", "optimizer.lr", "optimizer.min_lr")  # overrides
FALL = 0.8  # a schedule that goes on falls by less from one step to the next, except in its last steps


def falls_at_once(parent: ParentRun, run: Run, step: int) -> str | None:
    """A warning if this run's schedule is much further at its first step than the parent's was at its last: neither
    in warm-up, nor because the peak is lower."""
    own, theirs = schedule_of(run.run), schedule_of(parent.run)
    if own is None or theirs is None or run.run.is_tuned or not run.config.load.optimizer or step <= own.warmup:
        return None
    last, first = theirs.rate_after(step - 1), own.rate_after(step)
    # Where the parent's schedule would fall as far by itself, nothing has changed.
    if first >= FALL * min(last, theirs.rate_after(step), own.peak):
        return None
    if own.decay == "WSD":
        key, why = "schedule.wsd_decay_iters", f"{own.final}, which begins after step {own.end - (own.final or 0)}"
    else:
        key, why = "schedule.decay", f"{own.decay}, which counts from the first step of all parents"
    left = own.end - step
    # WSD stays at its peak until its decay begins.
    is_at_peak = last >= 0.99 * own.peak
    remedy = f"; `decay: WSD` with `wsd_decay_iters: {left}` begins to fall there" if left > 0 and is_at_peak else ""
    if replace(own, end=theirs.end) == theirs:
        remedy = f"; schedule.decay_iters: {theirs.end} keeps its schedule{remedy}"
    return (
        f"continue_from: the learning rate falls at once, from {last:.3g} in step {step} of {parent.name} to "
        f"{first:.3g} in the next ({key}: {why}){remedy}"
    )


def schedule_of(run: RunSpec) -> Schedule | None:
    """A run's schedule; None if overrides or a recipe decide it."""
    asked, rates = run.schedule, run.optimizer
    end = asked.get("decay_iters") or run.training.get("train_iters")
    if run.is_recipe or end is None or any(field.startswith(SCHEDULING) for field in run.overrides):
        return None
    return Schedule(
        asked["decay"],
        peak=rates["lr"],
        least=rates["min_lr"],
        warmup=asked["warmup_iters"],
        end=end,
        batch=run.training["global_batch_size"],
        final=asked.get("wsd_decay_iters"),
    )


def reads_otherwise(parent: ParentRun, run: Run) -> Iterator[str]:
    """Warnings of settings that change which samples come after the parent's: they are counted, and not the texts."""
    own, theirs = run.run, parent.run

    def changed(key: str, now: Any, before: Any, what: str) -> Iterator[str]:
        if now is not None and before is not None and now != before:
            yield f"continue_from: {key} was {before}, and is {now}: {what}"

    blends = [split_blends(one.data).get("train") for one in (own, theirs)]
    seeds, lengths = ([one.training.get(key) for one in (own, theirs)] for key in ("seed", "seq_length"))
    again = "some texts that were read come again, and others don't come"
    yield from changed("training.seed", *seeds, f"the data is shuffled otherwise, so {again}")
    yield from changed(
        "training.seq_length", *lengths, f"the run has read as many samples, but at another position, so {again}"
    )
    yield from _other_sets(own, theirs)
    shares = [split_blends(in_shares(one.data)).get("train") for one in (own, theirs)]
    if shares[0] == shares[1]:  # at most the unit of weights is another
        return
    yield from changed(
        "data.blend",
        *(blend and named(blend) for blend in blends),
        f"the run reads on where the new blend has as many samples: of corpora that both have, {again}",
    )


def _other_sets(own: RunSpec, theirs: RunSpec) -> Iterator[str]:
    """Warnings of validation sets whose curves join losses of different documents."""
    splits = [one.data.get("split") if one.data.get("blend") else None for one in (theirs, own)]
    trained = [one and shares_of_splits(one)[0] for one in splits]
    if None not in splits and splits[0] != splits[1] and trained[0] <= trained[1]:  # or else worse is said of it
        yield (
            f"continue_from: data.split was {splits[0]}, and is {splits[1]}: from here on the validation loss is of "
            "other documents"
        )
    before, now = (
        {name: documents_of_set(one.data, blend, one.held_out) for name, blend in validation_sets(one.data).items()}
        for one in (theirs, own)
    )
    for name in now:
        if name in before and before[name] != now[name]:
            yield (
                f"continue_from: data.validation_sets.{name} was {before[name]}, and is {now[name]}: its curve joins "
                "losses of different documents, so give the new set another name"
            )
