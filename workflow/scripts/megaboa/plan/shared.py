"""What the runs of an experiment share: corpora, tokenizers, models.

Each of them is made once, by its own job, from a specification (`megaboa.plan.specifications`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

from megaboa import conversion, evaluation
from megaboa.paths import ExperimentFolder
from megaboa.plan.given_files import expanded, files_of
from megaboa.plan.plan import Plan, Run
from megaboa.records import AgreementSpec, EvaluateSpec, Evaluation, ModelSource, read, read_if_there
from megaboa.scheduler.registry import cluster

Reference = dict[str, str]
NO_PROFILE: Mapping[str, str] = MappingProxyType({})

CONVERSION_MB = 3000  # for importing torch, transformers and Megatron: 0.8 GB, with some margin
MODEL_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.tiktoken", "chat_template*")  # in a local folder
UNKNOWN_PARAMS = 8_000_000_000  # assumed for a model that isn't fetched yet


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
    def corpus_manifests(self) -> list[str]:
        """Of the corpora, and of what they are made from: tokenizers, and lists of files."""
        tokenizers = [path for one in self.corpora for path in self.tokenizer_inputs(self.corpus_tokenizer(one))]
        folders = [self.paths.corpus(name) for name in self.corpora]
        return [*dict.fromkeys(tokenizers), *(str(path) for one in folders for path in (one.sources, one.manifest))]

    @property
    def verifications(self) -> list[str]:
        return [str(self.paths.corpus(name).verification) for name in self.corpora]

    @property
    def index_manifests(self) -> list[str]:
        return [str(self.paths.index(name)) for name in self.indexes]

    @functools.cached_property
    def manifests(self) -> list[str]:
        """What stages leave for later ones, whose outputs may be there without it.

        Nothing once the store of a trained run has been cleared: what is made again is newer than its train.json, and
        would train it again.
        """
        runs, paths = self.plan.runs, self.paths
        if any(paths.run(run.name).has_lost_its_store for run in runs):
            return []
        used = [*self.corpus_manifests, *self.preflights, *(path for run in runs for path in self.run_inputs(run))]
        trained = [str(paths.run(run.name).train_manifest) for run in runs]
        exported = [str(paths.run(name).export) for name in self.plan.exports]
        every = [*used, *trained, *exported, *self.verifications, *self.index_manifests, *self.import_proofs]
        return list(dict.fromkeys(every))

    @property
    def reported(self) -> list[str]:
        """What the report needs. It shows missing results of other stages as missing."""
        return [str(self.paths.image), *self.metrics, *self.verifications, *self.index_manifests]

    @property
    def tensor_agreements(self) -> list[AgreementSpec]:
        """Agreements that ask for a comparison of tensors."""
        return [one for one in self.plan.agreements if one.tensors]

    @property
    def tensors(self) -> list[str]:
        """The comparison of checkpoints, if an agreement asks for it."""
        return [str(self.paths.tensors)] if self.tensor_agreements else []

    @property
    def tried(self) -> list[str]:
        """Inputs of trials, if the runs are settings to try."""
        if not self.plan.experiment.tune.trials_of:
            return []
        return list(dict.fromkeys(path for run in self.plan.runs for path in self.run_inputs(run)))

    @property
    def compared(self) -> list[str]:
        """The manifests of runs whose checkpoints are compared."""
        names = dict.fromkeys(name for one in self.tensor_agreements for name in (one.reference, *one.runs, *one.twins))
        return [str(self.paths.run(name).train_manifest) for name in names]

    @property
    def compared_mb(self) -> int:
        """Memory for two tensors. One may contain all layers, and thus most of the model."""
        models = {self.runs[Path(path).parent.name].model for path in self.compared}
        return max((self.conversion_mb(model, copies=2) for model in models), default=CONVERSION_MB)

    @property
    def baselines(self) -> list[str]:
        """Inputs for which the report is remade: bundles, and the plans of results folders; copies of those that are
        gone."""
        asked = self.plan.experiment.report.baseline
        found = []
        for one in self.paths.baselines_of(asked.paths if asked else ()):
            path = one.copy if one.is_copied and not one.path.exists() else one.path
            found.append(str(ExperimentFolder(path).plan if path.is_dir() else path))
        return found

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

    @functools.cached_property
    def evaluation_files(self) -> dict[str, str]:
        """The files that the evaluation's command names and doesn't write, with their SHA-256.

        Empty where the last plan is from before these were recorded, until a file is newer than all evaluations:
        finished ones stay valid. A job, whose evaluation isn't there, finds the same as its call.
        """
        command = self.plan.experiment.evaluate.command
        found = evaluation.files_of(command, self.folder.parent)
        made = [path for path in map(Path, self.evaluations) if path.exists()] if found else []
        if any(map(evaluation.may_be_written, found)):  # ten thousand records are read only then
            known = [read(Evaluation, path) for path in made]
            written = {name for one in known if one.command == command for name in one.written}
            found = {name: digest for name, digest in found.items() if name not in written}
        last = read_if_there(EvaluateSpec, self.paths.specs.evaluate) if found else None
        if last is None or last.command != command or last.files:
            return found
        # The newest: others may be of calls before an edit that is evaluated by now.
        newest = max((path.stat().st_mtime for path in made), default=math.inf)
        edited = max(Path(evaluation.place(name)).stat().st_mtime for name in found)
        return found if edited > newest else {}

    @property
    def evaluation_inputs(self) -> list[str]:
        return [evaluation.place(name) for name in self.evaluation_files]

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

    def is_outdated(self, run: Run) -> bool:
        """Whether a file has changed since the run's data, tokenizer or model was made from it."""
        made = {self.paths.corpus(name).manifest: self.corpus_inputs(name) for name in run.corpora}
        made |= {self.paths.tokenizer(name): self.tokenizer_texts(name) for name in run.tokenizers}
        if run.model in self.sourced_models:
            made[self.paths.model(run.model).source] = self.model_inputs(run.model)
        return any(_newest(paths) > _newest([str(manifest)]) for manifest, paths in made.items())

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
        """The files of a model in a local folder, the folder itself if it is a link, which may come to lead to older
        files, and the tokenizer that it needs."""
        folder = Path(self.plan.models[model].hf or "").expanduser()
        local = {path for pattern in MODEL_FILES for path in folder.glob(pattern)}
        found = [str(path) for path in sorted(local) if path.is_file()] if self.plan.models[model].hf else []
        if found and folder.is_symlink():
            found.append(str(folder))
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
        if parent and not parent.identity:  # no job makes an earlier version of a run
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


def _newest(paths: Iterable[str]) -> float:
    """The newest time of modification; infinite if a file is missing."""
    times = [Path(path).lstat().st_mtime if Path(path).exists() else math.inf for path in paths]
    return max(times, default=0.0)
