"""What the runs of an experiment share: corpora, tokenizers, models.

Each of them is made once, by its own job, from a specification written by the plan. A specification contains everything
that the job needs to know, so that an edited experiment only reruns jobs whose own part has changed.
"""

from __future__ import annotations

import email
import functools
import importlib.metadata
import os
import platform
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from megaboa import conversion, files, store
from megaboa.check import search_space
from megaboa.config.models.data import Corpus
from megaboa.data import pairs, sources
from megaboa.paths import ExperimentFolder
from megaboa.plan import documents, image_specs
from megaboa.plan.plan import Plan, Run
from megaboa.records import (
    AlongSpec,
    BaselineSpec,
    Budget,
    ConversionSpec,
    CorpusSpec,
    CostsSpec,
    Environment,
    EvaluateSpec,
    ExportSpec,
    GenerateSpec,
    ImageAsked,
    IndexSpec,
    InsideAsked,
    ModelSource,
    ModelSpec,
    Pair,
    Record,
    ReportSpec,
    RunsSpec,
    Setting,
    TensorsSpec,
    TextSpec,
    TokenizerSpec,
    Tree,
    TuneSpec,
    plain,
    read_if_there,
)
from megaboa.scheduler.registry import cluster

Reference = dict[str, str]
NO_PROFILE: Mapping[str, str] = MappingProxyType({})

CONVERSION_MB = 3000  # for importing torch, transformers and Megatron: 0.8 GB, with some margin
MODEL_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.tiktoken", "chat_template*")  # in a local folder
UNKNOWN_PARAMS = 8_000_000_000  # assumed for a model that isn't fetched yet


def environment() -> Environment:
    """The ranks' environment if they use no image."""
    content = Environment(runtime="none", python=platform.python_version(), packages=dict(_packages()))
    return replace(content, digest=files.digest(plain(content)))


@functools.cache
def _packages() -> Mapping[str, str]:
    """The packages of this Python, with their versions. Only the head of each metadata file is read, as some are very
    long."""
    found = {}
    for package in importlib.metadata.distributions():
        text = package.read_text("METADATA") or package.read_text("PKG-INFO") or package.read_text("") or ""
        head = email.message_from_string(text.partition("\n\n")[0])
        if head["Name"]:
            found[head["Name"]] = head["Version"]
    return MappingProxyType(found)


def expanded(path: str) -> str:
    """A path with `~` expanded; anything else unchanged."""
    return os.path.expanduser(path)  # noqa: PTH111 (a pattern or an id is no path)


def expanded_source(source: str | list[str]) -> list[str]:
    return [one if sources.hub_id(one) else expanded(one) for one in sources.as_list(source)]


def pairs_of(corpus: Corpus) -> tuple[Pair, ...]:
    return tuple(pairs.pairs_of(corpus.megatron, corpus.split)) if corpus.megatron is not None else ()


def files_of(corpus: Corpus) -> list[str]:
    """The files of a corpus; empty if its source isn't a file."""
    if corpus.source is None:
        return pairs.paths(pairs_of(corpus))
    return sources.paths(expanded_source(corpus.source))


class Shared:
    """The stages before training, as needed by the plan's runs."""

    def __init__(self, plan: Plan, results: Path | str = "results", profile: Mapping[str, str] = NO_PROFILE):
        """`profile`: the Snakemake profile's default-resources."""
        self.plan = plan
        self.profile = profile
        self.folder = Path(results) / plan.name
        self.paths = ExperimentFolder(self.folder)
        used = {name: corpus for name, corpus in plan.experiment.corpora.items() if name in plan.corpus_tokenizers}
        self.corpora = used
        self.sourced_models = [name for name, model in plan.models.items() if model.has_source]
        self.imported_models = [name for name in self.sourced_models if plan.models[name].init == "pretrained"]

    @functools.cached_property
    def runs(self) -> dict[str, Run]:
        """The plan's runs, by name."""
        return {run.name: run for run in self.plan.runs}

    @property
    def converted_models(self) -> list[str]:
        """Models that are imported, or that several ranks export."""
        by_ranks = {self.runs[name].model for name in self.plan.exports}
        by_ranks = {name for name in by_ranks if self.plan.models[name].conversion.ranks > 1}
        return [name for name in self.sourced_models if name in self.imported_models or name in by_ranks]

    @property
    def on_cluster(self) -> bool:
        return cluster().where(self.profile).partition is not None

    @property
    def import_proofs(self) -> list[str]:
        return [str(self.paths.model(name).proof) for name in self.imported_models]

    @property
    def image_manifest(self) -> list[str]:
        """The image as an input: a run waits for its image, and becomes another run in another image."""
        return [str(self.paths.image)] if self.plan.experiment.image.runtime != "none" else []

    @property
    def preflights(self) -> list[str]:
        """Results of preflight, which a run must pass before it requests a GPU."""
        inside = [str(self.paths.preflight_in_image)] if self.image_manifest else []
        return [str(self.paths.preflight), *inside]

    @functools.cached_property
    def metrics(self) -> list[str]:
        folders = [self.paths.run(run.name) for run in self.plan.runs]
        return [str(path) for one in folders for path in (one.steps_table, one.summary, one.goodput)]

    @property
    def verifications(self) -> list[str]:
        return [str(self.paths.corpus(name).verification) for name in self.corpora]

    @property
    def index_manifests(self) -> list[str]:
        return [str(self.paths.index(name)) for name in self.indexes]

    @property
    def reported(self) -> list[str]:
        """What the report needs. It shows missing results of other stages as missing."""
        return [str(self.paths.image), *self.metrics, *self.verifications, *self.index_manifests]

    @property
    def tensors(self) -> list[str]:
        """The comparison of checkpoints, if an agreement asks for it."""
        return [str(self.paths.tensors)] if self._tensors().agreements else []

    @property
    def tried(self) -> list[str]:
        """Inputs of trials, if the runs are settings to try."""
        if not self.plan.experiment.tune.trials_of:
            return []
        return list(dict.fromkeys(path for run in self.plan.runs for path in self.run_inputs(run)))

    @property
    def compared(self) -> list[str]:
        """The manifests of runs whose checkpoints are compared."""
        groups = self._tensors().agreements
        names = dict.fromkeys(name for one in groups for name in (one.reference, *one.runs, *one.twins))
        return [str(self.paths.run(name).train_manifest) for name in names]

    @property
    def compared_mb(self) -> int:
        """Memory for two tensors. One may contain all layers, and thus most of the model."""
        models = {self.runs[Path(path).parent.name].model for path in self.compared}
        return max((self.conversion_mb(model, copies=2) for model in models), default=CONVERSION_MB)

    @property
    def baselines(self) -> list[str]:
        """Inputs for which the report is remade: bundles, and the plans of results folders."""
        asked = self.plan.experiment.report.baseline
        paths = [Path(path) for path in (asked.paths if asked else ())]
        return [str(ExperimentFolder(path).plan if path.is_dir() else path) for path in paths]

    @property
    def analyses(self) -> list[str]:
        return [str(self.paths.run(name).analysis) for name in self.profiled_runs]

    @property
    def export_proofs(self) -> list[str]:
        return [str(self.paths.run(name).proof) for name in self.plan.exports]

    @property
    def along_runs(self) -> list[str]:
        """Runs that are exported during their training."""
        return self.plan.exports if self.plan.experiment.export.checkpoints else []

    @property
    def along(self) -> list[str]:
        return [str(self.paths.run(name).along) for name in self.along_runs]

    @property
    def evaluations(self) -> list[str]:
        return [str(self.paths.run(name).evaluation) for name in self.plan.evaluated]

    @property
    def generations(self) -> list[str]:
        return [str(self.paths.run(name).generations) for name in self.plan.exports]

    @property
    def pushes(self) -> list[str]:
        return [str(self.paths.run(name).push) for name in self.plan.experiment.export.push]

    @property
    def profiled_runs(self) -> list[str]:
        return [run.name for run in self.plan.runs if run.profile.tool != "none"]

    @functools.cached_property
    def indexes(self) -> dict[str, list[Run]]:
        """Runs by the name of the index of their data, which they share."""
        found: dict[str, list[Run]] = {}
        for run in self.plan.runs:
            if run.launch.index:
                found.setdefault(run.launch.index, []).append(run)
        return found

    def write(self) -> None:
        """Write the specifications that have changed, and remove obsolete ones."""
        wanted = dict(self.texts())
        for path, text in wanted.items():
            files.write_if_changed(self.folder / path, text)
        for path in (self.folder / "specs").rglob("*.json"):
            if str(path.relative_to(self.folder)) not in wanted:
                path.unlink()

    def texts(self) -> Iterator[tuple[str, str]]:
        """Texts of the specifications, by their names below the experiment's results."""
        for path, spec in self.specifications().items():
            yield f"specs/{path}", files.canonical(spec)

    def specifications(self) -> dict[str, Tree]:
        """Contents of the specifications."""
        specs: dict[str, Record] = {
            f"tokenizers/{name}.json": self._tokenizer(name) for name in self.plan.experiment.tokenizers
        }
        specs |= {f"corpora/{name}.json": self._corpus(name) for name in self.corpora}
        specs |= {f"models/{name}.json": self._model(name) for name in self.sourced_models}
        specs |= {f"conversions/{name}.json": self._conversion(name) for name in self.converted_models}
        specs |= {f"indexes/{name}.json": self._index(name) for name in self.indexes}
        specs |= {f"exports/{name}.json": self._export(name) for name in self.plan.exports}
        specs |= {f"along/{name}.json": self._along(name) for name in self.along_runs}
        specs |= {"image.json": self._image(), "inside.json": self._inside(), "runs.json": self._runs()}
        specs |= {"costs.json": self._costs(), "report.json": self._report()}
        specs |= {"evaluate.json": self._evaluate(), "generate.json": self._generate()}
        specs |= {"tensors.json": self._tensors()} if self.tensors else {}
        specs |= {"tune.json": self._tune()} if self.plan.experiment.tune.trials_of else {}
        return {name: plain(spec) for name, spec in specs.items()}

    def tokenizer_inputs(self, reference: Reference | None) -> list[str]:
        """The manifest that must exist before a tokenizer can be used; empty if there is none."""
        return [reference["manifest"]] if reference and "manifest" in reference else []

    def corpus_tokenizer(self, corpus: str) -> Reference | None:
        named = self.plan.corpus_tokenizers[corpus]
        return self._reference(named) if named else None

    def model_tokenizer(self, model: str) -> Reference | None:
        named = self.plan.models[model].tokenizer
        return self._reference(named) if named else None

    def corpus_inputs(self, corpus: str) -> list[str]:
        """The files whose change makes a corpus outdated, and the tokenizer that it needs."""
        asked = self.plan.experiment.corpora[corpus]
        texts = [*files_of(asked), *([expanded(asked.filter)] if asked.filter else [])]
        return [*texts, *self.tokenizer_inputs(self.corpus_tokenizer(corpus))]

    def shards(self, corpus: str) -> int:
        """Number of jobs that tokenize a corpus; one job if only the first records are used."""
        return 1 if self.corpora[corpus].limit else self.corpora[corpus].shards

    def shard_mb(self, corpus: str) -> int:
        """Memory of a shard's job: a base, and 20 times the size of the largest document (measured)."""
        return 1000 + 20 * self.corpora[corpus].max_document_mb

    def conversion_mb(self, model: str, copies: float) -> int:
        """Memory of a job with this many fp32 copies of a model's weights, plus Python and torch."""
        return CONVERSION_MB + self._weights_mb(model, copies)

    def import_mb(self, model: str, shared: float, whole: float = 0) -> int:
        """Memory per node for a model's ranks: `shared` copies are divided among them, and one rank has `whole` copies,
        if a host can hold them."""
        asked = self.plan.models[model].conversion
        per_node, whole = asked.ranks // asked.nodes, whole if self._is_held(model) else 0
        return per_node * CONVERSION_MB + self._weights_mb(model, shared / asked.nodes + whole)

    def export_mb(self, run: str, copies: float, proves: bool = False) -> int:
        """Memory of an export's job. `proves`: one process also holds transformers' model."""
        model = self.runs[run].model
        if self.plan.models[model].conversion.ranks == 1:
            return self.conversion_mb(model, copies if self._is_held(model) or not proves else copies - 1)
        file_mb = round(self.plan.experiment.export.file_gb * 1000)
        return file_mb + self.import_mb(model, shared=1.2, whole=1.3 if proves else 0)

    def _is_held(self, model: str) -> bool:
        """Whether a proof holds transformers' model whole."""
        return self._params(model) <= conversion.HELD_WHOLE

    def _weights_mb(self, model: str, copies: float) -> int:
        return round(copies * 4 * self._params(model) / 1e6)

    def _params(self, model: str) -> int:
        params = next((run.row["params"] for run in self.plan.runs if run.model == model), None) or self._found(model)
        return params or UNKNOWN_PARAMS

    def _found(self, model: str) -> int | None:
        """Number of parameters of a model that has been fetched."""
        source = read_if_there(ModelSource, self.paths.model(model).source)
        return source and source.params

    def first_run_of(self, model: str) -> Run:
        return next(run for run in self.plan.runs if run.model == model)

    def shard_manifests(self, corpus: str) -> list[str]:
        if self.corpora[corpus].megatron is not None or self.corpora[corpus].has_examples:
            return []  # there is nothing to tokenize
        shards = self.shards(corpus)
        return [str(self.paths.corpus(corpus).shard(shard, shards)) for shard in range(shards)]

    def tokenizer_texts(self, tokenizer: str) -> list[str]:
        made = self.plan.experiment.tokenizers[tokenizer]
        if made.train_on is None:
            return [expanded(path) for path in made.files.values()]
        return files_of(self.plan.experiment.corpora[made.train_on])

    def model_inputs(self, model: str) -> list[str]:
        """The files of a model in a local folder, and the tokenizer that it needs."""
        folder = Path(self.plan.models[model].hf or "").expanduser()
        local = {path for pattern in MODEL_FILES for path in folder.glob(pattern)}
        found = [str(path) for path in sorted(local) if path.is_file()] if self.plan.models[model].hf else []
        return [*found, *self.tokenizer_inputs(self.model_tokenizer(model))]

    @property
    def preflight_inputs(self) -> list[str]:
        """Inputs of preflight: architectures and tokenizers, but neither weights nor text."""
        models = [str(self.paths.model(name).source) for name in self.sourced_models]
        recipes = [name for name in self.plan.models if name not in self.sourced_models]
        return [*models, *(path for name in recipes for path in self.tokenizer_inputs(self.model_tokenizer(name)))]

    def import_proof(self, run: Run) -> list[str]:
        """The proof that imported weights are the model's, without which nothing is trained."""
        return [str(self.paths.model(run.model).proof)] if run.model in self.imported_models else []

    def index_manifest(self, run: Run) -> list[str]:
        return [str(self.paths.index(run.launch.index))] if run.launch.index else []

    def index_inputs(self, name: str) -> list[str]:
        """Inputs of an index: corpora, and the tokenizer, which knows the end of a document."""
        return self._data_inputs(self.indexes[name][0])

    def run_inputs(self, run: Run) -> list[str]:
        """The manifests of everything that a run reads, except the index of its data."""
        manifests = self._data_inputs(run)
        if run.model in self.imported_models:
            manifests.append(str(self.paths.model(run.model).imported))
        parent = run.run.parent
        # For a run that continues in place, its own document has its earlier state, and no job makes that.
        if parent and (parent.experiment, parent.run) != (self.plan.name, run.name):
            family = ExperimentFolder(self.folder.parent / parent.experiment)
            manifests.append(str(family.run(parent.run).train_manifest))
        return manifests

    def _data_inputs(self, run: Run) -> list[str]:
        """The manifests of corpora, their verifications, and the manifest that has the tokenizer."""
        data = [self.paths.corpus(corpus) for corpus in run.corpora]
        manifests = [str(path) for corpus in data for path in (corpus.manifest, corpus.verification)]
        if run.model not in self.sourced_models:
            return manifests + self.tokenizer_inputs(self.model_tokenizer(run.model))
        return [*manifests, str(self.paths.model(run.model).source)]

    def _reference(self, named: str) -> Reference:
        if named in self.plan.experiment.tokenizers:
            return {"kind": "manifest", "manifest": str(self.paths.tokenizer(named))}
        for name, model in self.plan.models.items():
            if model.hf == named and model.revision:  # the same commit as the model's
                return {"kind": "model", "manifest": str(self.paths.model(name).source)}
        return {"kind": "path", "path": expanded(named)}

    def _image(self) -> ImageAsked:
        """The ranks' image, or else this Python."""
        wanted = image_specs.wanted(self.plan.experiment)
        return ImageAsked(container=wanted) if wanted else ImageAsked(**vars(environment()))

    def _inside(self) -> InsideAsked:
        """This Python, for all jobs but ranks, and how to start processes in the image, if there is one.

        It is separate from image.json, because another partition, or a package of the login node, doesn't change the
        image.
        """
        inside = image_specs.inside(self.plan.experiment, self.profile)
        return InsideAsked(**vars(environment()), container=inside)

    def _tokenizer(self, name: str) -> TokenizerSpec:
        tokenizer = self.plan.experiment.tokenizers[name]
        if tokenizer.files:
            rules = {"pattern": tokenizer.tiktoken_pattern, "special_tokens": tokenizer.tiktoken_num_special_tokens}
            return TokenizerSpec(
                name=name,
                store=self.plan.experiment.store,
                train_on=None,
                vocab_size=tokenizer.size,
                **{kind: expanded(path) for kind, path in tokenizer.files.items()},
                **(rules if tokenizer.tiktoken else {}),
            )
        corpus = self.plan.experiment.corpora[tokenizer.train_on]
        reading = ("text_key", "separator", "subset", "split", "revision", "limit", "max_document_mb", "on_bad_record")
        text = corpus.model_dump(include=set(reading))
        return TokenizerSpec(
            name=name,
            store=self.plan.experiment.store,
            train_on=TextSpec(name=tokenizer.train_on, source=expanded_source(corpus.source), **text),
            vocab_size=tokenizer.size,
        )

    def _corpus(self, name: str) -> CorpusSpec:
        corpus = self.corpora[name]
        given = pairs_of(corpus)
        return CorpusSpec(
            name=name,
            store=self.plan.experiment.store,
            source=[pair.prefix for pair in given] if given else expanded_source(corpus.source),
            tokenizer=self.corpus_tokenizer(name),
            pairs=given,
            filter=expanded(corpus.filter) if corpus.filter else None,
            **corpus.model_dump(exclude={"source", "megatron", "tokenizer", "shards", "filter"}),
        )

    def _model(self, name: str) -> ModelSpec:
        model = self.plan.models[name]
        return ModelSpec(
            name=name,
            store=self.plan.experiment.store,
            **model.model_dump(include={"revision", "config", "seed"}),
            hf=expanded(model.hf) if model.hf else None,
            tokenizer=self.model_tokenizer(name),
            weights=name in self.imported_models,
            device=self.plan.experiment.device,
        )

    def _conversion(self, model: str) -> ConversionSpec:
        """How a model is imported, and by how many ranks. This is no input of the import, as it changes no weight."""
        run = self.first_run_of(model)
        asked = self.plan.models[model].conversion
        return ConversionSpec(
            layout=asked.model_dump(include=set(conversion.SIZES)),
            nodes=asked.nodes,
            gpus_per_node=asked.ranks // asked.nodes,
            cpus_per_rank=run.config.resources.cpus_per_rank,
            device=self.plan.experiment.device,
            start=run.launch.start,
            image=run.launch.image,
        )

    def _index(self, name: str) -> IndexSpec:
        """An index. Any of its runs can build it, because it depends only on what they have in common."""
        runs = self.indexes[name]
        return IndexSpec(
            name=name,
            store=self.plan.experiment.store,
            run=runs[0].name,
            key=documents.index_key(runs[0].run),
            max_epochs=min(run.config.data.max_epochs for run in runs),
        )

    def _export(self, run: str) -> ExportSpec:
        """An export, without the push target, which is not part of the identity."""
        return ExportSpec(
            run=run, **self.plan.experiment.export.model_dump(include={"checkpoint", "file_gb", "license"})
        )

    def _along(self, run: str) -> AlongSpec:
        asked = self.plan.experiment.export
        every = asked.checkpoints if asked.checkpoints == "all" else asked.checkpoints.every
        return AlongSpec(
            run=run,
            every=None if every == "all" else every,
            command=self.plan.experiment.evaluate.command if run in self.plan.evaluated else None,
            **asked.model_dump(include={"file_gb", "license"}),
        )

    def _runs(self) -> RunsSpec:
        """All runs in order. They are in a file, because ten thousand names don't fit on a command line.

        Digests of the runs are included, so that a job for all runs has this one input instead of ten thousand, which
        Snakemake would look through for every job that needs its output.
        """
        sweep = self.plan.experiment.sweep
        return RunsSpec(
            runs=tuple(run.name for run in self.plan.runs),
            identities={run.name: run.digest[: store.ID_LENGTH] for run in self.plan.runs},
            skip_illegal=bool(sweep and sweep.skip_illegal),
        )

    def _costs(self) -> CostsSpec:
        """Inputs of preflight's costs, in a file that doesn't make preflight run again.

        Below a job that runs, Snakemake doesn't look for other reasons, so one more export would need a second call.
        """
        return CostsSpec(exports=tuple(self.plan.exports), budget=Budget(**self.plan.experiment.budget.model_dump()))

    def _tune(self) -> TuneSpec:
        """The settings that one job tries in turn."""
        wanted = self.plan.experiment.tune
        settings = []
        for run in self.plan.runs:
            seconds, gib = search_space.predicted(run.facts)
            settings.append(Setting(name=run.name, values=dict(run.values), seconds=seconds, gib=gib))
        begin, end = self.plan.experiment.profile.steps
        return TuneSpec(
            own=settings[0].name,
            settings=tuple(settings),
            steps=end - begin + 1,
            warmup=begin - 1,
            tolerance=wanted.tolerance,
            confidence=wanted.confidence,
            minutes=wanted.minutes,
            trial_minutes=wanted.trial_minutes,
        )

    def _tensors(self) -> TensorsSpec:
        return TensorsSpec(agreements=tuple(one for one in self.plan.agreements if one.tensors))

    def _evaluate(self) -> EvaluateSpec:
        return EvaluateSpec(command=self.plan.experiment.evaluate.command)

    def _generate(self) -> GenerateSpec:
        wanted = self.plan.experiment.generate
        return GenerateSpec(prompts=tuple(wanted.prompts), tokens=wanted.tokens)

    def _report(self) -> ReportSpec:
        wanted = self.plan.experiment.report
        return ReportSpec(
            runs=tuple(run.name for run in self.plan.runs),
            invalid=tuple(map(str, self.plan.invalid)),
            title=wanted.title,
            question=wanted.question,
            agreements=tuple(self.plan.agreements),
            published=self.plan.published,
            figures=tuple(figure.model_dump(mode="json") for figure in wanted.figures),
            values={run.name: run.values for run in self.plan.runs},
            proofs=(*self.import_proofs, *self.export_proofs),
            profiles=tuple(self.profiled_runs),
            evaluated=tuple(self.plan.evaluated),
            along=tuple(self.along_runs),
            baseline=self._baseline(),
        )

    def _baseline(self) -> BaselineSpec | None:
        asked = self.plan.experiment.report.baseline
        return asked and BaselineSpec(paths=asked.paths, **asked.model_dump(exclude={"path"}))
