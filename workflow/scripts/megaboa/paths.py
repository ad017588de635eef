"""The single source of all file names below the results; `store_paths` has those in the store. Standard library only.

Rules repeat names of files, because Snakemake matches their outputs by pattern; docs/reference/files.md lists all of
them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from megaboa.blends import corpora
from megaboa.files import read_json
from megaboa.records import (
    Corpus,
    DataIndex,
    Image,
    LaunchSpec,
    Preflight,
    ProfileSpec,
    RunCheck,
    RunSpec,
    TrainRecord,
    Tree,
    UnusedSpecs,
    parse,
    read,
    read_if_there,
)
from megaboa.store import ID_LENGTH

ALONG, EARLIER = "along", "earlier"
CARD = "README.md"  # of an exported model, at the place where the hub looks for it
ADAPTER = "adapter"  # of an exported model: the folder with adapters that are not merged
CHAT_TEMPLATE = "chat_template.jinja"  # of an exported model, at the place where transformers looks for it
FAILED_PROOF = "failed-proof.json"  # replaces proof.json, which exists only if all checks passed


@dataclass(frozen=True)
class Baseline:
    """Earlier results or a bundle at `path`, and where an experiment that compares with them has a copy."""

    path: Path
    copy: Path

    @property
    def source(self) -> Path:
        """The path that the copy is of."""
        return self.copy / "source.json"

    @property
    def is_copied(self) -> bool:
        return self.source.is_file() and read_json(self.source) == {"path": str(self.path)}


@dataclass(frozen=True)
class ModelFolder:
    """results/<experiment>/models/<model>"""

    path: Path

    @property
    def source(self) -> Path:
        return self.path / "source.json"

    @property
    def imported(self) -> Path:
        return self.path / "import.json"

    @property
    def proof(self) -> Path:
        return self.path / "proof.json"


@dataclass(frozen=True)
class CorpusFolder:
    """results/<experiment>/data/<corpus>, and its manifest <corpus>.json."""

    path: Path

    @property
    def manifest(self) -> Path:
        return self.path.with_name(f"{self.path.name}.json")

    @property
    def sources(self) -> Path:
        return self.path / "sources.json"

    @property
    def verification(self) -> Path:
        return self.path / "verification.json"

    def shard(self, number: int, shards: int) -> Path:
        return self.path / f"shard-{number}-of-{shards}.json"


@dataclass(frozen=True)
class Specs:
    """results/<experiment>/specs: specifications for jobs that serve several runs."""

    path: Path

    @property
    def runs(self) -> Path:
        return self.path / "runs.json"

    @property
    def report(self) -> Path:
        return self.path / "report.json"

    @property
    def tensors(self) -> Path:
        return self.path / "tensors.json"

    @property
    def costs(self) -> Path:
        return self.path / "costs.json"

    @property
    def image(self) -> Path:
        return self.path / "image.json"

    @property
    def inside(self) -> Path:
        return self.path / "inside.json"

    @property
    def evaluate(self) -> Path:
        return self.path / "evaluate.json"

    @property
    def unused(self) -> Path:
        return self.path / "unused.json"

    def of(self, kind: str, name: str) -> Path:
        """`kind`: tokenizers, corpora, models, conversions, indexes or exports."""
        return self.path / kind / f"{name}.json"

    def all(self, kind: str) -> list[Path]:
        """The specifications of the last plan."""
        unused = self.unused_paths
        return [path for path in sorted((self.path / kind).glob("*.json")) if path not in unused]

    @property
    def unused_paths(self) -> set[Path]:
        """Specifications of earlier plans."""
        found = read_if_there(UnusedSpecs, self.unused)
        return {self.path / name for name in found.names} if found else set()


@dataclass(frozen=True)
class ExperimentFolder:
    """results/<experiment>"""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def plan(self) -> Path:
        return self.path / "plan.tsv"

    @property
    def specs(self) -> Specs:
        return Specs(self.path / "specs")

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def image(self) -> Path:
        return self.path / "image.json"

    @property
    def preflight(self) -> Path:
        return self.path / "preflight.json"

    @property
    def preflight_table(self) -> Path:
        return self.path / "preflight.tsv"

    @property
    def preflight_in_image(self) -> Path:
        return self.path / "preflight-in-image.json"

    @property
    def refused(self) -> Path:
        return self.path / "refused.json"

    @property
    def checks(self) -> Path:
        return self.path / "report" / "checks.json"

    def baselines_of(self, paths: Iterable[str]) -> list[Baseline]:
        """The experiment's baselines, which its configuration names by these paths."""
        return [Baseline(Path(path), self.path / "baseline" / str(n)) for n, path in enumerate(paths, start=1)]

    @property
    def copied_baselines(self) -> list[Path]:
        return sorted((self.path / "baseline").glob("*"))

    @property
    def tensors(self) -> Path:
        """Result of comparing checkpoints of runs that must agree."""
        return self.path / "tensors.json"

    @property
    def own_config(self) -> Path:
        """The configuration of a generated experiment, run by `snakemake prove` or `snakemake tune`."""
        return self.path / "experiment.yaml"

    @property
    def tuning(self) -> Path:
        """Result of `snakemake tune`; its table and the winner's keys are next to it."""
        return self.path / "tune.json"

    @property
    def calls(self) -> Path:
        """One folder for each call, with what it submitted."""
        return self.path / "calls"

    @property
    def was_called(self) -> bool:
        """Whether jobs of this experiment may have been submitted."""
        return self.calls.is_dir() or any(self.path.glob("runs/*/attempts.jsonl"))

    @property
    def runs(self) -> list[RunFolder]:
        """All runs that were ever planned, also those that the present plan no longer has."""
        return [RunFolder(path.parent) for path in sorted(self.path.glob("runs/*/run.json"))]

    def run(self, name: str) -> RunFolder:
        return RunFolder(self.path / "runs" / name)

    def model(self, name: str) -> ModelFolder:
        return ModelFolder(self.path / "models" / name)

    def corpus(self, name: str) -> CorpusFolder:
        return CorpusFolder(self.path / "data" / name)

    def tokenizer(self, name: str) -> Path:
        return self.path / "tokenizers" / f"{name}.json"

    def index(self, name: str) -> Path:
        return self.path / "data" / "indexes" / f"{name}.json"


def begun(results: Path) -> Iterator[RunFolder]:
    """The runs of all experiments that have a ledger, that is, were started."""
    return (RunFolder(link.parent) for link in results.glob("*/runs/*/attempts.jsonl"))


def measured(results: Path) -> Iterator[RunFolder]:
    """The runs of all experiments that have metrics."""
    return (RunFolder(path.parents[1]) for path in results.glob("*/runs/*/metrics/summary.json"))


def trained(results: Path) -> Iterator[RunFolder]:
    """The runs of all experiments that trained to their last step."""
    return (RunFolder(path.parent) for path in results.glob("*/runs/*/train.json"))


@dataclass(frozen=True)
class RunFolder:
    """A run's folder below the results: what was asked for, and manifests of what came out.

    `asked` holds the documents run, launch and profile as they were when the run's job was submitted, or its attempt
    started. None: run.json, launch.json and profile.json count as they are now.
    """

    path: Path
    asked: Tree | None = field(default=None, compare=False, repr=False)

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def experiment_folder(self) -> ExperimentFolder:
        return ExperimentFolder(self.path.parent.parent)

    @property
    def experiment(self) -> str:
        return self.experiment_folder.name

    @cached_property
    def run(self) -> RunSpec:
        return parse(RunSpec, self.document("run"), self.file("run"))

    @cached_property
    def launch(self) -> LaunchSpec:
        return parse(LaunchSpec, self.document("launch"), self.file("launch"))

    @cached_property
    def preflight(self) -> RunCheck | None:
        """Facts from Bridge's configuration; None before preflight has run."""
        found = read_if_there(Preflight, self.experiment_folder.preflight)
        return found.runs.get(self.name) if found else None

    @cached_property
    def profile(self) -> ProfileSpec:
        return parse(ProfileSpec, self.document("profile"), self.file("profile"))

    @property
    def may_restart(self) -> bool:
        """Whether the call asked to restart the run, despite other work in the store."""
        return bool((self.asked or {}).get("restart"))

    @property
    def documents(self) -> Tree:
        """The run's documents, to be passed as `asked` to another RunFolder of the same run."""
        names = ("run", "launch", "profile")
        return self.asked or {name: self.document(name) for name in names if self.file(name).exists()}

    def document(self, name: str) -> Tree:
        """The content of the document `run`, `launch` or `profile`."""
        return read_json(self.file(name)) if self.asked is None else self.asked[name]

    def file(self, name: str) -> Path:
        """The file of the document `run`, `launch` or `profile`."""
        return self.path / f"{name}.json"

    @property
    def model_manifest(self) -> Path | None:
        """The manifest of the run's model; None for a recipe that brings its own model."""
        if not self.run.has_source:
            return None
        folder = self.experiment_folder.model(self.run.model["name"])
        return folder.imported if self.run.is_pretrained else folder.source

    @property
    def source_manifest(self) -> Path:
        return self.experiment_folder.model(self.run.model["name"]).source

    @property
    def tokenizer_manifest(self) -> Path | None:
        """The manifest of a recipe's tokenizer, if the experiment trains one; None for other models, which have their
        own."""
        model = self.run.model
        if self.run.has_source or not model["tokenizer"]:
            return None
        trained = self.experiment_folder.specs.of("tokenizers", model["tokenizer"]).exists()
        return self.experiment_folder.tokenizer(model["tokenizer"]) if trained else None

    @property
    def corpus_manifests(self) -> dict[str, Path]:
        """The manifest of every corpus that the run reads for training or validation."""
        return {name: self.experiment_folder.corpus(name).manifest for name in corpora(self.run.data)}

    @property
    def corpora(self) -> dict[str, Corpus]:
        return {name: read(Corpus, path) for name, path in self.corpus_manifests.items()}

    @cached_property
    def index(self) -> DataIndex | None:
        """Megatron's index of the run's data; None if Bridge generates the data, or the recipe has its own."""
        name = self.launch.index
        return read(DataIndex, self.experiment_folder.index(name)) if name else None

    @cached_property
    def image(self) -> Image | None:
        """The image that ranks run in; None if they run in this Python."""
        return read(Image, self.experiment_folder.image) if self.launch.image else None

    @property
    def is_in_place(self) -> bool:
        """Whether the run continues under its own name from a checkpoint of its earlier self."""
        parent = self.run.parent
        return parent is not None and (parent.experiment, parent.run) == (self.experiment, self.name)

    @property
    def parent_folder(self) -> RunFolder | None:
        """The folder of the parent run, or of its earlier version, which this one continues; None if it has no
        parent."""
        parent = self.run.parent
        if parent is None:
            return None
        folder = ExperimentFolder(self.experiment_folder.path.parent / parent.experiment).run(parent.run)
        return EarlierRun(folder.path, identity=parent.identity) if parent.identity else folder

    @property
    def parent_manifest(self) -> Path | None:
        """train.json of the parent run; None if the run has no parent."""
        folder = self.parent_folder
        return folder and folder.train_manifest

    @property
    def parent_name(self) -> str | None:
        """The parent as `<experiment>/<run>@<step>`; None if the run has none."""
        return str(self.run.parent) if self.run.parent else None

    @property
    def start(self) -> str:
        """Where training starts that has no checkpoint of its own: the parent's, or step 0."""
        return self.parent_name or "step 0"

    @property
    def train_manifest(self) -> Path:
        return self.path / "train.json"

    @property
    def store(self) -> Path:
        """The store folder with the trained run's payloads."""
        return Path(read(TrainRecord, self.train_manifest).store)

    @property
    def trace(self) -> Path:
        return self.path / "trace.json"

    @property
    def analysis(self) -> Path:
        return self.path / "analysis.json"

    @property
    def summary(self) -> Path:
        return self.path / "metrics" / "summary.json"

    @property
    def steps_table(self) -> Path:
        return self.path / "metrics" / "steps.parquet"

    @property
    def goodput(self) -> Path:
        return self.path / "metrics" / "goodput.json"

    @property
    def export(self) -> Path:
        return self.path / "export.json"

    @property
    def along(self) -> Path:
        """Manifest of the exports made during training."""
        return self.path / "along.json"

    @property
    def proof(self) -> Path:
        return self.path / "proof.json"

    @property
    def evaluation(self) -> Path:
        return self.path / "evaluation.json"

    @property
    def generations(self) -> Path:
        return self.path / "generations.json"

    @property
    def push(self) -> Path:
        return self.path / "push.json"

    @property
    def attempts_link(self) -> Path:
        return self.path / "attempts.jsonl"

    @property
    def has_lost_its_store(self) -> bool:
        """Whether the run has begun, and its ledger is gone with its store."""
        return self.attempts_link.is_symlink() and not self.attempts_link.exists()

    @property
    def progress_log(self) -> Path:
        """The progress log, shared by all runs of the experiment."""
        return self.experiment_folder.logs / "progress.log"


@dataclass(frozen=True)
class AlongFolder(RunFolder):
    """A run at one of its checkpoints: runs/<run>/along/<iteration>/ has what was made from that checkpoint."""

    iteration: int = 0

    @property
    def own(self) -> Path:
        return self.path / ALONG / str(self.iteration)

    @property
    def spec(self) -> Path:
        return self.own / "spec.json"

    @property
    def asked_for(self) -> Path:
        """The digest of the settings that the export and its proof were made with."""
        return self.own / "asked-for"

    @property
    def train_manifest(self) -> Path:
        return self.own / "train.json"

    @property
    def export(self) -> Path:
        return self.own / "export.json"

    @property
    def proof(self) -> Path:
        return self.own / "proof.json"

    @property
    def evaluation(self) -> Path:
        return self.own / "evaluation.json"


@dataclass(frozen=True)
class EarlierRun(RunFolder):
    """An earlier state of a run that continued in place with other settings: manifests in runs/<run>/earlier/<id>/."""

    identity: str = ""

    def file(self, name: str) -> Path:
        return self.path / EARLIER / self.identity[:ID_LENGTH] / f"{name}.json"

    @property
    def train_manifest(self) -> Path:
        return self.file("train")

    @property
    def preflight(self) -> None:
        """None: preflight's facts are only kept for the present state of the run."""


def run_of(manifest: Path) -> RunFolder:
    """The run that a manifest belongs to, or the run at one of its checkpoints."""
    folder = manifest.parent
    if folder.parent.name == ALONG:
        return AlongFolder(folder.parents[1], iteration=int(folder.name))
    return RunFolder(folder)
