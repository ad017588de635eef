"""One run of the sweep: its values combined, resolved and checked."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError, create_model

from megaboa import blends, files, model_kinds, recipe_files
from megaboa.check import experts, hidden_act, pipeline, refusals, rope, table, tensors
from megaboa.check.fact_sources import not_a
from megaboa.check.facts import Facts
from megaboa.check.facts import Model as ModelFacts
from megaboa.check.rule import Finding, Rule, finding
from megaboa.config import Experiment, LoadedExperiment, check, keys
from megaboa.config.models.model import Model, Tokenizer
from megaboa.config.models.section import Section
from megaboa.config.problems import show
from megaboa.config.sweep import piece
from megaboa.config.yaml_file import dotted
from megaboa.data import tokenizer, tokenizer_files
from megaboa.fields import AT_ENDS_OF_TEXT
from megaboa.layout import Layout
from megaboa.paths import ExperimentFolder
from megaboa.plan import documents, families, image_specs, tasks
from megaboa.plan.choices import Choice, Problems
from megaboa.plan.environment import environment
from megaboa.plan.families import UnknownFamilyError, count_parameters
from megaboa.plan.held_out import TextsOfPlan
from megaboa.plan.plan import Invalid, Run
from megaboa.plan.quantities import Quantities, UnknownQuantityError, overlay, resolve
from megaboa.plan.run_facts import facts_of, hf_config_of
from megaboa.records import Refusal, Tree, plain

# Keys of a Hugging Face config, by the fields of Bridge that rules name.
OF_CONFIG = {
    "model.vocab_size": "vocab_size",
    "model.hidden_size": "hidden_size",
    "model.kv_channels": "head_dim",
    "model.qk_pos_emb_head_dim": "qk_rope_head_dim",
    "model.moe_router_topk": "num_experts_per_tok",
}


class RunPlanner:
    """Plans runs one by one, and keeps what they share: models, parameter counts, problems."""

    def __init__(self, loaded: LoadedExperiment, results: Path, problems: Problems):
        self.loaded = loaded
        self.problems = problems
        self.base = loaded.experiment
        self.skip_illegal = bool(self.base.sweep and self.base.sweep.skip_illegal)
        self.refused = self.earlier_refusals(results / str(self.base.experiment)) if self.skip_illegal else {}
        self.warnings: dict[str, list[str]] = {}  # message -> runs that it applies to
        self.invalid: list[Invalid] = []
        self.params: dict[str, int] = {}
        self.hf_configs: dict[str, Tree | None] = {}
        self.families: set[str] = set()  # models whose family was checked
        self.texts_of = TextsOfPlan()
        self.vocabulary_of = functools.cache(self._vocabulary_of)
        self.models: Tree = {}  # plain trees by name; of two different models with one name, the second is refused

    def plan(self, choice: Choice) -> Run | None:
        """A run, or None if something is wrong with it."""
        before = self.problems.count
        raw = overlay(self.loaded.raw, choice.values)
        model = self.model_of(raw, choice)
        if model is None:
            return None
        given = model
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
            self.problems.add(self.problems.place_of(tuple(key.split(".")), choice), message, choice.name)
        if failed:
            return None
        raw = self.with_length(raw, quantities, own_defaults, choice)
        try:
            config = self.validate(raw)
        except ValidationError as error:
            for path, message in check.messages(error, raw):
                self.problems.add(self.problems.place_of(path, choice), message, choice.name)
            return None
        if not self.check_overrides(config.overrides, choice):
            return None
        quantities = Quantities(raw, own_defaults, params)
        facts = facts_of(config, quantities, self.hf_config(model, definition))
        if self.loaded.machine_gpus is not None:
            facts = replace(facts, cluster=replace(facts.cluster, machine_gpus=self.loaded.machine_gpus))
        illegal = self.check_rules(facts, config, given, choice)
        self.check_recipe(config.models[model].recipe, given, choice)
        self.check_conversion(config.models[model], model, facts, choice)
        self.check_data(config, choice)
        self.check_tokenizer(config, model, choice)
        self.check_vocabulary(config, model, choice)
        self.check_kind(facts, config, choice)
        self.check_task(facts, config, model, choice)
        if self.problems.count > before:
            return None
        reasons = tuple(map(str, illegal))
        run = self.finish(choice, config, model, quantities, facts)
        earlier = self.refused.get(choice.name)
        if not reasons and earlier and earlier.identity == run.digest:
            reasons = earlier.reasons
        if reasons:
            self.invalid.append(Invalid(choice.name, reasons, run.row))
            return None
        return run

    def earlier_refusals(self, experiment: Path) -> dict[str, Refusal]:
        """Preflight's earlier refusals, if packages and image are still the same."""
        if not ExperimentFolder(experiment).refused.exists():
            return {}
        image = image_specs.wanted(self.base)
        return refusals.read(experiment, environment().digest, files.digest(plain(image)) if image else None)

    def finish(self, choice: Choice, config: Experiment, model: str, quantities: Quantities, facts: Facts) -> Run:
        row = documents.row(choice.name, model, config, quantities)
        corpora = tuple(blends.corpora(config.data.model_dump()))
        used = [config.models[model].tokenizer, *(config.corpora[name].tokenizer for name in corpora)]
        asked = documents.run_spec(config, model, int(quantities("world_size")))
        return Run(
            name=choice.name,
            values={dotted(path): value for path, value in choice.values.items()},
            config=config,
            model=model,
            corpora=corpora,
            tokenizers=tuple(dict.fromkeys(name for name in used if name in config.tokenizers)),
            run=asked,
            launch=replace(documents.launch(config, model, quantities), index=documents.index_name(asked)),
            profile=documents.profile(config),
            row=row,
            facts=facts,
            labels=choice.labels,
        )

    def validate(self, raw: Tree) -> Experiment:
        """The typed experiment; sections that are unchanged from the file aren't validated again."""
        changed = {name: value for name, value in raw.items() if value is not self.loaded.raw.get(name)}
        if not changed:
            return self.base
        partial = _sections(frozenset(changed)).model_validate(changed)
        return self.base.model_copy(update={name: getattr(partial, name) for name in changed})

    def model_of(self, raw: Tree, choice: Choice) -> str | None:
        name = raw.get("model")
        if name is None and len(raw["models"]) == 1:
            return next(iter(raw["models"]))
        if name is None:
            names = ", ".join(raw["models"])
            self.problems.add(("model",), f"is missing: say which of the models {names} a run trains", choice.name)
        return name

    def derive(self, raw: Tree, model: str, choice: Choice) -> tuple[Tree, str]:
        """The run's values, and the name of its model. A model that the sweep changes gets its own name, as each is
        made only once."""
        own = {path: value for path, value in choice.values.items() if path[0] == "models" and path[1] == model}
        name = "-".join([model, *(piece(path, value) for path, value in own.items())])
        models = {**self.loaded.raw["models"], name: raw["models"][model]}
        raw = {**raw, "models": models if own else self.loaded.raw["models"], "model": name}
        taken = name in self.loaded.raw["models"] or self.models.setdefault(name, models[name]) != models[name]
        if own and taken:
            self.problems.add(choice.place, f"two different models would be called {name!r}: rename one", choice.name)
        return raw, name

    def check_family(self, model: str, definition: Tree, choice: Choice) -> None:
        """Check a model's family, once: if Bridge can't convert it, the first job would fail."""
        if model in self.families:
            return
        self.families.add(model)
        key, config = "config" if definition.get("config") is not None else "hf", hf_config_of(definition)
        recipe = str(definition.get("recipe") or "")
        if files.is_python(recipe) and (wrong := model_kinds.in_file(recipe)[1]):
            self.problems.add(self.problems.place_of(("models", model, "recipe"), choice), wrong)
        place = ("models", model, key)
        if config and (message := families.problem(config, model, "recipe" in definition)):
            self.problems.add(self.problems.place_of(place, choice), message)
        elif config and (lost := rope.lost(config) or hidden_act.lost(config)):
            if key == "config":
                self.problems.add(self.problems.place_of((*place, *lost.keys), choice), lost.message)
            else:
                self.problems.add(self.problems.place_of(place, choice), f"{definition[key]}/config.json: {lost}")

    def check_recipe(self, recipe: str | None, model: str, choice: Choice) -> None:
        """Warn of a recipe that the bundle will refuse, which is made after all training."""
        outside = recipe_files.outside(image_specs.CLONE, recipe) if recipe and files.is_python(recipe) else []
        if outside:
            what = "it and the modules that it imports" if len(outside) > 1 else "it"
            warning = (
                f"models.{model}.recipe: {outside[0]} lies outside of the clone, so `snakemake bundle` will refuse it: "
                f"copy {what} into recipes/"
            )
            self.warnings.setdefault(warning, []).append(choice.name)

    def choose_blend(self, raw: Tree, choice: Choice) -> None:
        """Use the only corpus if no blend is given."""
        corpora = raw.get("corpora") or {}
        given = raw.get("data") or {}
        if any(given.get(key) is not None for key in ("blend", "blend_per_split")) or not corpora:
            return
        config = hf_config_of(raw["models"][raw["model"]]) or {}
        if not model_kinds.of_family(str(config.get("model_type"))).corpora:  # corpora may only serve a tokenizer
            return
        if len(corpora) > 1:
            self.problems.add(
                ("data", "blend"), f"is missing: say which of {', '.join(corpora)} a run reads", choice.name
            )
        raw["data"] = {**given, "blend": next(iter(corpora))}

    def with_length(self, raw: Tree, quantities: Quantities, own_defaults: bool, choice: Choice) -> Tree:
        """Values with train_iters, even if the length was given in another way."""
        training = dict(raw.get("training") or {})
        tokens = training.pop("train_tokens", None)
        if training.get("train_iters") is not None or (tokens is None and not own_defaults):
            return raw
        try:
            training["train_iters"] = int(quantities("train_iters"))
        except UnknownQuantityError as error:
            path = ("training", "train_iters") if tokens is None else ("training", "train_tokens")
            message = "is missing: set it, or train_tokens" if tokens is None else str(error)
            self.problems.add(path, message, choice.name)
            return raw
        return {**raw, "training": training}

    def check_overrides(self, overrides: Tree, choice: Choice) -> bool:
        """Report overrides that rules and estimates can't read. Names and all other values are Bridge's to check."""
        wrong = {field: words for field, value in overrides.items() if (words := not_a(field, value))}
        for field, words in wrong.items():
            message = f"{show(overrides[field])} is not {words}"
            self.problems.add(self.problems.place_of(("overrides", field), choice), message, choice.name)
        return not wrong

    def check_rules(self, facts: Facts, config: Experiment, model: str, choice: Choice) -> list[Finding]:
        """Report the rules that the run breaks. `model`: the name of its model in the file.

        Errors are returned instead if such runs are left out: because the experiment says so, or because the device was
        determined automatically and is the reason.
        """
        found = table.check(facts)
        errors = [one for one in found if one.level == "error"]
        for one in found:
            if one.level == "warning":
                self.warnings.setdefault(str(one), []).append(choice.name)
        if errors and (self.skip_illegal or (self.loaded.device_found and all(map(table.is_of_device, errors)))):
            return errors
        for one in errors:
            path = _source(one.key, config, model)
            self.problems.add(self.problems.place_of(path, choice), f"{one.message} [{one.rule}]", choice.name)
        return []

    def check_conversion(self, model: Model, name: str, facts: Facts, choice: Choice) -> None:
        if model.has_source and model.conversion.ranks > 1:
            for key, message in conversion_problems(facts.model, model.conversion.layout):
                path = self.problems.place_of(("models", name, "conversion", key), choice)
                self.problems.add(path, message, choice.name)

    def check_data(self, config: Experiment, choice: Choice) -> None:
        """Report settings that Megatron would silently ignore or misuse."""
        data = config.data.model_dump()
        sets, per_split = blends.validation_sets(data), data["blend_per_split"] or {}
        held_out = {("data", "blend_per_split", split): per_split.get(split) for split in ("valid", "test")}
        held_out |= {("data", "validation_sets", name): blend for name, blend in sets.items()}
        texts = self.texts_of(config.corpora, blends.corpora(data))
        origins = {name: found.sources for name, found in texts.items()}
        for path, blend in held_out.items():
            if blend and (message := blends.leak(data, blend, origins)):
                self.problems.add(self.problems.place_of(path, choice), message, choice.name)
        shares_out = config.data.blend is None or float(config.data.split.split(",")[1]) > 0
        has_main = shares_out and "valid" in blends.split_blends(data)
        key = blends.key_of_validation(data)
        interval = config.training.eval_interval
        has_blend = config.data.blend or config.data.blend_per_split  # examples for vision have none
        if interval and config.training.eval_iters and has_blend and not (sets or has_main):
            message = f"{interval}, and there is no validation data: set {key}, or remove training.eval_interval"
            self.problems.add(self.problems.place_of(("training", "eval_interval"), choice), message, choice.name)
        if sets and not has_main:
            message = f"are evaluated together with the main one, and there is none: set {key}"
            self.problems.add(("data", "validation_sets"), message, choice.name)
        if sets and config.training.eval_iters == 0:
            message = "are never evaluated, as training.eval_iters is 0: raise it, or remove them"
            self.problems.add(("data", "validation_sets"), message, choice.name)
        if data["blend_per_split"] is None and config.corpora and not float(config.data.split.split(",")[0]):
            message = f"{config.data.split!r} leaves nothing to train on: raise the first share"
            self.problems.add(self.problems.place_of(("data", "split"), choice), message, choice.name)
        endless = [name for name in blends.corpora(data) if not config.corpora[name].append_eod]
        for key in AT_ENDS_OF_TEXT if endless else ():
            if getattr(config.data, key):
                message = (
                    f"needs end-of-text tokens, and corpora.{endless[0]}.append_eod is false: remove one of the two"
                )
                self.problems.add(self.problems.place_of(("data", key), choice), message, choice.name)

    def check_tokenizer(self, config: Experiment, model: str, choice: Choice) -> None:
        """Report a folder of a model that has no tokenizer, if none is named: it would be found after the import."""
        asked = config.models[model]
        is_needed = asked.hf and not asked.tokenizer and config.corpora
        if is_needed and Path(asked.hf).is_dir() and not tokenizer.is_in(asked.hf):
            message = f"{asked.hf} has no tokenizer: set models.{model}.tokenizer, or copy its files there"
            self.problems.add(("models", model, "hf"), message, choice.name)

    def check_vocabulary(self, config: Experiment, model: str, choice: Choice) -> None:
        """Report corpora with the tokens of another tokenizer than the model's, as far as files show it: for others
        the job `index` finds it out."""
        asked = config.models[model]
        wanted = asked.tokenizer or asked.hf
        for name in blends.corpora(config.data.model_dump()) if wanted else ():
            given = config.corpora[name].tokenizer
            if given and given != wanted and (meant := self.other_meaning(given, str(wanted))):
                message = (
                    f"{given} has another vocabulary than {wanted} of the model {model}: {meant}; remove it, or "
                    f"train a model with {given}"
                )
                self.problems.add(self.problems.place_of(("corpora", name, "tokenizer"), choice), message, choice.name)

    def other_meaning(self, one: str, other: str) -> str | None:
        """How the vocabularies of two tokenizers contradict each other; None if they don't, or if it isn't known."""
        for name, another in ((one, other), (other, one)):
            made = self.base.tokenizers.get(name)
            if made and made.train_on and made != self.base.tokenizers.get(another):
                return f"{name} is trained on {made.train_on}"
        vocabularies = [self.vocabulary_of(one), self.vocabulary_of(other)]
        return None if None in vocabularies else tokenizer.contradiction(*vocabularies)

    def _vocabulary_of(self, name: str) -> dict[str, int] | None:
        """The tokens of a tokenizer of files, or of a folder."""
        if made := self.base.tokenizers.get(name):
            return tokenizer_files.vocabulary(made.files)
        file = Path(name).expanduser() / tokenizer.FILE
        return tokenizer.vocabulary(file) if file.is_file() else None

    def check_kind(self, facts: Facts, config: Experiment, choice: Choice) -> None:
        """Report data that this kind of model can't read."""
        kind = model_kinds.BY_NAME[facts.model.kind]
        for key in ("blend", "blend_per_split", "validation_sets", "fim"):
            if not kind.corpora and getattr(config.data, key):
                message = f"is of texts, and {kind.text} is trained here on {kind.dataset}: remove it"
                self.problems.add(self.problems.place_of(("data", key), choice), message, choice.name)

    def check_task(self, facts: Facts, config: Experiment, model: str, choice: Choice) -> None:
        kind = model_kinds.BY_NAME[facts.model.kind]
        if config.task != "pretrain" and not kind.corpora:
            message = f"{config.task} reads text, and {kind.text} is trained here on {kind.dataset}: set it to pretrain"
            self.problems.add(self.problems.place_of(("task",), choice), message, choice.name)
            return
        for path, message in tasks.problems(config, model):
            self.problems.add(self.problems.place_of(path, choice), message, choice.name)
        if warning := tasks.warning(config, model):
            self.warnings.setdefault(warning, []).append(choice.name)

    def count(self, name: str, model: Tree) -> int:
        """The parameters of a model, counted once."""
        if name not in self.params:
            self.params[name] = _count(model, self.hf_config(name, model), self.base.tokenizers, name)
        return self.params[name]

    def hf_config(self, name: str, model: Tree) -> Tree | None:
        """A model's Hugging Face config, read once; None for a recipe, or if it isn't known before the model is
        fetched."""
        if name not in self.hf_configs:
            self.hf_configs[name] = hf_config_of(model)
        return self.hf_configs[name]


def _source(key: str, config: Experiment, model: str) -> tuple[str, ...]:
    """The path of the value that a rule complains about. Rules name Bridge's fields, where there is no key of ours;
    their values are from overrides, the tokenizer, or the model's own config."""
    if keys.is_own(key):
        return tuple(key.split("."))
    field, asked = OF_CONFIG.get(key), config.models[str(config.model)]
    if key in config.overrides or field is None or asked.recipe is not None:
        return "overrides", key
    if asked.config is None:
        return "models", model, "hf"
    tokenizer = config.tokenizers.get(str(asked.tokenizer))
    if field == "vocab_size" and field not in asked.config and tokenizer and not tokenizer.files:
        return "tokenizers", str(asked.tokenizer), field  # given files have their own size
    return "models", model, "config", field


@functools.cache
def _sections(names: frozenset[str]) -> type[Section]:
    """A model of some sections of the experiment. With all sections, pydantic would copy defaults for every run."""
    fields: Any = {name: (Experiment.model_fields[name].annotation, Experiment.model_fields[name]) for name in names}
    return create_model("Sections", __base__=Section, **fields)


def _count(model: Tree, config: Tree | None, tokenizers: dict[str, Tokenizer], name: str) -> int:
    if model.get("params") is not None:
        return int(model["params"])
    remedy = f"set models.{name}.params"
    if config is None:
        raise UnknownQuantityError(f"the number of parameters is not known before the model is fetched: {remedy}")
    tokenizer = tokenizers.get(str(model.get("tokenizer")))
    if tokenizer and "vocab_size" not in config:
        config = {**config, "vocab_size": tokenizer.size}
    try:
        return count_parameters(config)
    except UnknownFamilyError as error:
        raise UnknownQuantityError(str(error).replace("models.<name>", f"models.{name}")) from None
    except (TypeError, ZeroDivisionError, KeyError):
        raise UnknownQuantityError(
            f"the parameters can't be counted: a size in the model's config is missing, 0, or no number: correct it, "
            f"or {remedy}"
        ) from None


# Can the ranks in `conversion` import a model? Rules about a rank's share, with the key that breaks each.
CONVERSION_RULES: tuple[tuple[str, Rule], ...] = (
    ("tp", tensors.heads_divide),
    ("tp", tensors.key_value_groups_divide),
    ("tp", tensors.feed_forward_divides),
    ("pp", pipeline.layers_fill_the_stages),
    ("ep", experts.expert_parallelism_needs_experts),
    ("ep", experts.experts_divide),
    ("tp", experts.expert_width_divides),
    ("tp", experts.biased_experts_are_not_cut),
)


def conversion_problems(model: ModelFacts, layout: Layout) -> list[tuple[str, str]]:
    """Problems with `conversion`, by key; none if the model is unknown."""
    whole = Facts(layout, model)
    found = [(key, finding(rule, broken).message) for key, rule in CONVERSION_RULES if (broken := rule(whole))]
    if model.vocab_rows is not None and model.vocab_rows % layout.tp:
        found.append(("tp", f"{layout.tp} doesn't divide the {model.vocab_rows} rows of the vocabulary: use pp or ep"))
    return found
