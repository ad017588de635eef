"""The single source of all file names in the store. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megaboa.files import is_python

FACTS = "facts.json"  # next to a payload in the store: what was found out while it was made


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
        return self.path / ("profiler" if is_python(tool) else {"pytorch": "torch_profile"}.get(tool, tool))

    @property
    def ends(self) -> Path:
        """The records that ranks leave when their training ends."""
        return self.path / "end"

    def end_record(self, rank: int) -> Path:
        return self.ends / f"{rank}.json"


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
