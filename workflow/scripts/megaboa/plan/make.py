"""Make the plan: every combination of the sweep becomes a run, checked; all problems are reported at once."""

from __future__ import annotations

import itertools
import json
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from megaboa.check import costs
from megaboa.config import LoadedExperiment
from megaboa.config.models.resources import Budget
from megaboa.plan.asked import Asked
from megaboa.plan.choices import Choice, TreePath, bad_names, choices_of
from megaboa.plan.model import Plan, Run
from megaboa.plan.one_run import RunPlanner
from megaboa.plan.parents import Parents
from megaboa.plan.problems import Problems

MAX_RUNS = 100_000


def make_plan(loaded: LoadedExperiment, results: Path | str = "results") -> Plan:
    """The runs of an experiment. Raises ConfigError with all that is wrong with any of them.

    `results` is looked at for runs that continue from others, and for those that preflight refused, where they are left
    out.
    """
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
        if len(choices) > MAX_RUNS:
            self.problems.add(("sweep",), f"gives more than {MAX_RUNS} runs: split it")
            choices = []
        for choice, message in bad_names(choices):
            self.problems.add(choice.place, message)
        runs = self.with_parents([run for choice in choices if (run := self.each.plan(choice))], choices)
        if choices and not self.problems.found:
            self.check_same(runs)
        left_out = {run.name for run in self.each.invalid}
        if choices and not runs and not self.problems.found:
            self.problems.add(("sweep", "skip_illegal"), f"no run is left: {self.each.invalid[0]}")
        names = [choice.name for choice in choices if choice.name not in left_out]
        asked = Asked(self.base, self.problems)
        exports = asked.exports(names)
        asked.check_exports(runs, exports)
        evaluated = asked.evaluated(exports)
        for key, message in over_budget(runs, exports, self.base.budget, self.results).items():
            self.problems.add(tuple(key.split(".")), message)
        agreements = asked.agreements(names)
        compared = {name for one in agreements for name in (one["reference"], *one["runs"])}
        # What the report needs to tell a tie of two experts from a mistake.
        runs = [replace(run, launch=replace(run.launch, routing=True)) if run.name in compared else run for run in runs]
        asked.check_figures(runs)
        published = asked.published()
        tokenizers = self.corpus_tokenizers(runs)
        self.problems.raise_all()
        return Plan(
            name=str(self.base.experiment),
            experiment=self.base,
            runs=runs,
            models={run.model: run.config.models[run.model] for run in runs},
            corpus_tokenizers=tokenizers,
            exports=exports,
            evaluated=evaluated,
            agreements=agreements,
            published=published,
            invalid=self.each.invalid,
            warnings=self.each.warnings,
            notes=self.loaded.notes,
        )

    def with_parents(self, runs: list[Run], choices: list[Choice]) -> list[Run]:
        """The runs; those that continue from another's checkpoint know which one."""
        if not any(run.config.continue_from for run in runs):
            return runs
        by_name = {choice.name: choice for choice in choices}

        def complain(run: Run, path: TreePath, message: str) -> None:
            self.problems.add(self.problems.place_of(path, by_name[run.name]), message, run.name)

        return Parents(str(self.base.experiment), runs, list(by_name), self.results, complain).join()

    def check_same(self, runs: list[Run]) -> None:
        """Two runs with one identity would train the same thing twice."""
        seen: dict[str, Run] = {}
        for run in runs:
            key = json.dumps(run.run, sort_keys=True)
            other = seen.setdefault(key, run)
            if other is run:
                continue
            differing = sorted(
                key for key in {*run.values, *other.values} if run.values.get(key) != other.values.get(key)
            )
            why = (
                f"they differ only in {', '.join(differing)}, which changes nothing here"
                if differing
                else "they are equal"
            )
            place = ("sweep", "runs", run.name) if ("sweep", "runs", run.name) in self.loaded.places else ("sweep",)
            self.problems.add(
                place, f"the runs {other.name!r} and {run.name!r} train the same thing: {why}; remove one"
            )

    def corpus_tokenizers(self, runs: list[Run]) -> dict[str, str]:
        """For each corpus the one tokenizer that all its runs agree on."""
        found: dict[str, dict[str, str]] = {}  # corpus -> tokenizer -> a model that asks for it
        for run in runs:
            model = run.config.models[run.model]
            for corpus in run.corpora:
                asked = run.config.corpora[corpus].tokenizer or model.tokenizer or model.hf
                if asked is None:
                    message = f"is missing: the model {run.model} is a recipe, and names no tokenizer"
                    self.problems.add(("corpora", corpus, "tokenizer"), message)
                else:
                    found.setdefault(corpus, {}).setdefault(asked, run.model)
        for corpus, asked in found.items():
            if len(asked) > 1:
                listed = ", ".join(f"{model} wants {tokenizer}" for tokenizer, model in asked.items())
                message = f"the models need different tokenizers ({listed}): define the corpus once for each of them"
                self.problems.add(("corpora", corpus), message)
        return {corpus: next(iter(asked)) for corpus, asked in found.items()}


def over_budget(runs: Collection[Run], exports: Collection[str], budget: Budget, results: Path) -> dict[str, str]:
    """What exceeds the budget, by key, as far as costs are known before preflight."""
    if budget.gpu_hours is None and budget.disk is None:
        return {}
    speeds = costs.measured_speeds(results)
    found = [
        costs.of_run(
            run.facts,
            given=run.config.resources.step_seconds,
            measured=speeds.get(costs.speed_key(run.run, run.config.resources.gpu)),
            mfu=budget.mfu,
            exported=run.name in exports,
        )
        for run in runs
    ]
    return costs.over_budget(costs.total(found), budget.gpu_hours, budget.disk)
