"""Makes the plan: every combination of the sweep becomes a checked run; all problems are reported at once."""

from __future__ import annotations

import fnmatch
import itertools
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Literal

from megaboa import blends, files
from megaboa.check import costs, outcome
from megaboa.config import Experiment, LoadedExperiment, keys
from megaboa.config.models.outputs import Along
from megaboa.config.models.resources import Budget
from megaboa.config.problems import choose
from megaboa.config.published import PublishedError, load_published
from megaboa.config.yaml_file import dotted
from megaboa.data import tokenizer
from megaboa.data.hub import is_id
from megaboa.formats import listed, some_of
from megaboa.layout import AXES, Layout
from megaboa.paths import ExperimentFolder, RunFolder
from megaboa.plan import device, tasks
from megaboa.plan.choices import Choice, Place, Problems, TreePath, bad_names, choices_of, of_sweep, seeds, twins
from megaboa.plan.one_run import RunPlanner
from megaboa.plan.parent_runs import SHOWN, kept_by, will_keep
from megaboa.plan.parents import Parents, saved_for_other_layouts, split
from megaboa.plan.plan import Invalid, Plan, Run
from megaboa.plan.planned_figures import empty_figures, figure_problems, own_columns
from megaboa.plan.run_facts import known_check
from megaboa.plan.specifications import value_of
from megaboa.records import AgreementSpec, ExportRecord, Preflight, Tree, read_if_there
from megaboa.store import closed, obstacle

MAX_RUNS = 100_000
GATHERED = (
    "checkpoint.reshardable is true, as another run continues from this one in another layout: at each save every rank "
    "gathers the optimizer's state of its stage in the host's memory, 12 bytes per parameter"
)


def make_plan(loaded: LoadedExperiment, results: Path | str = "results", only: Collection[str] = ()) -> Plan:
    """The runs of an experiment. Raises ConfigError with all problems of all runs.

    `results` is searched for parents of runs, and for runs that preflight refused, if these are left out. `only`: the
    runs of a job. The plan then consists of these and their parents; exports, the report and checks of the whole plan
    are skipped, because the call that submitted the job has done them. If the device isn't settled yet, this machine
    decides.
    """
    if loaded.experiment.device == device.AUTO:
        loaded = device.settle(loaded)
    if only and (plan := _Planner(loaded, Path(results)).plan_of(only)):
        return plan
    return _Planner(loaded, Path(results)).plan()


class _Planner:
    def __init__(self, loaded: LoadedExperiment, results: Path):
        self.loaded = loaded
        self.results = results
        self.base = loaded.experiment
        self.problems = Problems(loaded)
        self.each = RunPlanner(loaded, results, self.problems)

    def plan(self) -> Plan:
        choices = list(itertools.islice(choices_of(self.loaded), MAX_RUNS + 1))
        excluded = self.excluded()
        swept = tuple(dict.fromkeys(dotted(path) for choice in choices for path in choice.values))
        if len(choices) > MAX_RUNS:
            self.problems.add(("sweep",), f"gives more than {MAX_RUNS} runs: split it")
            choices = []
        for choice, message in bad_names(choices):
            self.problems.add(choice.place, message)
        runs = self.with_parents([run for choice in choices if (run := self.each.plan(choice))], choices)
        sound = not self.problems.found
        left_out = {*excluded, *(run.name for run in self.each.invalid)}
        if excluded and not choices:
            self.problems.add(("sweep", "exclude"), "leaves no run: remove a pattern")
        if choices and not runs and not self.problems.found:
            self.problems.add(("sweep", "skip_illegal"), f"no run is left: {self.each.invalid[0]}")
        # Exports and patterns refer to runs named by the user, not to those that agreements add.
        names = [choice.name for choice in choices if choice.name not in left_out and choice.reference is None]
        asked = Asked(self.base, self.problems, left_out, self.results)
        exports = asked.exports(names)
        folder = ExperimentFolder(Path(self.results, self.base.experiment))
        asked.check_exports(runs, exports, read_if_there(Preflight, folder.preflight) if exports else None)
        evaluated = asked.evaluated(exports)
        runs = with_costs(runs, exports, self.base.budget, self.results)
        total = costs.total([run.costs for run in runs])
        for key, message in costs.over_budget(total, self.base.budget.gpu_hours, self.base.budget.disk).items():
            self.problems.add(tuple(key.split(".")), message)
        if self.base.budget.gpu_hours is not None:  # preflight knows more of the runs that have no costs yet
            untimed = [run.name for run in runs if run.costs and run.costs.step_seconds is None]
            self.each.warnings |= {costs.UNCHECKED: untimed} if untimed else {}
        agreements = asked.agreements(names)
        for message, names in other_weights(runs, agreements).items():
            self.each.warnings.setdefault(message, []).extend(names)
        self.each.warnings |= unread_keys(runs)
        apart = sets_told_apart(runs)
        for name, shown in apart.items():
            message = (
                f"data.validation_sets.{name}: has other documents in other runs, so the report has "
                f"{listed([*dict.fromkeys(shown.values())])}: to compare the runs, name a corpus that none of them "
                "trains on"
            )
            self.each.warnings[message] = list(shown)
        compared = {name for one in agreements for name in (one.reference, *one.runs, *one.twins)}
        # The report needs this to distinguish a tie of two experts from a mistake.
        runs = [replace(run, launch=replace(run.launch, routing=True)) if run.name in compared else run for run in runs]
        read = {name for one in agreements if one.tensors for name in (one.reference, *one.runs)}
        runs = [replace(run, launch=replace(run.launch, samples=True)) if run.name in read else run for run in runs]
        self.check_ends(runs, choices, compared=read)
        if sound and self.base.tune.trials_of is None:  # trials of settings may differ in what changes no loss
            pairs = [(one.reference, run) for one in agreements if one.tensors for run in one.runs]
            self.check_same(runs, repeated=set(map(frozenset, pairs)))
        axes = own_columns(self.loaded.factors, swept)
        for path, problem in figure_problems(self.base.report.figures, swept, axes, apart):
            self.problems.add(path, problem)
        published = asked.published()
        asked.check_baseline(self.results)
        if why := obstacle(self.base.store):
            self.problems.add(("store",), f"{why}: name a folder, or one that can be made")
        tokenizers = self.corpus_tokenizers(runs)
        self.problems.raise_all()
        plan = replace(
            self.plan_for(runs, tokenizers),
            exports=exports,
            evaluated=evaluated,
            agreements=agreements,
            excluded=excluded,
            published=published,
            warnings=self.each.warnings,
            swept=swept,
            axes=axes,
        )
        return replace(plan, notes=(*self.loaded.notes, *of_store(self.base.store), *empty_figures(plan)))

    def excluded(self) -> tuple[str, ...]:
        """The runs that the sweep excludes; a pattern that matches none is a problem."""
        patterns = self.base.sweep.exclude if self.base.sweep else []
        if not patterns:
            return ()
        names = [choice.name for choice in itertools.islice(of_sweep(self.loaded), MAX_RUNS)]
        return tuple(Asked(self.base, self.problems, (), self.results).matching(("sweep", "exclude"), patterns, names))

    def plan_of(self, names: Collection[str]) -> Plan | None:
        """A plan of these runs alone; None if it needs all runs."""
        choices = {choice.name: choice for choice in choices_of(self.loaded)}
        found: dict[str, Run | None] = {}
        waiting = set(names)
        while waiting:
            if not waiting <= choices.keys():
                return None
            found |= {name: self.each.plan(choices[name]) for name in waiting}
            waiting = {name for name in map(self.own_parent, filter(None, found.values())) if name} - found.keys()
        runs = [run for name in choices if (run := found.get(name))]
        if any(self.has_tokenizer_of_another(run) for run in runs):
            return None
        runs = self.with_parents(runs, list(choices.values()))
        tokenizers = self.corpus_tokenizers(runs)
        self.problems.raise_all()
        return self.plan_for(runs, tokenizers)

    def plan_for(self, runs: list[Run], tokenizers: dict[str, str]) -> Plan:
        """A plan without exports and agreements."""
        return Plan(
            name=str(self.base.experiment),
            experiment=self.base,
            runs=runs,
            models={run.model: run.config.models[run.model] for run in runs},
            corpus_tokenizers=tokenizers,
            exports=[],
            agreements=[],
            invalid=self.each.invalid,
        )

    def own_parent(self, run: Run) -> str | None:
        """The run's parent, if it is in this experiment."""
        experiment, name, _ = split(run.config.continue_from) if run.config.continue_from else ("", "", None)
        return name if experiment == self.base.experiment else None

    def has_tokenizer_of_another(self, run: Run) -> bool:
        """Whether a recipe's tokenizer may have to be fetched with another run's model."""
        model = run.config.models[run.model]
        return bool(not model.has_source and model.tokenizer) and model.tokenizer not in self.base.tokenizers

    def without_orphans(self, runs: list[Run]) -> list[Run]:
        """The runs except those whose parent is left out as illegal: they are left out, too."""
        while True:
            left_out = {one.name for one in self.each.invalid}
            orphans = {run.name: run for run in runs if self.own_parent(run) in left_out}
            if not orphans:
                return runs
            for run in orphans.values():
                reason = f"continue_from: {run.config.continue_from} is INVALID"
                self.each.invalid.append(Invalid(run.name, (reason,), run.row))
            runs = [run for run in runs if run.name not in orphans]

    def with_parents(self, runs: list[Run], choices: list[Choice]) -> list[Run]:
        """The runs, with parents attached to those that continue from another run."""
        if not any(run.config.continue_from for run in runs):
            return runs
        runs = self.without_orphans(runs)
        by_name = {choice.name: choice for choice in choices}
        before, runs = runs, saved_for_other_layouts(str(self.base.experiment), runs)
        for run, told in zip(before, runs, strict=True):
            if told is not run and run.launch.checkpoint.get("reshardable") is False:
                self.each.warnings.setdefault(GATHERED, []).append(run.name)

        def complain(run: Run, path: TreePath, message: str) -> None:
            self.problems.add(self.problems.place_of(path, by_name[run.name]), message, run.name)

        parents = Parents(str(self.base.experiment), runs, list(by_name), self.results, complain)
        joined = parents.join()
        self.each.warnings |= parents.warnings
        return joined

    def check_ends(self, runs: list[Run], choices: list[Choice], compared: Collection[str]) -> None:
        """Report runs that Bridge would end before their last step. For runs whose tensors are compared that is the
        question: does it change what they train?"""
        by_name = {choice.name: choice for choice in choices}
        for run in runs:
            choice = by_name[run.name]
            if run.config.overrides.get(keys.STOP) and not {run.name, choice.reference} & {*compared}:
                message = (
                    f"{keys.ENDS_EARLY}; training.train_iters is the last step (schedule.decay_iters: of the decay)"
                )
                self.problems.add(self.problems.place_of(("overrides", keys.STOP), choice), message, run.name)

    def check_same(self, runs: list[Run], repeated: Collection[frozenset[str]]) -> None:
        """Refuse runs with the same identity, which would train the same thing twice. `repeated`: pairs that do so on
        purpose."""
        seen: dict[str, Run] = {}
        for run in runs:
            # Their identities stay apart, so that runs trained before keep theirs.
            key = files.canonical({**run.documents["run"], "data": blends.in_shares(run.run.data)})
            other = seen.setdefault(key, run)
            if other is run or {run.name, other.name} in repeated:
                continue
            place = ("sweep", "runs", run.name) if ("sweep", "runs", run.name) in self.loaded.places else ("sweep",)
            message = f"the runs {other.name!r} and {run.name!r} train the same thing: {equality(other, run)}"
            self.problems.add(place, message)

    def corpus_tokenizers(self, runs: list[Run]) -> dict[str, str | None]:
        """For each corpus the tokenizer that all its runs agree on; None if it consists of tokens without one."""
        given: dict[str, str | None] = {}
        found: dict[str, dict[str, str]] = {}  # corpus -> tokenizer -> a model that needs it
        for run in runs:
            model = run.config.models[run.model]
            for corpus in run.corpora:
                wanted = run.config.corpora[corpus]
                if wanted.has_examples:
                    given[corpus] = None  # tokenized by a template, run by run
                    continue
                asked = wanted.tokenizer or model.tokenizer or (model.hf if wanted.source else None)
                if asked is None and wanted.source is None:
                    given[corpus] = None
                elif asked is None:
                    message = f"is missing: the model {run.model} is a recipe, and names no tokenizer"
                    self.problems.add(("corpora", corpus, "tokenizer"), message)
                else:
                    found.setdefault(corpus, {}).setdefault(asked, run.model)
        for corpus, asked in found.items():
            if len(asked) > 1 and not tokenizer.are_same(asked):
                listed = ", ".join(f"{model} wants {name}" for name, model in asked.items())
                message = (
                    f"the models need different tokenizers ({listed}): define the corpus once for each of them, or "
                    f"name one tokenizer for all (models.<name>.tokenizer: {next(iter(asked))})"
                )
                self.problems.add(("corpora", corpus), message)
        return given | {corpus: next(iter(asked)) for corpus, asked in found.items()}


def equality(one: Run, other: Run) -> str:
    """In which keys two runs with the same identity differ, and what to do."""
    differing = sorted(key for key in {*one.values, *other.values} if differs(key, one, other))
    if not differing:
        return "they are equal; remove one"
    said = f"they differ only in {', '.join(differing)}, which"
    if one.documents["launch"] == other.documents["launch"]:
        return f"{said} changes nothing here; remove one"
    return (
        f"{said} changes no loss; remove one, or compare their speed: by `snakemake tune` (tune.also), or with "
        "training.nudge: 1 in one of them, which moves its first weights by a unit in the last place"
    )


def differs(key: str, one: Run, other: Run) -> bool:
    """Whether two runs differ in a swept key. Setting what the experiment has anyway is no difference."""
    if one.values.get(key) == other.values.get(key):
        return False
    values = value_of(one, key), value_of(other, key)
    return None in values or values[0] != values[1]


def with_costs(runs: Collection[Run], exports: Collection[str], budget: Budget, results: Path) -> list[Run]:
    """The runs with their costs, as far as they are known before preflight."""
    # Summaries of all experiments are only read for a limit: there are many, and every call plans.
    is_limited = budget.gpu_hours is not None or budget.disk is not None
    earlier = costs.history(results) if is_limited else None

    found: dict[tuple[object, ...], costs.Costs | None] = {}

    def of(run: Run) -> costs.Costs | None:
        given = run.config.resources.step_seconds
        before = earlier.of(run.run, run.config.resources.gpu) if earlier else (None, None)
        exported = run.name in exports
        # Seeds and learning rates cost the same. Some models' configs have lists, so that their facts have no hash.
        key = (repr(run.facts), given, before, exported)
        if key not in found:
            found[key] = costs.of_run(run.facts, given=given, earlier=before, mfu=budget.mfu, exported=exported)
        return found[key]

    timed = [replace(run, costs=of(run)) for run in runs]
    return [replace(run, row={**run.row, "jobs": run.jobs}) for run in timed]


def of_store(store: str) -> list[str]:
    """A warning, not an error: where everything is made, nothing is written there."""
    path = closed(store)
    return [f"warning: store: you can't write in {path}: jobs that make something will fail"] if path else []


def unkept(run: Run, wanted: Literal["all"] | Along | None) -> str | None:
    """Why checkpoints won't be there for exports during the training; None if they will."""
    last = run.run.training.get("train_iters")
    kept = will_keep(run)
    if not isinstance(wanted, Along) or not kept or last is None:
        return None
    own = (step for step in range(wanted.every, last + 1, wanted.every) if step > run.run.steps_before)
    missing = [step for step in own if step not in kept]
    if not missing and wanted.every <= last:
        return None
    steps = some_of([str(step) for step in missing or [wanted.every]], SHOWN)
    return (
        f"every {wanted.every} steps: the run {run.name!r} keeps no checkpoint of step {steps}, but of "
        f"{some_of([str(step) for step in kept], SHOWN)}: change checkpoint.save_interval, and with keep_last also "
        "keep_every"
    )


# Keys that only some decays read.
READERS = {
    "schedule.wsd_decay_iters": ("WSD",),
    "optimizer.min_lr": ("linear", "cosine", "inverse-square-root", "WSD"),
}


def unread_keys(runs: Collection[Run]) -> dict[str, list[str]]:
    """Warnings of keys that are set, and that no run's decay reads: each with its runs. What only a recipe knows may be
    read."""
    warnings: dict[str, list[str]] = {}
    for key, readers in READERS.items():
        section, _, name = key.partition(".")
        setting = [run for run in runs if getattr(getattr(run.config, section), name)]
        if {None, *readers} & {run.run.schedule.get("decay") for run in setting}:
            continue
        for run in setting:
            value, decay = getattr(getattr(run.config, section), name), run.config.schedule.decay
            message = f"{key}: {value} does nothing with schedule.decay: {decay}, but with {', '.join(readers)}"
            warnings.setdefault(message, []).append(run.name)
    return warnings


def other_weights(runs: Collection[Run], agreements: Collection[AgreementSpec]) -> dict[str, list[str]]:
    """Warnings of runs that must agree with a reference and begin with other random weights: each with its runs.

    Megatron seeds the weights' generator by the ranks of these axes (`_set_random_seed`), on GPUs and on the CPU.
    """
    by_name, found = {run.name: run for run in runs}, {}
    for one in agreements:
        reference = by_name.get(one.reference)
        if reference is None or one.within == "seed" or (of_reference := _draw(reference)) is None:
            continue
        for name in one.runs:
            own = _draw(by_name[name]) if name in by_name else None
            if own is None or own == of_reference:
                continue
            axis = next(axis for axis in own if own[axis] != of_reference[axis])
            message = (
                f"report.agreements: draws other initial weights than {one.reference}, as parallel.{axis} differs, so "
                f"their losses differ from step 1 on: set models.{reference.model}.init to pretrained (with a config "
                "too: every layout then imports the same random weights), let both continue_from one run, or set "
                "within: seed"
            )
            found.setdefault(message, []).append(name)
    return found


def sets_told_apart(runs: Collection[Run]) -> dict[str, dict[str, str]]:
    """By name the validation sets that have other documents in other runs: by run their names in the report."""
    sets = {
        run.name: {
            name: (blends.documents_of_set(run.run.data, blend, run.run.held_out),)
            for name, blend in blends.validation_sets(run.run.data).items()
        }
        for run in runs
    }
    found: dict[str, dict[str, str]] = {}
    for run, names in blends.told_apart(sets).items():
        for name, shown in names.items():
            found.setdefault(name, {})[run] = shown
    return found


def _draw(run: Run) -> dict[str, int] | None:
    """The sizes on which a run's random initial weights depend; None if it has others, or the sizes are unknown."""
    sizes = Layout.of_run(run.run)
    if sizes is None or run.run.parent or run.config.models[run.model].init != "scratch":
        return None
    if run.run.overrides.get("model.use_cpu_initialization"):  # whole matrices are drawn there, and then divided
        return None
    # vpp doesn't divide weights, but changes the order in which a rank draws them.
    return {axis.name: sizes.size(axis.name) for axis in AXES if axis.weights or axis.name == "vpp"}


def unkept_step(run: Run, wanted: int | str, folder: RunFolder) -> str | None:
    """Why there won't be a checkpoint of the step that `export.checkpoint` names; None if there will, or if nobody
    knows yet.

    A trained run is asked for what it has: the keys that decide what is kept may have changed since.
    """
    kept = None if isinstance(wanted, str) else kept_by(run, folder)
    made = read_if_there(ExportRecord, folder.export)  # it needs its checkpoint no more
    if not kept or wanted in kept or (made and made.iteration == wanted):
        return None
    below = [step for step in kept if step < wanted][-1:]
    above = [step for step in kept if step > wanted][:1]
    nearest = " and ".join(map(str, [*below, *above]))
    later = "" if folder.train_manifest.exists() else ", or change checkpoint.save_interval, keep_last or keep_every"
    text = f"no checkpoint of step {wanted} is kept, the nearest is of {nearest}: name a step that is kept, or `final`"
    return f"{text}{later}"


class Asked:
    """Checks requests other than training: exports, evaluation, agreements, figures, a published table."""

    def __init__(self, experiment: Experiment, problems: Problems, left_out: Collection[str], results: Path):
        """`left_out`: names of runs that are left out, which may still be requested."""
        self.experiment = experiment
        self.problems = problems
        self.left_out = left_out
        self.results = results

    def exports(self, names: list[str]) -> list[str]:
        return self.matching(("export", "runs"), self.experiment.export.runs, names)

    def matching(self, path: Place, patterns: list[str], names: list[str]) -> list[str]:
        """The runs that match names or glob patterns, in the order of runs; a pattern without a match is a problem."""
        found = set()
        for pattern in patterns:
            matched = fnmatch.filter(names, pattern)
            if not matched and not fnmatch.filter(self.left_out, pattern):
                self.problems.add(path, choose(pattern, names, "run"))
            found.update(matched)
        return [name for name in names if name in found]

    def check_exports(self, runs: list[Run], exports: list[str], found: Preflight | None) -> None:
        """`found`: by preflight, whose warning that a run can't be exported counts once it is to be."""
        for run in filter(lambda run: run.name in exports, runs):
            if (known := known_check(run, found)) and known.export:
                message = f"the run {run.name!r}: {outcome.unlike_its_config(known.export)}: {outcome.REMEDY}"
                self.problems.add(("export", "runs"), message)
            if run.config.checkpoint.save_interval == 0:
                message = f"the run {run.name!r} saves no checkpoint to export: set checkpoint.save_interval above 0"
                self.problems.add(("export", "runs"), message)
            if run.config.parallel.fsdp == "megatron":
                message = (
                    f"the run {run.name!r} saves checkpoints of Megatron-FSDP, which Bridge can't convert: remove it"
                )
                self.problems.add(("export", "runs"), message)
            if tasks.changes_random_weights(run.config, run.model):
                message = (
                    f"the run {run.name!r} trains adapters to random weights, which are in no checkpoint: remove it, "
                    f"or set models.{run.model}.init to pretrained"
                )
                self.problems.add(("export", "runs"), message)
            if run.run.has_adapters and run.config.models[run.model].conversion.ranks > 1:
                message = (
                    f"the run {run.name!r} trains adapters, which one process merges: remove it, or, once the model is "
                    f"imported, models.{run.model}.conversion"
                )
                self.problems.add(("export", "runs"), message)
            if not run.config.models[run.model].has_source:
                message = (
                    f"the run {run.name!r} trains a recipe (models.{run.model}), whose Hugging Face architecture is "
                    f"unknown: remove the run here, or name the model too (models.{run.model}.hf or config)"
                )
                self.problems.add(("export", "runs"), message)
            if message := unkept(run, self.experiment.export.checkpoints):
                self.problems.add(("export", "checkpoints"), message)
            own = run.folder(self.results, str(self.experiment.experiment))
            if message := unkept_step(run, self.experiment.export.checkpoint, own):
                self.problems.add(("export", "checkpoint"), message, run.name)
        for run, repository in self.experiment.export.push.items():
            if run not in exports:
                self.problems.add(("export", "push", run), choose(run, exports, "exported run"))
            if not is_id(repository):
                self.problems.add(("export", "push", run), f"{repository!r} is not a hub repository: `owner/name`")

    def evaluated(self, exports: list[str]) -> list[str]:
        wanted = self.experiment.evaluate
        if wanted.command is None:
            return []
        if not exports:
            self.problems.add(
                ("evaluate", "command"), "needs an exported model: name the runs to export under export.runs"
            )
            return []
        return self.matching(("evaluate", "runs"), wanted.runs, exports)

    def agreements(self, names: list[str]) -> list[AgreementSpec]:
        result = []
        for index, agreement in enumerate(self.experiment.report.agreements):
            path = ("report", "agreements", index)
            if agreement.reference not in names and agreement.reference not in self.left_out:
                self.problems.add((*path, "reference"), choose(agreement.reference, names, "run"))
            runs = self.matching((*path, "runs"), agreement.runs, names)
            others = [name for name in runs if name != agreement.reference]
            if self.left_out and (agreement.reference in self.left_out or not others):
                continue
            limits = agreement.model_dump(include={"tolerance", "grad_norm_tolerance", "within", "tensors"})
            if agreement.within == "seed" and not agreement.seeds:
                self.problems.add((*path, "within"), "is `seed`, and no other seed is run: set seeds to 2 or more")
            result.append(
                AgreementSpec(
                    reference=agreement.reference,
                    runs=tuple(others),
                    twins=twins(agreement.reference, agreement.twins),
                    seeds=seeds(agreement.reference, agreement.seeds),
                    **limits,
                )
            )
        return result

    def published(self) -> Tree | None:
        name = self.experiment.report.compare_to
        try:
            return load_published(name) if name else None
        except PublishedError as error:
            self.problems.add(("report", "compare_to"), str(error))
            return None

    def check_baseline(self, results: Path) -> None:
        asked = self.experiment.report.baseline
        own = (results / str(self.experiment.experiment)).resolve()
        for one in ExperimentFolder(own).baselines_of(asked.paths if asked else ()):
            path = one.path
            if path.resolve().is_relative_to(own):
                problem = (
                    f"{path}: lies in this experiment's own results: name another experiment, or a bundle elsewhere"
                )
            elif (
                (path.suffix == ".zip" and path.is_file())
                or ExperimentFolder(path).plan.is_file()
                or (not path.exists() and one.is_copied)
            ):
                continue
            else:
                problem = f"{path}: is neither a bundle (.zip) nor a results folder (it has no plan.tsv)"
            self.problems.add(("report", "baseline", "path"), problem)
