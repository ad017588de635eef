"""Make the plan: every combination of the sweep becomes a run, checked; all problems are reported at once."""

from __future__ import annotations

import fnmatch
import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megaboa import blends, files
from megaboa.config import ConfigError, Experiment, LoadedExperiment, Problem, check, keys
from megaboa.config.errors import choose
from megaboa.config.models.model import Tokenizer
from megaboa.config.published import PublishedError, load_published
from megaboa.config.sweep import Option, piece
from megaboa.config.yaml_file import dotted
from megaboa.data.sources import is_hub_id
from megaboa.plan import documents, families, figures
from megaboa.plan.costs import over_budget
from megaboa.plan.facts import facts_of, hf_config_of
from megaboa.plan.model import Invalid, Plan, Run
from megaboa.plan.parameters import UnknownFamilyError, count_parameters
from megaboa.plan.parents import Parents
from megaboa.plan.quantities import Quantities, UnknownQuantityError, overlay, resolve
from megaboa.plan.shared import environment
from megaboa.preflight import refusals, table
from megaboa.preflight.facts import Facts
from megaboa.preflight.rule import Finding

MAX_NAME = 100
MAX_RUNS = 100_000

TreePath = tuple[str, ...]


def make_plan(loaded: LoadedExperiment, results: Path | str = "results") -> Plan:
    """The runs of an experiment. Raises ConfigError with all that is wrong with any of them.

    `results` is looked at for runs that go on from others, and for those that preflight refused, where they are left
    out.
    """
    return _Planner(loaded, Path(results)).plan()


@dataclass(frozen=True)
class _Choice:
    """One combination of the sweep: a run before it is resolved."""

    name: str
    values: dict[TreePath, Any]
    place: tuple[str | int, ...]


def _choices(loaded: LoadedExperiment) -> Iterator[_Choice]:
    if not loaded.factors:
        yield _Choice("run", {}, ())
    elif len(loaded.factors) == 1:
        for option in loaded.factors[0].options:
            yield _Choice(option.name, option.values, option.place)
    else:
        for options in itertools.product(*(factor.options for factor in loaded.factors)):
            yield _join(options)


def _join(options: tuple[Option, ...]) -> _Choice:
    values = {path: value for option in options for path, value in option.values.items()}
    return _Choice("-".join(option.name for option in options), values, ("sweep",))


class _Planner:
    def __init__(self, loaded: LoadedExperiment, results: Path):
        self.loaded = loaded
        self.results = results
        self.base = loaded.experiment
        self.skip_illegal = bool(self.base.sweep and self.base.sweep.skip_illegal)
        self.refused = self.earlier_refusals(results / str(self.base.experiment)) if self.skip_illegal else {}
        self.problems: dict[Problem, list[str]] = {}  # with the runs that have it
        self.count_of_problems = 0
        self.warnings: dict[str, list[str]] = {}  # with the runs that have it
        self.invalid: list[Invalid] = []
        self.params: dict[str, int] = {}
        self.hf_configs: dict[str, dict[str, Any] | None] = {}
        self.families: set[str] = set()  # models whose family was looked at
        self.models: dict[str, Any] = {}  # by name, as plain trees: of two different ones with one name, one is refused

    def problem(self, path: tuple[str | int, ...], message: str, run: str = "") -> None:
        self.problems.setdefault(self.loaded.problem(path, message), []).append(run)
        self.count_of_problems += 1

    def plan(self) -> Plan:
        choices = list(itertools.islice(_choices(self.loaded), MAX_RUNS + 1))
        if len(choices) > MAX_RUNS:
            self.problem(("sweep",), f"gives more than {MAX_RUNS} runs: split it")
            choices = []
        self.check_names(choices)
        runs = self.with_parents([run for choice in choices if (run := self.run(choice))], choices)
        if choices and not self.problems:
            self.check_same(runs)
        left_out = {run.name for run in self.invalid}
        if choices and not runs and not self.problems:
            self.problem(("sweep", "skip_illegal"), f"no run is left: {self.invalid[0]}")
        names = [choice.name for choice in choices if choice.name not in left_out]
        exports = self.matching(("export", "runs"), self.base.export.runs, names)
        self.check_exports(runs, exports)
        evaluated = self.evaluated(exports)
        for key, message in over_budget(runs, exports, self.base.budget, self.results).items():
            self.problem(tuple(key.split(".")), message)
        agreements = self.agreements(names)
        self.check_figures(runs)
        published = self.published()
        tokenizers = self.corpus_tokenizers(runs)
        if self.problems:
            raise ConfigError(self.complete(problem, names) for problem, names in self.problems.items())
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
            invalid=self.invalid,
            warnings=self.warnings,
            notes=self.loaded.notes,
        )

    @staticmethod
    def complete(problem: Problem, runs: list[str]) -> Problem:
        """Say which runs have a problem, once."""
        named = [name for name in runs if name]
        if not named or named == ["run"]:
            return problem
        more = f" and {len(named) - 3} more" if len(named) > 3 else ""
        where = f" (run{'s' if len(named) > 1 else ''} {', '.join(named[:3])}{more})"
        return Problem(problem.key, problem.message + where, problem.file, problem.line)

    def with_parents(self, runs: list[Run], choices: list[_Choice]) -> list[Run]:
        """The runs; those that go on from another's checkpoint know which one."""
        if not any(run.config.continue_from for run in runs):
            return runs
        by_name = {choice.name: choice for choice in choices}

        def complain(run: Run, path: TreePath, message: str) -> None:
            self.problem(self.place_of(path, by_name[run.name]), message, run.name)

        return Parents(str(self.base.experiment), runs, list(by_name), self.results, complain).join()

    # names

    def check_names(self, choices: list[_Choice]) -> None:
        seen: set[str] = set()
        for choice in choices:
            if len(choice.name) > MAX_NAME:
                message = (
                    f"the run name {choice.name!r} is longer than {MAX_NAME} characters: give names under sweep.runs"
                )
                self.problem(choice.place, message)
            elif not re.fullmatch(r"[A-Za-z][A-Za-z0-9._-]*", choice.name):
                self.problem(
                    choice.place, f"the run name {choice.name!r} does not begin with a letter: label the values"
                )
            if choice.name in seen:
                message = (
                    f"two runs are called {choice.name!r}, and would share a folder: remove one, or label the values"
                )
                self.problem(choice.place, message)
            seen.add(choice.name)

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
            self.problem(place, f"the runs {other.name!r} and {run.name!r} train the same thing: {why}; remove one")

    def matching(self, path: tuple[str | int, ...], patterns: list[str], names: list[str]) -> list[str]:
        """The runs that match names or glob patterns, in the runs' order; a pattern without a match is a problem."""
        found = set()
        for pattern in patterns:
            matched = fnmatch.filter(names, pattern)
            if not matched:
                self.problem(path, choose(pattern, names, "run"))
            found.update(matched)
        return [name for name in names if name in found]

    def check_exports(self, runs: list[Run], exports: list[str]) -> None:
        for run in filter(lambda run: run.name in exports, runs):
            if run.config.checkpoint.save_interval == 0:
                message = f"the run {run.name!r} saves no checkpoint to export: set checkpoint.save_interval above 0"
                self.problem(("export", "runs"), message)
            if run.config.parallel.fsdp == "megatron":
                message = (
                    f"the run {run.name!r} saves checkpoints of Megatron-FSDP, which Bridge can't convert: remove it"
                )
                self.problem(("export", "runs"), message)
            if run.config.models[run.model].recipe:
                message = (
                    f"the run {run.name!r} trains a recipe (models.{run.model}), and no Hugging Face model is known of "
                    "which it is one: remove the run here, or describe the model by hf or config"
                )
                self.problem(("export", "runs"), message)
        for run, repository in self.base.export.push.items():
            if run not in exports:
                self.problem(("export", "push", run), choose(run, exports, "exported run"))
            if not is_hub_id(repository):
                self.problem(("export", "push", run), f"{repository!r} is no repository of the hub: `owner/name`")

    def evaluated(self, exports: list[str]) -> list[str]:
        wanted = self.base.evaluate
        if wanted.command is None:
            return []
        if not exports:
            self.problem(("evaluate", "command"), "needs an exported model: name the runs to export under export.runs")
            return []
        return self.matching(("evaluate", "runs"), wanted.runs, exports)

    def agreements(self, names: list[str]) -> list[dict[str, Any]]:
        result = []
        for index, agreement in enumerate(self.base.report.agreements):
            path = ("report", "agreements", index)
            if agreement.reference not in names:
                self.problem((*path, "reference"), choose(agreement.reference, names, "run"))
            runs = self.matching((*path, "runs"), agreement.runs, names)
            others = [name for name in runs if name != agreement.reference]
            result.append({"reference": agreement.reference, "runs": others, "tolerance": agreement.tolerance})
        return result

    def check_figures(self, runs: list[Run]) -> None:
        swept = dict.fromkeys(key for run in runs for key in run.values)
        seen: set[str] = set()
        for index, figure in enumerate(self.base.report.figures):
            path = ("report", "figures", index)
            if found := figures.problem(figure, swept):
                self.problem((*path, found[0]), found[1])
            if figure.name in seen:
                self.problem((*path, "name"), f"two figures are called {figure.name!r}: rename one")
            seen.add(figure.name)

    def published(self) -> dict[str, Any] | None:
        name = self.base.report.compare_to
        try:
            return load_published(name) if name else None
        except PublishedError as error:
            self.problem(("report", "compare_to"), str(error))
            return None

    # one run

    def run(self, choice: _Choice) -> Run | None:
        """A run, or None if something is wrong with it."""
        before = self.count_of_problems
        raw = overlay(self.loaded.raw, choice.values)
        model = self.model_of(raw, choice)
        if model is None:
            return None
        raw, model = self.derive(raw, model, choice)
        self.choose_blend(raw, choice)
        definition = raw["models"][model]
        self.check_family(model, definition, choice)
        own_defaults = definition.get("recipe") is None

        def params() -> int:
            return self.count(model, definition)

        quantities = Quantities(raw, own_defaults, params)
        raw, failed = resolve(raw, quantities)
        for key, message in failed:
            self.problem(self.place_of(tuple(key.split(".")), choice), message, choice.name)
        if failed:
            return None
        raw = self.with_length(raw, quantities, own_defaults, choice)
        try:
            config = self.validate(raw)
        except ValidationError as error:
            for path, message in check.messages(error, raw):
                self.problem(self.place_of(path, choice), message, choice.name)
            return None
        quantities = Quantities(raw, own_defaults, params)
        facts = facts_of(config, quantities, self.hf_config(model, definition))
        illegal = self.check_rules(facts, choice)
        self.check_data(config, choice)
        if self.count_of_problems > before:
            return None
        reasons = tuple(map(str, illegal))
        run = self.finish(choice, config, model, quantities, facts)
        earlier = self.refused.get(choice.name)
        if not reasons and earlier and earlier["identity"] == files.digest(run.run):
            reasons = tuple(earlier["reasons"])
        if reasons:
            self.invalid.append(Invalid(choice.name, reasons, run.row))
            return None
        return run

    @staticmethod
    def earlier_refusals(experiment: Path) -> dict[str, Any]:
        """What preflight refused, as long as the packages are the same."""
        return refusals.read(experiment, environment()["digest"]) if (experiment / "refused.json").exists() else {}

    def finish(self, choice: _Choice, config: Experiment, model: str, quantities: Quantities, facts: Facts) -> Run:
        row = documents.row(choice.name, model, config, quantities)
        corpora = tuple(blends.corpora(config.data.model_dump()))
        used = [config.models[model].tokenizer, *(config.corpora[name].tokenizer for name in corpora)]
        identity = documents.identity(config, model, int(quantities("world_size")))
        return Run(
            name=choice.name,
            values={dotted(path): value for path, value in choice.values.items()},
            config=config,
            model=model,
            corpora=corpora,
            tokenizers=tuple(dict.fromkeys(name for name in used if name in config.tokenizers)),
            run=identity,
            launch={**documents.launch(config, model), "index": documents.index_name(identity)},
            profile=documents.profile(config),
            row=row,
            facts=facts,
        )

    def place_of(self, path: TreePath, choice: _Choice) -> tuple[str | int, ...]:
        """Where a run's value at a path was written: in the sweep, or else in its section."""
        if path not in choice.values:
            return path
        candidates = [(*choice.place, dotted(path)), ("sweep", "grid", dotted(path)), ("sweep", "zip", dotted(path))]
        return next((place for place in candidates if place in self.loaded.places), choice.place)

    def validate(self, raw: dict[str, Any]) -> Experiment:
        """The typed experiment; sections that are as in the file are not checked again."""
        changed = {name: value for name, value in raw.items() if value is not self.loaded.raw.get(name)}
        if not changed:
            return self.base
        needed = {"models": {"m": {"recipe": "r"}}} if "models" not in changed else {}
        partial = Experiment.model_validate({**needed, **changed})
        return self.base.model_copy(update={name: getattr(partial, name) for name in changed})

    def model_of(self, raw: dict[str, Any], choice: _Choice) -> str | None:
        name = raw.get("model")
        if name is None and len(raw["models"]) == 1:
            return next(iter(raw["models"]))
        if name is None:
            names = ", ".join(raw["models"])
            self.problem(("model",), f"is missing: say which of the models {names} a run trains", choice.name)
        return name

    def derive(self, raw: dict[str, Any], model: str, choice: _Choice) -> tuple[dict[str, Any], str]:
        """The run's model by name. One that the sweep changes gets a name of its own, as models are made once each."""
        own = {path: value for path, value in choice.values.items() if path[0] == "models" and path[1] == model}
        name = "-".join([model, *(piece(path, value) for path, value in own.items())])
        models = {**self.loaded.raw["models"], name: raw["models"][model]}
        raw = {**raw, "models": models if own else self.loaded.raw["models"], "model": name}
        taken = name in self.loaded.raw["models"] or self.models.setdefault(name, models[name]) != models[name]
        if own and taken:
            self.problem(choice.place, f"two different models would be called {name!r}: rename one", choice.name)
        return raw, name

    def check_family(self, model: str, definition: dict[str, Any], choice: _Choice) -> None:
        """Once per model: a family that Bridge can't convert would fail in the first job."""
        if model in self.families:
            return
        self.families.add(model)
        key, config = "config" if definition.get("config") is not None else "hf", hf_config_of(definition)
        if config and (message := families.problem(str(config.get("model_type")), model)):
            self.problem(self.place_of(("models", model, key), choice), message)

    def choose_blend(self, raw: dict[str, Any], choice: _Choice) -> None:
        """The only corpus there is, where no blend is given."""
        corpora = raw.get("corpora") or {}
        given = raw.get("data") or {}
        if any(given.get(key) is not None for key in ("blend", "blend_per_split")) or not corpora:
            return
        if len(corpora) > 1:
            self.problem(("data", "blend"), f"is missing: say which of {', '.join(corpora)} a run reads", choice.name)
        raw["data"] = {**given, "blend": next(iter(corpora))}

    def with_length(
        self, raw: dict[str, Any], quantities: Quantities, own_defaults: bool, choice: _Choice
    ) -> dict[str, Any]:
        """train_iters, whichever way the length was given."""
        training = dict(raw.get("training") or {})
        tokens = training.pop("train_tokens", None)
        if training.get("train_iters") is not None or (tokens is None and not own_defaults):
            return raw
        try:
            training["train_iters"] = int(quantities("train_iters"))
        except UnknownQuantityError as error:
            path = ("training", "train_iters") if tokens is None else ("training", "train_tokens")
            message = "is missing: set it, or train_tokens" if tokens is None else str(error)
            self.problem(path, message, choice.name)
            return raw
        return {**raw, "training": training}

    def check_rules(self, facts: Facts, choice: _Choice) -> list[Finding]:
        """Report the rules that the run breaks; those of an error are returned, where such runs are left out."""
        found = table.check(facts)
        errors = [one for one in found if one.level == "error"]
        for one in found:
            if one.level == "warning":
                self.warnings.setdefault(str(one), []).append(choice.name)
        if errors and self.skip_illegal:
            return errors
        for one in errors:
            path = tuple(one.key.split(".")) if one.key in keys.all_keys() else ("overrides", one.key)
            self.problem(self.place_of(path, choice), f"{one.message} [{one.rule}]", choice.name)
        return []

    def check_data(self, config: Experiment, choice: _Choice) -> None:
        """What Megatron would train on, or leave out, without a word."""
        data = config.data.model_dump()
        sets = blends.validation_sets(data)
        for name, blend in sets.items():
            if message := blends.set_problem(data, blend):
                self.problem(("data", "validation_sets", name), message, choice.name)
        main = config.data.blend is None or float(config.data.split.split(",")[1]) > 0
        if sets and not (main and "valid" in blends.split_blends(data)):
            key = "data.split" if config.data.blend else "data.blend_per_split.valid"
            message = f"are evaluated together with the main one, and there is none: set {key}"
            self.problem(("data", "validation_sets"), message, choice.name)
        if sets and config.training.eval_iters == 0:
            message = "are never evaluated, as training.eval_iters is 0: raise it, or remove them"
            self.problem(("data", "validation_sets"), message, choice.name)
        if config.data.reset_attention_mask and (cp := config.parallel.cp) > 1:
            message = f"no attention takes its mask with context parallelism: set parallel.cp to 1, not {cp}"
            self.problem(self.place_of(("data", "reset_attention_mask"), choice), message, choice.name)

    def count(self, name: str, model: dict[str, Any]) -> int:
        """The parameters of a model, counted once."""
        if name not in self.params:
            self.params[name] = _count(model, self.hf_config(name, model), self.base.tokenizers, name)
        return self.params[name]

    def hf_config(self, name: str, model: dict[str, Any]) -> dict[str, Any] | None:
        """A model's Hugging Face config, read once; None where it isn't known before the model is fetched, or a
        recipe's."""
        if name not in self.hf_configs:
            self.hf_configs[name] = hf_config_of(model)
        return self.hf_configs[name]

    # what runs share

    def corpus_tokenizers(self, runs: list[Run]) -> dict[str, str]:
        """For each corpus the one tokenizer that all its runs agree on."""
        found: dict[str, dict[str, str]] = {}  # corpus -> tokenizer -> a model that asks for it
        for run in runs:
            model = run.config.models[run.model]
            for corpus in run.corpora:
                asked = run.config.corpora[corpus].tokenizer or model.tokenizer or model.hf
                if asked is None:
                    message = f"is missing: the model {run.model} is a recipe, and names no tokenizer"
                    self.problem(("corpora", corpus, "tokenizer"), message)
                else:
                    found.setdefault(corpus, {}).setdefault(asked, run.model)
        for corpus, asked in found.items():
            if len(asked) > 1:
                listed = ", ".join(f"{model} wants {tokenizer}" for tokenizer, model in asked.items())
                message = f"the models need different tokenizers ({listed}): define the corpus once for each of them"
                self.problem(("corpora", corpus), message)
        return {corpus: next(iter(asked)) for corpus, asked in found.items()}


def _count(model: dict[str, Any], config: dict[str, Any] | None, tokenizers: dict[str, Tokenizer], name: str) -> int:
    if model.get("params") is not None:
        return int(model["params"])
    remedy = f"set models.{name}.params"
    if config is None:
        raise UnknownQuantityError(f"the number of parameters is not known before the model is fetched: {remedy}")
    tokenizer = tokenizers.get(str(model.get("tokenizer")))
    if tokenizer and "vocab_size" not in config:
        config = {**config, "vocab_size": tokenizer.vocab_size}
    try:
        return count_parameters(config)
    except UnknownFamilyError as error:
        raise UnknownQuantityError(str(error).replace("models.<name>", f"models.{name}")) from None
    except (TypeError, ZeroDivisionError, KeyError) as error:
        raise UnknownQuantityError(
            f"the parameters can't be counted ({error}): check the model's config, or {remedy}"
        ) from None
