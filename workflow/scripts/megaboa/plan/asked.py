"""What is asked of the planned runs beside training: exports, evaluation, agreements, figures, a published table."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from typing import Any

from megaboa import metrics
from megaboa.config import Experiment
from megaboa.config.errors import choose
from megaboa.config.models.outputs import Figure
from megaboa.config.published import PublishedError, load_published
from megaboa.data.sources import is_hub_id
from megaboa.plan import documents
from megaboa.plan.model import Run
from megaboa.plan.problems import Place, Problems


class Asked:
    def __init__(self, experiment: Experiment, problems: Problems):
        self.experiment = experiment
        self.problems = problems

    def exports(self, names: list[str]) -> list[str]:
        return self.matching(("export", "runs"), self.experiment.export.runs, names)

    def matching(self, path: Place, patterns: list[str], names: list[str]) -> list[str]:
        """The runs that match names or glob patterns, in the runs' order; a pattern without a match is a problem."""
        found = set()
        for pattern in patterns:
            matched = fnmatch.filter(names, pattern)
            if not matched:
                self.problems.add(path, choose(pattern, names, "run"))
            found.update(matched)
        return [name for name in names if name in found]

    def check_exports(self, runs: list[Run], exports: list[str]) -> None:
        for run in filter(lambda run: run.name in exports, runs):
            if run.config.checkpoint.save_interval == 0:
                message = f"the run {run.name!r} saves no checkpoint to export: set checkpoint.save_interval above 0"
                self.problems.add(("export", "runs"), message)
            if run.config.parallel.fsdp == "megatron":
                message = (
                    f"the run {run.name!r} saves checkpoints of Megatron-FSDP, which Bridge can't convert: remove it"
                )
                self.problems.add(("export", "runs"), message)
            if run.config.models[run.model].recipe:
                message = (
                    f"the run {run.name!r} trains a recipe (models.{run.model}), and no Hugging Face model is known of "
                    "which it is one: remove the run here, or describe the model by hf or config"
                )
                self.problems.add(("export", "runs"), message)
        for run, repository in self.experiment.export.push.items():
            if run not in exports:
                self.problems.add(("export", "push", run), choose(run, exports, "exported run"))
            if not is_hub_id(repository):
                self.problems.add(("export", "push", run), f"{repository!r} is no repository of the hub: `owner/name`")

    def evaluated(self, exports: list[str]) -> list[str]:
        wanted = self.experiment.evaluate
        if wanted.command is None:
            return []
        if not exports:
            self.problems.add(
                ("evaluate", "command"), "needs an exported model: name the runs to export under export.runs"
            )
            return []
        return self.matching(("evaluate", "runs"), wanted.runs, exports)

    def agreements(self, names: list[str]) -> list[dict[str, Any]]:
        result = []
        for index, agreement in enumerate(self.experiment.report.agreements):
            path = ("report", "agreements", index)
            if agreement.reference not in names:
                self.problems.add((*path, "reference"), choose(agreement.reference, names, "run"))
            runs = self.matching((*path, "runs"), agreement.runs, names)
            others = [name for name in runs if name != agreement.reference]
            limits = agreement.model_dump(include={"tolerance", "grad_norm_tolerance"})
            result.append({"reference": agreement.reference, "runs": others, **limits})
        return result

    def check_figures(self, runs: list[Run]) -> None:
        swept = dict.fromkeys(key for run in runs for key in run.values)
        seen: set[str] = set()
        for index, figure in enumerate(self.experiment.report.figures):
            path = ("report", "figures", index)
            if found := column_problem(figure, swept):
                self.problems.add((*path, found[0]), found[1])
            if figure.name in seen:
                self.problems.add((*path, "name"), f"two figures are called {figure.name!r}: rename one")
            seen.add(figure.name)

    def published(self) -> dict[str, Any] | None:
        name = self.experiment.report.compare_to
        try:
            return load_published(name) if name else None
        except PublishedError as error:
            self.problems.add(("report", "compare_to"), str(error))
            return None


def column_problem(figure: Figure, swept: Iterable[str]) -> tuple[str, str] | None:
    """The key of a figure that names no column, and why; None where all do. `swept`: the keys of the sweep."""
    planned = (name for name in documents.COLUMNS if name not in ("tokens", "state", "why"))
    known = dict.fromkeys([*metrics.columns(figure.data), *planned, *metrics.columns("runs"), *swept])
    for key in ("x", "y", "value", "hue", "facet", "over"):
        name = getattr(figure, key)
        if name is not None and name not in known and not name.startswith((metrics.EVALUATION, "losses/", "valid/")):
            return key, choose(name, known, "column")
    for name in figure.filter:
        if name not in known and not name.startswith(metrics.EVALUATION):
            return "filter", choose(name, known, "column")
    return None
