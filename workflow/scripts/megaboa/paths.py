"""The single source of all file names below the results and in the store. Standard library only.

Rules repeat names of files, because Snakemake matches their outputs by pattern; docs/reference/files.md lists all of
them.
"""

from __future__ import annotations

from collections.abc import Iterator
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
FACTS = "facts.json"  # next to a payload in the store: what was found out while it was made


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

    def of(self, kind: str, name: str) -> Path:
        """`kind`: tokenizers, corpora, models, conversions, indexes or exports."""
        return self.path / kind / f"{name}.json"

    def all(self, kind: str) -> list[Path]:
        return sorted((self.path / kind).glob("*.json"))


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

    def baseline(self, number: int) -> Path:
        """Copies of an earlier experiment's results, as a baseline for comparison."""
        return self.path / "baseline" / str(number)

    @property
    def baselines(self) -> list[Path]:
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
        """The folder of the parent run, which this one continues; None if it has no parent."""
        parent = self.run.parent
        if parent is None:
            return None
        if self.is_in_place:
            return EarlierRun(self.path, identity=str(parent.identity))
        return ExperimentFolder(self.experiment_folder.path.parent / parent.experiment).run(parent.run)

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
    def progress_log(self) -> Path:
        """The progress log, shared by all runs of the experiment."""
        return self.experiment_folder.logs / "progress.log"


def compiled_kernels(store: Path, user: int, environment: str) -> Path:
    """Cache of kernels that ranks have compiled. `environment`: digest of the environment or image."""
    return store / "kernels" / str(user) / environment[:12]


@dataclass(frozen=True)
class NodesFolder:
    """<store>/nodes: what runs remember of nodes."""

    path: Path

    @classmethod
    def of(cls, store: Path) -> NodesFolder:
        return cls(store / "nodes")

    def node(self, cluster: str, name: str) -> Path:
        return self.path / cluster / f"{name}.jsonl"

    @property
    def all(self) -> list[Path]:
        return sorted(self.path.glob("*/*.jsonl"))


def sent_alerts(store: Path, user: int) -> Path:
    """The alerts that `megaboa fleet --alert` has already sent for a user."""
    return store / "fleet" / f"sent-{user}.json"


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
        """The digest of the settings that the export, proof and evaluation were made with."""
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


@dataclass(frozen=True)
class RunStore:
    """The store folder of one identity of a run."""

    path: Path

    @classmethod
    def of(cls, link: Path) -> RunStore:
        """The store folder that a link to its ledger, in the run's folder, points into."""
        return cls(link.resolve().parent)

    @property
    def claims(self) -> Path:
        """All claims on the run, present and past."""
        return self.path / "claims"

    @property
    def stop(self) -> Path:
        """A file whose presence asks the supervisor for an orderly stop of the run."""
        return self.path / "stop"

    @property
    def identity(self) -> Path:
        return self.path / "identity.json"

    @property
    def ledger(self) -> Path:
        return self.path / "attempts.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def local_copies(self) -> Path:
        """Record of the name under which nodes keep their copies of the run."""
        return self.path / "local-copies.json"

    @property
    def found(self) -> Path:
        """Facts about a recipe that only the ranks know: its number of steps, and whether it saves."""
        return self.path / "found.json"

    @property
    def index_cache(self) -> Path:
        return self.path / "index-cache"

    @property
    def mlflow_run(self) -> Path:
        """The MLflow run that all attempts log to."""
        return self.path / "mlflow-run.json"

    @property
    def mlflow_uri(self) -> str:
        """MLflow's local database, for logging without a network."""
        return f"sqlite:///{(self.path / 'mlflow.db').absolute()}"

    def environment(self, digest: str) -> Path:
        """The list of packages that attempts ran with, by its digest."""
        return self.path / "environments" / f"{digest[:12]}.json"

    @property
    def newest_attempt(self) -> int:
        """Number of the newest attempt that has a folder; 0 if there is none."""
        return max((int(attempt.path.name) for attempt in self.attempts), default=0)

    @property
    def attempts(self) -> list[AttemptFolder]:
        """The attempts that have a folder, oldest first."""
        found = (self.path / "attempts").glob("[0-9]*")
        return [AttemptFolder(path) for path in sorted(found, key=lambda path: int(path.name))]

    def attempt(self, number: int) -> AttemptFolder:
        return AttemptFolder(self.path / "attempts" / f"{number:02d}")


def stores(store: Path) -> list[RunStore]:
    """The store folders of all runs that have begun, one for each identity."""
    return [RunStore(path.parent) for path in sorted(store.glob("runs/*/*/*/attempts.jsonl"))]


@dataclass(frozen=True)
class AttemptFolder:
    path: Path

    @property
    def number(self) -> int:
        return int(self.path.name)

    @property
    def steps(self) -> Path:
        return self.path / "steps.jsonl"

    @property
    def paces(self) -> Path:
        """Each rank's time for the same calculation, measured at each save."""
        return self.path / "paces.jsonl"

    @property
    def stop_now(self) -> Path:
        """A file whose presence asks the ranks to save and end, in case no signal reaches them."""
        return self.path / "stop-now"

    @property
    def routing(self) -> Path:
        """A file for each rank with experts: the experts that its tokens were routed to."""
        return self.path / "routing"

    @property
    def samples(self) -> Path:
        """A file for each rank that reads data: a digest of every sample, by step."""
        return self.path / "samples"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    def log(self, rank: int) -> Path:
        return self.path / f"rank-{rank}.log"

    @property
    def logs(self) -> dict[int | None, Path]:
        """The ranks' logs by rank; the launcher's log has the key None."""
        ranks = {int(path.stem.removeprefix("rank-")): path for path in self.path.glob("rank-*.log")}
        return {**ranks, None: self.path / "srun.log"}

    @property
    def node_logs(self) -> list[Path]:
        """The logs of the per-node tasks that start the ranks."""
        return sorted(self.path.glob("node-*.log"))

    @property
    def flight(self) -> str:
        """Prefix of the ranks' flight recorder dumps, which say what they waited for; the rank's number follows."""
        return str(self.path / "flight-rank-")

    @property
    def asked(self) -> Path:
        """The documents run, launch and profile that the supervisor gave to this attempt's ranks."""
        return self.path / "asked.json"

    @property
    def local_beginning(self) -> Path:
        """Written if the ranks start from the copies on their nodes instead of a checkpoint."""
        return self.path / "local.json"

    @property
    def health(self) -> Path:
        return self.path / "health"

    @property
    def next_health(self) -> Path:
        """Health check before the following attempt, if its processes waited while this attempt trained."""
        return self.path / "next-health"

    @property
    def standby(self) -> Path:
        """Folder of a standby step: with Bridge imported, it waits to start the ranks of the next attempt."""
        return self.path / "standby"

    @property
    def verified(self) -> Path:
        """Checksums by node, each for its share of the checkpoint that the attempt starts from."""
        return self.path / "verified"

    @property
    def may_load(self) -> Path:
        """Release for ranks that start while their checkpoint is verified: empty until the checkpoint is known to be
        sound."""
        return self.path / "may-load"

    @property
    def image(self) -> Path:
        """Output of unpacking the image."""
        return self.path / "image"

    def gpus(self, host: str) -> Path:
        """Samples of a node's GPUs."""
        return self.path / "gpus" / f"{host}.jsonl"

    @property
    def sampled(self) -> list[Path]:
        """The files of all nodes whose GPUs were sampled."""
        return sorted((self.path / "gpus").glob("*.jsonl"))

    def traces(self, tool: str) -> Path:
        """Folder of a profiler's files. PyTorch's folder has Bridge's name; a tool that is a Python file is the user's
        own."""
        return self.path / ("profiler" if tool.endswith(".py") else {"pytorch": "torch_profile"}.get(tool, tool))

    @property
    def ends(self) -> Path:
        """The records that ranks leave when their training ends."""
        return self.path / "end"

    def end_record(self, rank: int) -> Path:
        return self.ends / f"{rank}.json"
