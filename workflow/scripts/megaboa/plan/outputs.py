"""Plans what is made of trained runs: exports, their evaluation, agreements, and what the report compares with."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Literal

from megaboa.check import outcome
from megaboa.config import Experiment
from megaboa.config.models.outputs import Along
from megaboa.config.problems import choose
from megaboa.config.published import PublishedError, load_published
from megaboa.data.hub import is_id
from megaboa.formats import some_of
from megaboa.paths import ExperimentFolder, RunFolder
from megaboa.plan import best, tasks
from megaboa.plan.choices import Place, Problems, seeds, twins
from megaboa.plan.parent_runs import SHOWN, kept_by, will_keep
from megaboa.plan.plan import Run
from megaboa.plan.run_facts import known_check
from megaboa.records import AgreementSpec, ExportRecord, Preflight, Tree, read_if_there


class OutputPlanner:
    """Checks what an experiment asks for besides training."""

    def __init__(self, experiment: Experiment, problems: Problems, left_out: Collection[str], results: Path):
        """`left_out`: names of runs that are left out, which may still be requested."""
        self.experiment = experiment
        self.problems = problems
        self.left_out = left_out
        self.results = results

    def exports(self, names: list[str]) -> list[str]:
        return self.matching(("export", "runs"), self.experiment.export.runs, names)

    def matching(self, path: Place, patterns: list[str], names: list[str]) -> list[str]:
        """The runs that match names or glob patterns, in the order of runs; a pattern without a match is a problem."""
        found = set()
        for pattern in patterns:
            matched = fnmatch.filter(names, pattern)
            if not matched and not fnmatch.filter(self.left_out, pattern):
                self.problems.add(path, choose(pattern, names, "run"))
            found.update(matched)
        return [name for name in names if name in found]

    def check_exports(self, runs: list[Run], exports: list[str]) -> None:
        folder = ExperimentFolder(self.results / str(self.experiment.experiment))
        # Preflight's warning that a run can't be exported counts once it is to be.
        found = read_if_there(Preflight, folder.preflight) if exports else None
        for run in filter(lambda run: run.name in exports, runs):
            if (known := known_check(run, found)) and known.export:
                message = f"the run {run.name!r}: {outcome.unlike_its_config(known.export)}: {outcome.REMEDY}"
                self.problems.add(("export", "runs"), message)
            for why in obstacles(run):
                self.problems.add(("export", "runs"), f"the run {run.name!r} {why}")
            if message := unkept(run, self.experiment.export.checkpoints):
                self.problems.add(("export", "checkpoints"), message)
            own = run.folder(self.results, str(self.experiment.experiment))
            if message := unkept_step(run, self.experiment.export.checkpoint, own):
                self.problems.add(("export", "checkpoint"), message, run.name)
            if self.experiment.export.checkpoint == "best" and (why := best.no_loss(run, own)):
                message = f"is `best`, and the run has no validation loss, as {why}, or name `final` or a step"
                self.problems.add(("export", "checkpoint"), message, run.name)
        for run, repository in self.experiment.export.push.items():
            if run not in exports:
                self.problems.add(("export", "push", run), choose(run, exports, "exported run"))
            if not is_id(repository):
                self.problems.add(("export", "push", run), f"{repository!r} is not a hub repository: `owner/name`")

    def warnings(self, runs: list[Run], exports: list[str]) -> dict[str, list[str]]:
        """Warnings of exports, each with its runs."""
        found: dict[str, list[str]] = {}
        for run in runs if self.experiment.export.checkpoint == "best" else ():
            own = run.folder(self.results, str(self.experiment.experiment))
            if run.name in exports and (message := best.only_last(run, own)):
                found.setdefault(message, []).append(run.name)
        return found

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

    def agreements(self, names: list[str]) -> list[AgreementSpec]:
        result = []
        for index, agreement in enumerate(self.experiment.report.agreements):
            path = ("report", "agreements", index)
            if agreement.reference not in names and agreement.reference not in self.left_out:
                self.problems.add((*path, "reference"), choose(agreement.reference, names, "run"))
            runs = self.matching((*path, "runs"), agreement.runs, names)
            others = [name for name in runs if name != agreement.reference]
            if self.left_out and (agreement.reference in self.left_out or not others):
                continue
            limits = agreement.model_dump(include={"tolerance", "grad_norm_tolerance", "within", "tensors"})
            if agreement.within == "seed" and not agreement.seeds:
                self.problems.add((*path, "within"), "is `seed`, and no other seed is run: set seeds to 2 or more")
            result.append(
                AgreementSpec(
                    reference=agreement.reference,
                    runs=tuple(others),
                    twins=twins(agreement.reference, agreement.twins),
                    seeds=seeds(agreement.reference, agreement.seeds),
                    **limits,
                )
            )
        return result

    def published(self) -> Tree | None:
        name = self.experiment.report.compare_to
        try:
            return load_published(name) if name else None
        except PublishedError as error:
            self.problems.add(("report", "compare_to"), str(error))
            return None

    def check_baseline(self) -> None:
        asked = self.experiment.report.baseline
        own = (self.results / str(self.experiment.experiment)).resolve()
        for one in ExperimentFolder(own).baselines_of(asked.paths if asked else ()):
            path = one.path
            if path.resolve().is_relative_to(own):
                problem = (
                    f"{path}: lies in this experiment's own results: name another experiment, or a bundle elsewhere"
                )
            elif (
                (path.suffix == ".zip" and path.is_file())
                or ExperimentFolder(path).plan.is_file()
                or (not path.exists() and one.is_copied)
            ):
                continue
            else:
                problem = f"{path}: is neither a bundle (.zip) nor a results folder (it has no plan.tsv)"
            self.problems.add(("report", "baseline", "path"), problem)


def obstacles(run: Run) -> Iterator[str]:
    """Why a run can't be exported, by its config alone."""
    model = run.config.models[run.model]
    if run.config.checkpoint.save_interval == 0:
        yield "saves no checkpoint to export: set checkpoint.save_interval above 0"
    if run.config.parallel.fsdp == "megatron":
        yield "saves checkpoints of Megatron-FSDP, which Bridge can't convert: remove it"
    if tasks.changes_random_weights(run.config, run.model):
        yield (
            "trains adapters to random weights, which are in no checkpoint: remove it, or set "
            f"models.{run.model}.init to pretrained"
        )
    if run.run.has_adapters and model.conversion.ranks > 1:
        yield (
            "trains adapters, which one process merges: remove it, or, once the model is imported, "
            f"models.{run.model}.conversion"
        )
    if not model.has_source:
        yield (
            f"trains a recipe (models.{run.model}), whose Hugging Face architecture is unknown: remove the run here, "
            f"or name the model too (models.{run.model}.hf or config)"
        )


def unkept(run: Run, wanted: Literal["all"] | Along | None) -> str | None:
    """Why checkpoints won't be there for exports during the training; None if they will."""
    last = run.run.training.get("train_iters")
    kept = will_keep(run)
    if not isinstance(wanted, Along) or not kept or last is None:
        return None
    own = (step for step in range(wanted.every, last + 1, wanted.every) if step > run.run.steps_before)
    missing = [step for step in own if step not in kept]
    if not missing and wanted.every <= last:
        return None
    steps = some_of([str(step) for step in missing or [wanted.every]], SHOWN)
    return (
        f"every {wanted.every} steps: the run {run.name!r} keeps no checkpoint of step {steps}, but of "
        f"{some_of([str(step) for step in kept], SHOWN)}: change checkpoint.save_interval, and with keep_last also "
        "keep_every"
    )


def unkept_step(run: Run, wanted: int | str, folder: RunFolder) -> str | None:
    """Why there won't be a checkpoint of the step that `export.checkpoint` names; None if there will, or if nobody
    knows yet.

    A trained run is asked for what it has: the keys that decide what is kept may have changed since.
    """
    kept = None if isinstance(wanted, str) else kept_by(run, folder)
    made = read_if_there(ExportRecord, folder.export)  # it needs its checkpoint no more
    if not kept or wanted in kept or (made and made.iteration == wanted):
        return None
    below = [step for step in kept if step < wanted][-1:]
    above = [step for step in kept if step > wanted][:1]
    nearest = " and ".join(map(str, [*below, *above]))
    later = "" if folder.train_manifest.exists() else ", or change checkpoint.save_interval, keep_last or keep_every"
    text = f"no checkpoint of step {wanted} is kept, the nearest is of {nearest}: name a step that is kept, or `final`"
    return f"{text}{later}"
