"""Parents of runs that continue from another run's checkpoint (`continue_from`): which one, and whether that is
possible."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from megaboa.blends import documents_of_set, in_shares, named, shares_of_splits, split_blends, validation_sets
from megaboa.config.problems import choose, show
from megaboa.errors import InputError
from megaboa.formats import some_of
from megaboa.layout import NAMES, Layout
from megaboa.paths import ExperimentFolder, RunFolder, trained
from megaboa.plan import documents, in_place
from megaboa.plan.held_out import Ancestor, Lineage, Texts, held_out, is_made_of, texts_of
from megaboa.plan.plan import Run
from megaboa.records import (
    Corpus,
    CorpusSpec,
    Identity,
    Load,
    Parent,
    Record,
    RunSpec,
    TrainRecord,
    Tree,
    parse,
    read,
    read_if_there,
)
from megaboa.run import checkpoints
from megaboa.run.identity import as_it_lies, is_trained, stored
from megaboa.run.versions import Version, versions
from megaboa.run.versions import before as versions_before
from megaboa.store_paths import RunStore

# Keys that define a model, regardless of its initial weights.
_SAME_MODEL = ("config", "hf", "revision", "tokenizer", "recipe")
ENDING = ("linear", "cosine", "WSD")  # schedules whose rate depends on the step at which they end
SHOWN = 10

Mismatch = tuple[tuple[str, ...], str]  # a key, and what is wrong with it
Complain = Callable[[Run, tuple[str, ...], str], None]


class NoParentError(Exception):
    """The message is what the user reads."""


@dataclass(frozen=True)
class ParentRun:
    """A planned or trained run, from whose checkpoint another run continues."""

    name: str  # <experiment>/<run>
    run: RunSpec
    settings: Tree  # its launch.checkpoint
    last: int | None  # step of its last checkpoint, if known
    kept: list[int] | None  # steps of its present or future checkpoints; None if unknown
    checkpoints: Path | None = None  # folder of its checkpoints, if it has any
    identity: str | None = None  # if it is an earlier version, with which the run of this name has been continued
    earlier: tuple[ParentRun, ...] = ()  # its earlier versions, whose checkpoints it has, too
    trained: Identity | None = None  # if it has been

    def is_reshardable(self, step: int) -> bool:
        """Whether the optimizer's state can be loaded in any layout. For a recipe, the ranks check again."""
        if self.checkpoints is None:
            return bool(self.settings.get("reshardable", True))
        path = checkpoints.folder(self.checkpoints, step) / checkpoints.LAST_WRITTEN
        return not path.exists() or not checkpoints.has_shards(yaml.safe_load(path.read_text(encoding="utf-8")))


def split(text: str) -> tuple[str, str, int | None]:
    """`my/run@100` split into experiment, run and step."""
    name, _, step = text.partition("@")
    experiment, _, run = name.partition("/")
    return experiment, run, int(step) if step else None


class Parents:
    """The parents of an experiment's runs; each is determined once."""

    def __init__(self, experiment: str, runs: list[Run], names: list[str], results: Path, complain: Complain):
        self.experiment = experiment
        self.runs = {run.name: run for run in runs}
        self.names = names
        self.results = results
        self.complain = complain
        self.warnings: dict[str, list[str]] = {}  # text -> names of the runs
        self.find = functools.cache(self._find)
        self.joined = functools.cache(self._joined)

    def join(self) -> list[Run]:
        """The runs with their parents attached. Reports problems."""
        return [self.joined(name) for name in self.runs]

    def _joined(self, own_name: str) -> Run:
        run = self.runs[own_name]
        if run.config.continue_from is None:
            return run
        if documents.is_in_place(run.config.continue_from):
            return self._continued_in_place(run)
        experiment, name, step = split(run.config.continue_from)
        own = experiment == self.experiment
        if own and name in self.names and name not in self.runs:
            return run  # it has errors of its own, which are reported first
        try:
            self._refuse_circle(run)
            parent, step = _checkpoint(self.find(experiment, name), step)
        except NoParentError as error:
            self.complain(run, ("continue_from",), str(error))
            return run
        return self._attached(parent, run, experiment, name, step)

    def _attached(self, parent: ParentRun, run: Run, experiment: str, name: str, step: int) -> Run:
        """The run with its parent, unless something speaks against it, which is reported."""
        problems = mismatches(parent, run, step)
        for path, message in problems:
            self.complain(run, path, message)
        if problems:
            return run
        own = experiment == self.experiment and name == run.name
        texts = texts_of(run.config.corpora, run.corpora)
        recorded = self._recorded(run, f"{experiment}/{name}@{step}") if self._are_as_before(texts) else []
        lineage = self._lineage(run, parent, step, recorded)
        # A finished run stays what it is, whatever has become of its parents' files, unless this call trains its parent
        # again.
        for known in (*recorded, {}) if parent.trained else ():
            joined = with_parent(run, experiment, name, step, parent.identity, lineage, known)
            if _is_done(joined, self.results, self.experiment):
                self._warn(run, held_out(joined.run, texts, lineage).of_finished)
                return joined
        found = held_out(run.run, texts, lineage)
        for one in found.problems:
            self.complain(run, one.key, one.message)
        joined = with_parent(run, experiment, name, step, parent.identity, lineage, found.splits)
        if not _is_done(joined, self.results, self.experiment):
            read_otherwise = reads_otherwise(parent, joined) if own else ()
            self._warn(run, filter(None, (rises_again(parent, run, step), *found.warnings, *read_otherwise)))
        return joined

    def _recorded(self, run: Run, parent: str) -> list[dict[str, str]]:
        """What was held out for the run, if it had this parent, when it was planned last, and when it was trained."""
        folder = ExperimentFolder(self.results / self.experiment).run(run.name)
        found = (_readable(RunSpec, folder.file("run")), _readable(TrainRecord, folder.train_manifest))
        return [one.parent.held_out for one in found if one and one.parent and str(one.parent) == parent]

    def _are_as_before(self, texts: dict[str, Texts]) -> bool:
        """Whether these texts of the experiment are those of its last plan, as far as its files are there."""
        specs = ExperimentFolder(self.results / self.experiment).specs
        before = {name: _readable(CorpusSpec, specs.of("corpora", name)) for name in texts}
        return all(spec is None or Texts.of_spec(spec) == texts[name] for name, spec in before.items())

    def _warn(self, run: Run, warnings: Iterable[str]) -> None:
        for warning in warnings:
            self.warnings.setdefault(warning, []).append(run.name)

    def _lineage(self, run: Run, parent: ParentRun, step: int, recorded: list[dict[str, str]]) -> Lineage:
        """The parents of a run, from the one that it continues from this step. `recorded`: what was held out for it."""
        lost, trained, is_earlier = None, parent.trained, parent.identity is not None
        found = [self._ancestor(run, parent.run, f"{parent.name}@{step}", trained, is_earlier)]
        while before := found[-1].run.parent:
            known = self._before(before, trained)
            if known is None:
                lost = str(before)
                break
            spec, trained = known
            found.append(self._ancestor(run, spec, str(before), trained, before.identity is not None))
        by_ancestors = {name: split for one in reversed(found) for name, split in one.run.held_out.items()}
        return Lineage(found, lost, by_ancestors, next(iter(recorded), {}))

    def _ancestor(self, run: Run, spec: RunSpec, name: str, trained: Identity | None, is_earlier: bool) -> Ancestor:
        """`trained`: its identity, if it has been. `is_earlier`: whether it is an earlier version of a run, which need
        not have read what this experiment's corpora are now."""
        experiment, own_name, step = split(name)
        blend, its_split = split_blends(spec.data).get("train", {}), spec.data.get("split")
        folder = ExperimentFolder(self.results / experiment)
        if spec.data.get("blend") and its_split is None:
            its_split = _split_of_recipe(folder.run(own_name), spec)
        now = texts_of(self.runs.get(own_name, run).config.corpora, blend) if experiment == self.experiment else {}
        if experiment == self.experiment and not is_earlier:
            return Ancestor(name, spec, int(step or 0), its_split, now)
        specs = {corpus: _readable(CorpusSpec, folder.specs.of("corpora", corpus)) for corpus in blend}
        known = {corpus: found for corpus, found in specs.items() if found}
        made = {corpus: _readable(Corpus, folder.corpus(corpus).manifest) for corpus in known} if trained else {}
        has_changed = any(
            one and not is_made_of(one, known[name], trained.corpora.get(name)) for name, one in made.items()
        )
        texts = now | {corpus: Texts.of_spec(found) for corpus, found in known.items()}
        return Ancestor(name, spec, int(step or 0), its_split, texts, has_changed)

    def _before(self, parent: Parent, trained: Identity | None) -> tuple[RunSpec, Identity | None] | None:
        """The run that a parent continued itself; None if it is gone. `trained`: the parent's identity, if it has been
        trained."""
        wanted = trained.parent if trained else parent.identity
        if wanted is None:
            try:
                found = self.find(parent.experiment, parent.run)
            except NoParentError:
                return None
            return found.run, found.trained
        folder = ExperimentFolder(self.results / parent.experiment).run(parent.run)
        stores = stored(folder) if folder.file("launch").exists() else ()
        return next(((parse(RunSpec, one.run, to.identity), one) for to, one in stores if one.digest == wanted), None)

    def _continued_in_place(self, run: Run) -> Run:
        """A run that continues in place, with the checkpoint of its earlier state as its parent."""
        text = run.config.continue_from.partition("@")[2]
        wanted = int(text) if text else None
        folder = ExperimentFolder(self.results / self.experiment).run(run.name)
        name = f"{self.experiment}/{run.name}"
        if run.run.is_tuned:
            message = (
                f"task: {run.run.task} begins with weights alone, at its own step 0, so it can't continue in place: "
                f"give the run another name, and {name} as its parent"
            )
            self.complain(run, ("continue_from",), message)
            return run
        try:
            before = in_place.before(folder, run, wanted)
            if before is None:
                self._refuse_lost(run, folder, wanted)
                return run  # new in the experiment: it begins at step 0
            if wanted is None and in_place.is_as_planned(folder, run, before):
                return run
            parent, step = _checkpoint(_from_versions(folder, versions(folder, before.store)), wanted or before.step)
        except NoParentError as error:
            self.complain(run, ("continue_from",), str(error))
            return run
        return self._attached(parent, run, self.experiment, run.name, step)

    def _refuse_lost(self, run: Run, folder: RunFolder, wanted: int | None) -> None:
        name, store = f"{self.experiment}/{run.name}", Path(run.launch.store, "runs", self.experiment, run.name)
        if in_place.is_trained_and_unsaved(folder, run):
            raise NoParentError(
                f"{name} has been trained without saving a checkpoint: set continue_from: null for this run to train "
                "it again from step 0, with checkpoint.save_interval above 0"
            )
        has_saved = in_place.has_saved(folder, run)
        if has_saved and not folder.file("run").exists():
            raise NoParentError(
                f"{name} has been trained, and its results are gone ({folder.file('run')} is missing): call once "
                f"without this key and with the settings that it had, so that its checkpoints in {store} are found"
            )
        if has_saved:
            raise NoParentError(
                f"{name} has been trained, and {store} has no checkpoint of the settings in {folder.file('run')}: put "
                "the checkpoint back, or set continue_from: null for this run (under sweep.runs, or in a value of "
                "sweep.grid that has a label) to train it again from step 0"
            )
        if wanted:
            raise NoParentError(f"{name} has not been trained, so it has no step {wanted}: remove @{wanted}")

    def _refuse_circle(self, run: Run) -> None:
        chain = [run.name]
        while True:
            text = self.runs[chain[-1]].config.continue_from
            experiment, name, _ = split(text) if text else ("", "", None)
            if experiment != self.experiment or name not in self.runs:
                return
            if name in chain:
                raise NoParentError(f"{' → '.join([*chain, name])}: a run can't continue from what continues from it")
            chain.append(name)

    def _find(self, experiment: str, name: str) -> ParentRun:
        folder = ExperimentFolder(self.results / experiment).run(name)
        if experiment != self.experiment:
            return trained_parent(folder)
        if name not in self.names:
            raise NoParentError(choose(name, self.names, "run"))
        run = self.joined(name)
        if folder.file("run").exists() and folder.run == run.run and is_trained(folder):
            return trained_parent(folder)
        last, before = run.run.training.get("train_iters"), versions_before(folder, run.run.parent)
        earlier = tuple(_version(folder, one) for one in before)
        name = f"{experiment}/{name}"
        return ParentRun(name, run.run, run.launch.checkpoint, last, will_keep(run), earlier=earlier)


def saved_for_other_layouts(experiment: str, runs: list[Run]) -> list[Run]:
    """The runs. Those whose optimizer state another run loads in another layout save it in reshardable form, by
    default."""
    parents = {run.name: run for run in runs if run.config.checkpoint.reshardable is None}
    wanted = set()
    for run in runs:
        if not run.config.continue_from or run.run.is_tuned or not run.config.load.optimizer:
            continue
        its_experiment, name, _ = split(run.config.continue_from)
        if its_experiment == experiment and name in parents and _layout(parents[name].run) != _layout(run.run):
            wanted.add(name)
    return [_saving_whole(run) if run.name in wanted else run for run in runs]


def _saving_whole(run: Run) -> Run:
    return replace(run, launch=replace(run.launch, checkpoint={**run.launch.checkpoint, "reshardable": True}))


def _layout(run: RunSpec) -> Tree:
    """The sizes of a run's layout, without data parallelism; of a recipe those that the file sets."""
    known = Layout.of_run(run)
    return {name: run.parallel.get(name) for name in NAMES} if known is None else known.sizes


def trained_parent(folder: RunFolder) -> ParentRun:
    """A trained run, from its files."""
    name = f"{folder.experiment}/{folder.name}"
    if not folder.train_manifest.exists():
        others = trained(folder.experiment_folder.path.parent)
        known = sorted(f"{other.experiment}/{other.name}" for other in others)
        hint = f"; trained here: {some_of(known, SHOWN)}" if known else ""
        raise NoParentError(f"{name} has not been trained: there is no {folder.train_manifest}. Train it first{hint}")
    store = RunStore(folder.store)
    if not store.identity.exists():
        raise NoParentError(f"the checkpoints of {name} are not in {store.path} any more")
    return replace(_from_versions(folder, versions(folder, store)), identity=None)


def _from_versions(folder: RunFolder, found: list[Version]) -> ParentRun:
    """The first of these versions of a run, with the others."""
    first, *earlier = [_version(folder, one) for one in found]
    return replace(first, earlier=tuple(earlier))


def _version(folder: RunFolder, version: Version) -> ParentRun:
    name, kept, identity = f"{folder.experiment}/{folder.name}", version.kept, version.identity
    run = parse(RunSpec, as_it_lies(folder, identity), version.store.identity)
    settings = folder.launch.checkpoint if folder.file("launch").exists() else {}
    last = max(kept, default=None)
    return ParentRun(name, run, settings, last, kept, version.store.checkpoints, identity.digest, trained=identity)


def _readable[R: Record](kind: type[R], path: Path) -> R | None:
    """The record in a file; None if there is none, or it can't be read: the jobs that need it say more."""
    with contextlib.suppress(InputError):
        return read_if_there(kind, path)
    return None


def _split_of_recipe(folder: RunFolder, run: RunSpec) -> str | None:
    """The split that this run, or an earlier version, has from its recipe; None if preflight hasn't told it."""
    if not folder.file("run").exists() or folder.preflight is None:
        return None
    asked = [(one.data.get("split"), one.overrides.get("dataset.split")) for one in (run, folder.run)]
    return folder.preflight.split if asked[0] == asked[1] else None


def planned_steps(settings: Tree, last: int | None) -> list[int] | None:
    """The steps whose checkpoints a run keeps to its end; None if its recipe decides."""
    if last is None or "save_interval" not in settings:
        return None
    interval = settings["save_interval"]
    if interval == 0:
        return []
    saved = sorted({*range(interval, last + 1, interval), last}) if interval else [last]
    return checkpoints.kept(saved, settings.get("keep_last"), settings.get("keep_every"))


def will_keep(run: Run) -> list[int] | None:
    """The steps whose checkpoints a run of this plan keeps if it is trained now: none of its parent's."""
    kept = planned_steps(run.launch.checkpoint, run.run.training.get("train_iters"))
    return kept and [step for step in kept if step > run.run.steps_before]


def kept_by(run: Run, folder: RunFolder) -> list[int] | None:
    """The steps whose checkpoints a run of this plan has once it is trained; None if its recipe decides."""
    with contextlib.suppress(NoParentError, InputError):  # without its store, or with damaged files, it is made again
        if folder.file("run").exists() and folder.run == run.run and is_trained(folder):
            return trained_parent(folder).kept
    return will_keep(run)


def _checkpoint(parent: ParentRun, step: int | None) -> tuple[ParentRun, int]:
    """The version of the parent that has the wanted checkpoint, and its step. `step`: None for the last."""
    if parent.kept == [] and (step is None or not parent.earlier):
        raise NoParentError(f"{parent.name} has no checkpoint: set its checkpoint.save_interval above 0")
    if step is None and parent.last is None:
        raise NoParentError(f"the last step of {parent.name} is known to its recipe only: write {parent.name}@<step>")
    step = step or int(parent.last or 0)
    every = (parent, *parent.earlier)
    if found := next((one for one in every if step in (one.kept or ())), None):
        return found, step
    if parent.kept is not None:
        kept = sorted(kept for one in every for kept in one.kept or ())
        raise NoParentError(
            f"{parent.name} keeps no checkpoint of step {step}, but of {some_of(list(map(str, kept)), SHOWN)}: "
            f"take one of these, or change its checkpoint.save_interval, keep_last or keep_every"
        )
    return parent, step


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
        message = (
            f"{last} is the step at which the run ends, and it begins after step {step} of {parent.name}: raise it"
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
    if load:
        yield from optimizer_mismatches(parent.name, own, theirs)
    kinds = [one.parallel.get("fsdp") == "megatron" for one in (own, theirs)]
    if kinds[0] != kinds[1]:
        message = f"checkpoints of Megatron-FSDP have their own format: set it as in {parent.name}"
        yield ("parallel", "fsdp"), message
    if load and _layout(own) != _layout(theirs) and not parent.is_reshardable(step):
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


def obstacles(run: Run, before: RunStore, step: int) -> list[str]:
    """The keys for which a run can't continue in place from this step of its earlier state."""
    if run.run.is_tuned:
        return ["task"]
    spec = parse(RunSpec, read(Identity, before.identity).run, before.identity)
    earlier = ParentRun(run.name, spec, {}, step, [step], before.checkpoints)
    return [".".join(path) for path, _ in mismatches(earlier, run, step)]


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


def _is_done(run: Run, results: Path, experiment: str) -> bool:
    with contextlib.suppress(InputError):  # of damaged files others say more
        return is_trained(run.folder(results, experiment))
    return False


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


def with_parent(
    run: Run,
    experiment: str,
    name: str,
    step: int,
    identity: str | None,
    lineage: Lineage,
    held_out: dict[str, str] | None = None,
) -> Run:
    """The run with its parent, in its identity and in its row of the plan. `identity`: the parent's, if it has the same
    name. `held_out`: what parents held out of corpora that the run evaluates."""
    load = Load(**run.config.load.model_dump(mode="json"))
    parent = Parent(
        experiment=experiment, run=name, iteration=step, load=load, identity=identity, held_out=held_out or {}
    )
    if run.run.is_tuned:
        parent = replace(parent, load=Load(optimizer=False, rng=False), weights_only=True)
    spec = replace(run.run, parent=parent)
    facts = replace(run.facts, training=replace(run.facts.training, steps_before=spec.steps_before))
    row = {**run.row, "parent": str(parent)}
    if spec.steps_before:  # and those may have had other batches
        row["tokens"] = tokens_until(spec, spec.training.get("train_iters"), lineage)
    launch = replace(run.launch, index=documents.index_name(spec))
    return replace(run, run=spec, launch=launch, row=row, facts=facts)


def tokens_until(run: RunSpec, last: int | None, lineage: Lineage) -> int | None:
    """The tokens of a run and its parents up to its last step; None if only a recipe, or a parent that is gone, knows
    them."""
    steps = [(run, last), *((one.run, one.step) for one in lineage.ancestors)]
    sizes = [
        [until and until - one.steps_before, *map(one.training.get, ("global_batch_size", "seq_length"))]
        for one, until in steps
    ]
    return None if lineage.lost or None in itertools.chain(*sizes) else sum(map(math.prod, sizes))


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
