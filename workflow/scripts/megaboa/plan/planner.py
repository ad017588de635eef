"""Makes the plan: every combination of the sweep becomes a checked run; all problems are reported at once."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from megaboa import blends, files
from megaboa.check import costs
from megaboa.config import LoadedExperiment, keys
from megaboa.config.models.resources import Budget
from megaboa.config.yaml_file import dotted
from megaboa.data import tokenizer
from megaboa.plan import device, run_warnings
from megaboa.plan.choices import Choice, Problems, TreePath, bad_names, choices_of, of_sweep
from megaboa.plan.one_run import RunPlanner
from megaboa.plan.outputs import OutputPlanner
from megaboa.plan.parents import Parents, saved_for_other_layouts, split
from megaboa.plan.plan import Invalid, Plan, Run
from megaboa.plan.planned_figures import empty_figures, figure_problems, own_columns
from megaboa.plan.specifications import value_of
from megaboa.records import AgreementSpec
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
        choices, excluded = self.choices(), self.excluded()
        runs = self.with_parents([run for choice in choices if (run := self.each.plan(choice))], choices)
        sound = not self.problems.found
        self.check_runs_are_left(choices, runs, excluded)
        # Exports and patterns refer to runs named by the user, not to those that agreements add.
        left_out = {*excluded, *(run.name for run in self.each.invalid)}
        names = [choice.name for choice in choices if choice.name not in left_out and choice.reference is None]
        outputs = OutputPlanner(self.base, self.problems, left_out, self.results)
        exports = outputs.exports(names)
        outputs.check_exports(runs, exports)
        evaluated, agreements = outputs.evaluated(exports), outputs.agreements(names)
        runs = with_costs(runs, exports, self.base.budget, self.results)
        self.check_budget(runs)
        runs = compared(runs, agreements)
        self.check_compared(runs, choices, agreements, distinct=sound)
        apart = run_warnings.sets_told_apart(runs)
        self.warn(runs, agreements, apart)
        self.each.warnings |= outputs.warnings(runs, exports)
        swept = tuple(dict.fromkeys(dotted(path) for choice in choices for path in choice.values))
        axes = own_columns(self.loaded.factors, swept)
        for path, problem in figure_problems(self.base.report.figures, swept, axes, apart):
            self.problems.add(path, problem)
        published = outputs.published()
        outputs.check_baseline()
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

    def choices(self) -> list[Choice]:
        """The sweep's choices; none if there are too many."""
        found = list(itertools.islice(choices_of(self.loaded), MAX_RUNS + 1))
        if len(found) > MAX_RUNS:
            self.problems.add(("sweep",), f"gives more than {MAX_RUNS} runs: split it")
            return []
        for choice, message in bad_names(found):
            self.problems.add(choice.place, message)
        return found

    def check_runs_are_left(self, choices: list[Choice], runs: list[Run], excluded: Collection[str]) -> None:
        if excluded and not choices:
            self.problems.add(("sweep", "exclude"), "leaves no run: remove a pattern")
        if choices and not runs and not self.problems.found:
            self.problems.add(("sweep", "skip_illegal"), f"no run is left: {self.each.invalid[0]}")

    def check_budget(self, runs: list[Run]) -> None:
        budget, total = self.base.budget, costs.total([run.costs for run in runs])
        for key, message in costs.over_budget(total, budget.gpu_hours, budget.disk).items():
            self.problems.add(tuple(key.split(".")), message)
        if budget.gpu_hours is None:
            return
        untimed = [run.name for run in runs if run.costs and run.costs.step_seconds is None]
        if untimed:  # preflight knows more of the runs that have no costs yet
            self.each.warnings[costs.UNCHECKED] = untimed

    def check_compared(
        self, runs: list[Run], choices: list[Choice], agreements: list[AgreementSpec], distinct: bool
    ) -> None:
        """Refuse runs that would end early or train the same thing twice, unless agreements compare their tensors.
        `distinct`: whether the latter can be judged."""
        by_tensors = [one for one in agreements if one.tensors]
        self.check_ends(runs, choices, {name for one in by_tensors for name in (one.reference, *one.runs)})
        if distinct and self.base.tune.trials_of is None:  # trials of settings may differ in what changes no loss
            self.check_same(runs, {frozenset((one.reference, run)) for one in by_tensors for run in one.runs})

    def warn(self, runs: list[Run], agreements: list[AgreementSpec], apart: dict[str, dict[str, str]]) -> None:
        """Warnings of the whole plan. `apart`: validation sets that have other documents in other runs."""
        for message, names in run_warnings.other_weights(runs, agreements).items():
            self.each.warnings.setdefault(message, []).extend(names)
        self.each.warnings |= run_warnings.unread_keys(runs) | run_warnings.of_sets(apart)

    def excluded(self) -> tuple[str, ...]:
        """The runs that the sweep excludes; a pattern that matches none is a problem."""
        patterns = self.base.sweep.exclude if self.base.sweep else []
        if not patterns:
            return ()
        names = [choice.name for choice in itertools.islice(of_sweep(self.loaded), MAX_RUNS)]
        outputs = OutputPlanner(self.base, self.problems, (), self.results)
        return tuple(outputs.matching(("sweep", "exclude"), patterns, names))

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


def compared(runs: Collection[Run], agreements: Collection[AgreementSpec]) -> list[Run]:
    """The runs; those that agreements compare record what the comparison reads: the routing, by which the report
    distinguishes a tie of two experts from a mistake, and the samples."""
    routing = {name for one in agreements for name in (one.reference, *one.runs, *one.twins)}
    samples = {name for one in agreements if one.tensors for name in (one.reference, *one.runs)}

    def of(run: Run) -> Run:
        launch = run.launch
        if run.name in routing:
            launch = replace(launch, routing=True)
        if run.name in samples:
            launch = replace(launch, samples=True)
        return run if launch is run.launch else replace(run, launch=launch)

    return [of(run) for run in runs]


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
