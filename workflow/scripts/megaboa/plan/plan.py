"""A plan: the runs of an experiment, and the files that say what they are."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from megaboa import files
from megaboa.check.facts import Facts
from megaboa.config.models.experiment import Experiment
from megaboa.config.models.model import Model
from megaboa.paths import ExperimentFolder, RunFolder
from megaboa.plan import documents
from megaboa.records import AgreementSpec, LaunchSpec, ProfileSpec, RunSpec, Tree, plain


@dataclass(frozen=True)
class Run:
    """One run of the sweep. `config` is the experiment with the run's values, every number resolved.

    `model` is a key of `config.models`; where the sweep changes the model itself, it is one that the plan derived.
    `corpora` are the names of the corpora that are read, `tokenizers` those of the trained tokenizers that are needed.
    `facts` are what the plan knows of it for rules and estimates.
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

    def folder(self, results: Path | str, experiment: str) -> RunFolder:
        """The run below the results, as it is planned, whatever its files say."""
        return RunFolder(Path(results) / experiment / "runs" / self.name, self.documents)

    @functools.cached_property
    def documents(self) -> Tree:
        """What is written about it: run.json, launch.json and profile.json."""
        return {"run": plain(self.run), "launch": plain(self.launch), "profile": plain(self.profile)}

    @functools.cached_property
    def texts(self) -> dict[str, str]:
        """The same as it is written."""
        return {name: files.canonical(value) for name, value in self.documents.items()}

    @property
    def digest(self) -> str:
        """Of run.json."""
        return hashlib.sha256(self.texts["run"].encode()).hexdigest()


@dataclass(frozen=True)
class Invalid:
    """A run that `sweep.skip_illegal` leaves out, with the rules that it breaks."""

    name: str
    reasons: tuple[str, ...]
    row: Tree

    def __str__(self) -> str:
        return f"{self.name} is INVALID: {'; '.join(self.reasons)}"


@dataclass(frozen=True)
class Plan:
    """All runs, and what they share.

    `corpus_tokenizers` says for each corpus in use which tokenizer it is written with: a name under `tokenizers`, or a
    Hugging Face id or folder. `exports` are the runs to export, `agreements` the report's: names, no patterns.
    `invalid` are runs that were left out.
    """

    name: str
    experiment: Experiment
    runs: list[Run]
    models: dict[str, Model]
    corpus_tokenizers: dict[str, str | None]
    exports: list[str]
    agreements: list[AgreementSpec]
    evaluated: list[str] = field(default_factory=list)  # exported runs that `evaluate` is called for
    published: Tree | None = None  # the table of report.compare_to
    invalid: list[Invalid] = field(default_factory=list)
    warnings: dict[str, list[str]] = field(default_factory=dict)  # with the runs that each is about
    notes: tuple[str, ...] = ()  # what the environment has changed, and what the sweep replaces

    def __getitem__(self, name: str) -> Run:
        return next(run for run in self.runs if run.name == name)

    def write(self, results: Path | str) -> list[Path]:
        """Write the plan's files where they changed; say which."""
        folder = Path(results) / self.name
        return [folder / name for name, text in self.texts() if files.write_if_changed(folder / name, text)]

    def texts(self) -> Iterator[tuple[str, str]]:
        """The table, and each run's run.json, launch.json and profile.json: names below the experiment's results."""
        here = ExperimentFolder(Path())
        for run in self.runs:
            folder = here.run(run.name)
            for name, text in run.texts.items():
                yield str(folder.file(name)), text
        left_out = [{**run.row, "state": "INVALID", "why": "; ".join(run.reasons)} for run in self.invalid]
        yield str(here.plan), documents.table([run.row for run in self.runs] + left_out)

    def submitted(self, restarted: Collection[str] = ()) -> Iterator[Tree]:
        """What each run's job must know when it starts, including whether to restart from step 0."""
        for run in self.runs:
            told = {"restart": True} if run.name in restarted else {}
            yield {"name": run.name, **run.documents, **told}
