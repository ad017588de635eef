"""Names of files below `results/<experiment>/runs/<run>` and in a run's store: the one place that knows them.

Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from megaboa.blends import corpora
from megaboa.files import read_json

CARD = "README.md"  # of an exported model, where the hub looks for it
FAILED_PROOF = "failed-proof.json"  # beside proof.json, which is there only if all passed


@dataclass(frozen=True)
class RunFolder:
    """A run's folder below the results: what was asked for, and manifests of what came out.

    `asked` is what the run was when its job was submitted, or its attempt started: run, launch and profile. None: what
    run.json, launch.json and profile.json say now.
    """

    path: Path
    asked: dict[str, Any] | None = field(default=None, compare=False, repr=False)

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def experiment(self) -> str:
        return self._experiment_folder.name

    @property
    def _experiment_folder(self) -> Path:
        return self.path.parent.parent

    @cached_property
    def run(self) -> dict[str, Any]:
        return self._document("run")

    @cached_property
    def launch(self) -> dict[str, Any]:
        return self._document("launch")

    @cached_property
    def preflight(self) -> dict[str, Any]:
        """What Bridge's configuration said of itself; nothing before preflight."""
        path = self._experiment_folder / "preflight.json"
        return read_json(path)["runs"].get(self.name, {}) if path.exists() else {}

    @cached_property
    def profile(self) -> dict[str, Any]:
        return self._document("profile")

    @property
    def may_restart(self) -> bool:
        """Whether its call was told to let it begin again, whatever else lies in the store."""
        return bool((self.asked or {}).get("restart"))

    @property
    def documents(self) -> dict[str, Any]:
        """What `asked` of another RunFolder may be, to be the same run."""
        names = ("run", "launch", "profile")
        return self.asked or {name: self._document(name) for name in names if (self.path / f"{name}.json").exists()}

    def _document(self, name: str) -> dict[str, Any]:
        return read_json(self.path / f"{name}.json") if self.asked is None else self.asked[name]

    @property
    def model_manifest(self) -> Path | None:
        """What the run's model is made of; None for a recipe, which brings its own."""
        model = self.run["model"]
        if model.get("recipe"):
            return None
        manifest = "import.json" if model["init"] == "pretrained" else "source.json"
        return self._experiment_folder / "models" / model["name"] / manifest

    @property
    def source_manifest(self) -> Path:
        return self._experiment_folder / "models" / self.run["model"]["name"] / "source.json"

    @property
    def tokenizer_manifest(self) -> Path | None:
        """The tokenizer of a recipe, where it is one that the experiment trains; other models bring theirs."""
        model = self.run["model"]
        if not model.get("recipe") or not model["tokenizer"]:
            return None
        trained = (self._experiment_folder / "specs" / "tokenizers" / f"{model['tokenizer']}.json").exists()
        return self._experiment_folder / "tokenizers" / f"{model['tokenizer']}.json" if trained else None

    @property
    def corpus_manifests(self) -> dict[str, Path]:
        """Of every corpus that the run reads, for training or validation."""
        return {name: self._experiment_folder / "data" / f"{name}.json" for name in corpora(self.run["data"])}

    @cached_property
    def index(self) -> dict[str, Any] | None:
        """The manifest of Megatron's index of the run's data; None where Bridge makes up the data, or a recipe does."""
        name = self.launch.get("index")
        return read_json(self._experiment_folder / "data" / "indexes" / f"{name}.json") if name else None

    @cached_property
    def image(self) -> dict[str, Any] | None:
        """The manifest of the image that ranks run in; None where they run in this Python."""
        return read_json(self._experiment_folder / "image.json") if self.launch.get("image") else None

    @property
    def parent_manifest(self) -> Path | None:
        """train.json of the run that this one goes on from."""
        parent = self.run.get("parent")
        if parent is None:
            return None
        return self._experiment_folder.parent / parent["experiment"] / "runs" / parent["run"] / "train.json"

    @property
    def parent_name(self) -> str | None:
        """`<experiment>/<run>@<step>`"""
        parent = self.run.get("parent")
        return f"{parent['experiment']}/{parent['run']}@{parent['iteration']}" if parent else None

    @property
    def train_manifest(self) -> Path:
        return self.path / "train.json"

    @property
    def store(self) -> Path:
        """Where the payloads of the trained run lie."""
        return Path(read_json(self.train_manifest)["store"])

    @property
    def attempts_link(self) -> Path:
        return self.path / "attempts.jsonl"

    @property
    def progress_log(self) -> Path:
        """One file for all runs of the experiment."""
        return self._experiment_folder / "logs" / "progress.log"


@dataclass(frozen=True)
class RunStore:
    """Where the payloads of one identity of a run lie."""

    path: Path

    @property
    def claims(self) -> Path:
        """Who trains the run, and who did."""
        return self.path / "claims"

    @property
    def stop(self) -> Path:
        """A file whose presence asks the supervisor to stop the run in order."""
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
    def found(self) -> Path:
        """What only the ranks can tell of a recipe: how many steps it has, and whether it saves."""
        return self.path / "found.json"

    @property
    def index_cache(self) -> Path:
        return self.path / "index-cache"

    @property
    def mlflow_run(self) -> Path:
        """Which run of MLflow all attempts are."""
        return self.path / "mlflow-run.json"

    @property
    def mlflow_uri(self) -> str:
        """Where MLflow writes to without a network."""
        return f"sqlite:///{(self.path / 'mlflow.db').absolute()}"

    def environment(self, digest: str) -> Path:
        """The packages that attempts ran with."""
        return self.path / "environments" / f"{digest[:12]}.json"

    @property
    def newest_attempt(self) -> int:
        """By the folders; 0 where there is none."""
        return max((int(path.name) for path in (self.path / "attempts").glob("[0-9]*")), default=0)

    def attempt(self, number: int) -> AttemptFolder:
        return AttemptFolder(self.path / "attempts" / f"{number:02d}")


@dataclass(frozen=True)
class AttemptFolder:
    path: Path

    @property
    def steps(self) -> Path:
        return self.path / "steps.jsonl"

    @property
    def stop_now(self) -> Path:
        """A file whose presence asks the ranks to save and end, should no signal reach them."""
        return self.path / "stop-now"

    @property
    def routing(self) -> Path:
        """Of every rank with experts, which of them its tokens went to."""
        return self.path / "routing"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    def log(self, rank: int) -> Path:
        return self.path / f"rank-{rank}.log"

    @property
    def logs(self) -> dict[int | None, Path]:
        """The ranks' logs by rank, and under None the launcher's."""
        ranks = {int(path.stem.removeprefix("rank-")): path for path in self.path.glob("rank-*.log")}
        return {**ranks, None: self.path / "srun.log"}

    @property
    def asked(self) -> Path:
        """What the ranks of this attempt train: run, launch and profile, as their supervisor had them."""
        return self.path / "asked.json"

    @property
    def health(self) -> Path:
        return self.path / "health"

    def traces(self, tool: str) -> Path:
        """Where a profiler's files lie; PyTorch's have Bridge's name. A tool that isn't known is a user's own."""
        known = {"pytorch": "torch_profile", **{name: name for name in ("nsys", "viztracer", "memory")}}
        return self.path / known.get(tool, "profiler")

    def end_record(self, rank: int) -> Path:
        return self.path / "end" / f"{rank}.json"
