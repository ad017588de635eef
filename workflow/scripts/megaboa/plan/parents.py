"""Parents of runs that continue from another run's checkpoint (`continue_from`): which one, and whether that is
possible."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from megaboa.blends import split_blends
from megaboa.config.problems import choose
from megaboa.errors import InputError
from megaboa.paths import ExperimentFolder, RunFolder
from megaboa.plan import documents, in_place
from megaboa.plan.held_out import Ancestor, Lineage, Texts, TextsOfPlan, held_out, is_made_of
from megaboa.plan.mismatches import falls_at_once, layout_of, mismatches, reads_otherwise, rises_again
from megaboa.plan.parent_runs import (
    NoParentError,
    ParentRun,
    checkpoint_of,
    from_versions,
    is_trained_as_planned,
    trained_parent,
    version_of,
    will_keep,
)
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
    parse,
    read_if_there,
)
from megaboa.run.identity import is_trained, stored
from megaboa.run.versions import before as versions_before
from megaboa.run.versions import versions

Complain = Callable[[Run, tuple[str, ...], str], None]


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
        self.texts_of = TextsOfPlan()
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
            parent, step = checkpoint_of(self.find(experiment, name), step)
        except NoParentError as error:
            self.complain(run, ("continue_from",), str(error))
            return run
        return self._attached(parent, run, step)

    def _attached(self, parent: ParentRun, run: Run, step: int) -> Run:
        """The run with its parent, unless something speaks against it, which is reported."""
        problems = mismatches(parent, run, step)
        for path, message in problems:
            self.complain(run, path, message)
        if problems:
            return run
        texts = self.texts_of(run.config.corpora, run.corpora)
        recorded = self._recorded(run, f"{parent.name}@{step}") if self._are_as_before(texts) else []
        lineage = self._lineage(run, parent, step, recorded)
        # A finished run stays what it is, whatever has become of its parents' files, unless this call trains its parent
        # again.
        for known in (*recorded, {}) if parent.trained else ():
            joined = with_parent(run, parent, step, lineage, known)
            if self._is_done(joined):
                self._warn(run, held_out(joined.run, texts, lineage).of_finished)
                return joined
        found = held_out(run.run, texts, lineage)
        for one in found.problems:
            self.complain(run, one.key, one.message)
        joined = with_parent(run, parent, step, lineage, found.splits)
        if not self._is_done(joined):
            is_in_place = parent.name == f"{self.experiment}/{run.name}"
            read_otherwise = reads_otherwise(parent, joined) if is_in_place else ()
            rates = [other(parent, run, step) for other in (rises_again, falls_at_once)]
            self._warn(run, filter(None, (*rates, *found.warnings, *read_otherwise)))
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

    def _is_done(self, run: Run) -> bool:
        with contextlib.suppress(InputError):  # of damaged files others say more
            return is_trained(run.folder(self.results, self.experiment))
        return False

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
        now = self.texts_of(self.runs.get(own_name, run).config.corpora, blend) if experiment == self.experiment else {}
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
            parent, step = checkpoint_of(from_versions(folder, versions(folder, before.store)), wanted or before.step)
        except NoParentError as error:
            self.complain(run, ("continue_from",), str(error))
            return run
        return self._attached(parent, run, step)

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
        if is_trained_as_planned(run, folder):
            return trained_parent(folder)
        last, before = run.run.training.get("train_iters"), versions_before(folder, run.run.parent)
        earlier = tuple(version_of(folder, one) for one in before)
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
        if its_experiment == experiment and name in parents and layout_of(parents[name].run) != layout_of(run.run):
            wanted.add(name)
    return [_saving_whole(run) if run.name in wanted else run for run in runs]


def _saving_whole(run: Run) -> Run:
    return replace(run, launch=replace(run.launch, checkpoint={**run.launch.checkpoint, "reshardable": True}))


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


def with_parent(run: Run, parent: ParentRun, step: int, lineage: Lineage, held_out: dict[str, str]) -> Run:
    """The run with its parent, in its identity and in its row of the plan. `held_out`: what parents held out of corpora
    that the run evaluates."""
    experiment, name, _ = split(parent.name)
    tuned = run.run.is_tuned
    load = Load(optimizer=False, rng=False) if tuned else Load(**run.config.load.model_dump(mode="json"))
    found = Parent(
        experiment=experiment,
        run=name,
        iteration=step,
        load=load,
        weights_only=tuned,
        identity=parent.identity,
        held_out=held_out,
    )
    spec = replace(run.run, parent=found)
    facts = replace(run.facts, training=replace(run.facts.training, steps_before=spec.steps_before))
    row = {**run.row, "parent": str(found)}
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
