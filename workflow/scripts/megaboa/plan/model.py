"""A plan: the runs of an experiment, and the files that say what they are."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaboa import files
from megaboa.config.models import Experiment, Model
from megaboa.plan import documents


@dataclass(frozen=True)
class Run:
    """One run of the sweep. `config` is the experiment with the run's values, every number resolved.

    `model` is a key of `config.models`; where the sweep changes the model itself, it is one that the plan derived.
    `corpora` are the names of the corpora that are read, `tokenizers` those of the trained tokenizers that are needed.
    """

    name: str
    values: dict[str, Any]
    config: Experiment
    model: str
    corpora: tuple[str, ...]
    tokenizers: tuple[str, ...]
    run: dict[str, Any]
    launch: dict[str, Any]
    profile: dict[str, Any]
    row: dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """All runs, and what they share.

    `corpus_tokenizers` says for each corpus in use which tokenizer it is written with: a name under `tokenizers`, or a
    Hugging Face id or folder. `exports` are the runs to export, `agreements` the report's: names, no patterns.
    """

    name: str
    experiment: Experiment
    runs: list[Run]
    models: dict[str, Model]
    corpus_tokenizers: dict[str, str]
    exports: list[str]
    agreements: list[dict[str, Any]]
    published: dict[str, Any] | None = None  # the table of report.compare_to

    def __getitem__(self, name: str) -> Run:
        return next(run for run in self.runs if run.name == name)

    def write(self, results: Path | str) -> list[Path]:
        """Write the table, and each run's run.json, launch.json and profile.json, where they changed; say which."""
        written = []
        for run in self.runs:
            folder = Path(results) / self.name / "runs" / run.name
            for name, value in (("run.json", run.run), ("launch.json", run.launch), ("profile.json", run.profile)):
                if files.write_if_changed(folder / name, files.canonical(value)):
                    written.append(folder / name)
        table = Path(results) / self.name / "plan.tsv"
        if files.write_if_changed(table, documents.table([run.row for run in self.runs])):
            written.append(table)
        return written
