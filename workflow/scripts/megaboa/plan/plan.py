"""The plan: the runs of an experiment, and the files that describe them."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from megaboa import files
from megaboa.check.costs import Costs
from megaboa.check.facts import Facts
from megaboa.config.models.experiment import Experiment
from megaboa.config.models.model import Model
from megaboa.formats import some_of
from megaboa.paths import ExperimentFolder, RunFolder
from megaboa.plan import documents
from megaboa.records import AgreementSpec, LaunchSpec, ProfileSpec, RunSpec, Tree, plain
from megaboa.run.recovery import links, wall_seconds


@dataclass(frozen=True)
class Run:
    """One run of the sweep. `config` is the experiment with the run's values, every number resolved.

    `model` is a key of `config.models`; if the sweep changes the model itself, it is derived by the plan. `corpora`:
    names of the corpora that the run reads; `tokenizers`: names of trained tokenizers that it needs. `facts`: what the
    plan knows for rules and estimates. `costs`: what it takes, in a plan of all runs; None if not known.
    """

    name: str
    values: Tree
    config: Experiment
    model: str
    corpora: tuple[str, ...]
    tokenizers: tuple[str, ...]
    run: RunSpec
    launch: LaunchSpec
    profile: ProfileSpec
    row: Tree
    facts: Facts
    costs: Costs | None = None
    labels: Mapping[str, str] = field(default_factory=dict)  # by axis of the sweep, of axes that have labels

    @property
    def step_seconds(self) -> float | None:
        """Given, measured or predicted."""
        return self.costs.step_seconds if self.costs else self.config.resources.step_seconds

    @property
    def jobs(self) -> int | None:
        """Number of consecutive jobs that the run needs; None if its length or step time is unknown."""
        steps, seconds = self.facts.training.own_iters, self.step_seconds
        if steps is None or seconds is None:
            return None
        return links(steps * seconds, wall_seconds(self.config.resources.runtime), seconds)

    def folder(self, results: Path | str, experiment: str) -> RunFolder:
        """The run's folder, with its documents as planned, whatever the files say."""
        return RunFolder(Path(results) / experiment / "runs" / self.name, self.documents)

    @functools.cached_property
    def documents(self) -> Tree:
        """The contents of run.json, launch.json and profile.json."""
        return {"run": plain(self.run), "launch": plain(self.launch), "profile": plain(self.profile)}

    @functools.cached_property
    def texts(self) -> dict[str, str]:
        """The texts of run.json, launch.json and profile.json."""
        return {name: files.canonical(value) for name, value in self.documents.items()}

    @property
    def digest(self) -> str:
        """Digest of run.json."""
        return hashlib.sha256(self.texts["run"].encode()).hexdigest()


@dataclass(frozen=True)
class Invalid:
    """A run that is left out by `sweep.skip_illegal`, with the rules that it breaks."""

    name: str
    reasons: tuple[str, ...]
    row: Tree

    def __str__(self) -> str:
        return f"{self.name} is INVALID: {'; '.join(self.reasons)}"


@dataclass(frozen=True)
class Plan:
    """All runs, and what they share.

    `corpus_tokenizers`: for each corpus in use the tokenizer that it is written with: a name under `tokenizers`, or a
    Hugging Face id or folder. `exports`: the runs to export. `agreements`: the report's, with names instead of
    patterns. `invalid`: runs that are left out.
    """

    name: str
    experiment: Experiment
    runs: list[Run]
    models: dict[str, Model]
    corpus_tokenizers: dict[str, str | None]
    exports: list[str]
    agreements: list[AgreementSpec]
    evaluated: list[str] = field(default_factory=list)  # exported runs that are evaluated
    published: Tree | None = None  # the table of report.compare_to
    invalid: list[Invalid] = field(default_factory=list)
    excluded: tuple[str, ...] = ()  # runs that `sweep.exclude` leaves out
    warnings: dict[str, list[str]] = field(default_factory=dict)  # warning -> runs that it applies to
    swept: tuple[str, ...] = ()  # keys of the sweep, also those that only runs set that are left out
    axes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # of the sweep: labels, where these are columns
    notes: tuple[str, ...] = ()  # changes by the environment, and values that the sweep replaces

    @property
    def left_out(self) -> list[str]:
        """What is said of runs that are left out, in lines."""
        excluded = [f"left out of the sweep: {some_of(self.excluded)} (sweep.exclude)"] if self.excluded else []
        return [*excluded, *map(str, self.invalid)]

    def __getitem__(self, name: str) -> Run:
        return next(run for run in self.runs if run.name == name)

    def write(self, results: Path | str) -> list[Path]:
        """Write the plan's files that have changed; return them."""
        folder = Path(results) / self.name
        return [folder / name for name, text in self.texts() if files.write_if_changed(folder / name, text)]

    def texts(self) -> Iterator[tuple[str, str]]:
        """The plan's files and their texts: the table, and the documents of each run. Names are relative to the
        experiment's results."""
        here = ExperimentFolder(Path())
        for run in self.runs:
            folder = here.run(run.name)
            for name, text in run.texts.items():
                yield str(folder.file(name)), text
        left_out = [{**run.row, "state": "INVALID", "why": "; ".join(run.reasons)} for run in self.invalid]
        yield str(here.plan), documents.table([run.row for run in self.runs] + left_out)

    def submitted(self, restarted: Collection[str] = ()) -> Iterator[Tree]:
        """The documents of each run for its job, with the request to restart from step 0, if any."""
        for run in self.runs:
            told = {"restart": True} if run.name in restarted else {}
            yield {"name": run.name, **run.documents, **told}
