"""Facts about each run of the plan, from the files below the results."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pandas as pd

from megaboa.blends import MAIN, documents_of_set, told_apart, validation_sets
from megaboa.layout import NAMES, words
from megaboa.metrics import EVALUATION, VALIDATION_SET, score
from megaboa.observe.numbers import WARMUP_STEPS
from megaboa.paths import ExperimentFolder, RunFolder
from megaboa.plan.documents import RECIPE, cell
from megaboa.records import (
    LM_LOSS,
    ExportedStep,
    Goodput,
    Parent,
    Preflight,
    RunCheck,
    Summary,
    TrainRecord,
    Tree,
    files,
    parse,
    plain,
    read,
    read_if_there,
)
from megaboa.report import exported
from megaboa.report.bits import NO_TEXT, Text, Texts, alike, has_several_tokenizers

# Best first; states are counted and shown in this order.
STATES = ("PASS", "FAIL", "INVALID", "NOT_RUN")
DP_ONLY = "dp only"  # the layout of a run without model parallelism
LEFT_OUT = "left out"  # the state under which runs left out of the plan are counted


@dataclass(frozen=True)
class RunResult:
    """A planned run and its results. `steps` has one row per step, without replayed ones."""

    name: str
    plan: dict[str, str]
    state: str
    reasons: list[str] = field(default_factory=list)
    summary: Tree | None = None  # metrics/summary.json; tables and figures refer to its keys
    steps: pd.DataFrame | None = None
    checkpoint: str | None = None
    export: str | None = None
    goodput: Goodput | None = None
    evaluation: dict[str, float] = field(default_factory=dict)  # NaN and infinities, too
    along: tuple[ExportedStep, ...] = ()  # exports of checkpoints along the training
    asked: Tree = field(default_factory=dict)  # run.json, of a run with metrics
    launched: Tree = field(default_factory=dict)  # launch.json
    sets: dict[str, tuple[str, ...]] = field(default_factory=dict)  # documents of further validation sets, by name
    names: dict[str, str] = field(default_factory=dict)  # of further validation sets in tables and figures, if others
    text: Text = NO_TEXT  # of the validation sets

    @property
    def model(self) -> str:
        return self.plan["model"]

    @property
    def left_out(self) -> bool:
        return is_left_out(self.plan)

    @property
    def documents(self) -> Tree:
        """The documents in which its metrics are looked up."""
        return {"summary": self.summary, "goodput": self.goodput and plain(self.goodput)}

    @property
    def validation(self) -> list[tuple[int, dict[str, float]]]:
        """The step of every evaluation, and its losses by set, the main one first; NaN and infinities, too."""
        summary = self.summary or {}
        texts = summary.get("not_finite", {})
        return [
            (one["step"], _by_set(one["losses"], texts, f"validation.{place}.losses", self.names))
            for place, one in enumerate(summary.get("validation", []))
        ]

    @property
    def last_losses(self) -> dict[str, float]:
        """The last validation losses by set."""
        found = self.validation
        return found[-1][1] if found else {}

    @property
    def bits_per_byte(self) -> dict[str, float]:
        """The last validation losses in bits per byte, of the sets whose text is known."""
        found = {name: self.bits(name, loss) for name, loss in self.last_losses.items()}
        return {name: bits for name, bits in found.items() if bits is not None}

    def bits(self, name: str, loss: float) -> float | None:
        """A loss in bits per byte. `name`: the set's in tables and figures."""
        return self.text.bits(self.asked_names.get(name, name), loss)

    @property
    def asked_names(self) -> dict[str, str]:
        return {shown: name for name, shown in self.names.items()}

    @property
    def scores(self) -> dict[str, float]:
        """The last losses of further validation sets, and the values of `evaluate`, by their columns."""
        sets = {f"{VALIDATION_SET}{name}": loss for name, loss in self.last_losses.items() if name != MAIN}
        return sets | {f"{EVALUATION}{name}": value for name, value in self.evaluation.items()}

    @property
    def warm(self) -> pd.Series:
        """Which of its `steps` count for the speed: not the first ones of an attempt, and none from before the run
        continued in place (attempts up to 0), which may have been on another machine."""
        attempts = self.steps["attempt"]
        return (attempts > 0) & (self.steps.groupby("attempt").cumcount() >= WARMUP_STEPS)

    @property
    def steps_asked(self) -> str:
        """Number of steps that the run itself trains, without its parent's."""
        last, parent = self.plan["train_iters"], self._parent
        return str(int(last) - parent.steps_done) if parent and last.isdigit() else last

    @property
    def continues(self) -> str | None:
        """`steps 21 to 40, after mine/base@20`, if the run continued from a checkpoint."""
        last, parent = self.plan["train_iters"], self._parent
        return parent and parent.steps(int(last) if last.isdigit() else None)

    @property
    def _parent(self) -> Parent | None:
        found = self.asked.get("parent")
        return found and parse(Parent, found, f"run.json of {self.name}")

    @property
    def layout(self) -> str:
        """The parallel axes and their sizes, such as `tp2 sp`; `recipe` if only the recipe knows them."""
        sizes = {name: text for name, text in self.plan.items() if text not in ("1", "-", RECIPE)}
        known = " ".join([*words(sizes), *(["sp"] if self.plan["sp"] == "true" else [])])
        return known or (RECIPE if RECIPE in map(self.plan.get, NAMES) else DP_ONLY)


def _by_set(losses: Tree, texts: dict[str, str], path: str, others: Mapping[str, str]) -> dict[str, float]:
    further = {name: name.removeprefix(VALIDATION_SET) for name in losses if name.startswith(VALIDATION_SET)}
    names = {LM_LOSS: MAIN, **{name: others.get(short, short) for name, short in further.items()}}
    known = {name: texts.get(f"{path}.{name}", "nan") if loss is None else loss for name, loss in losses.items()}
    return {shown: float(known[name]) for name, shown in names.items() if name in known}


def load_runs(results: Path) -> list[RunResult]:
    """Every run of plan.tsv, in its order."""
    found = [load_run(ExperimentFolder(results).run(row["run"]), row) for row in read_plan(results)]
    return with_texts(results, with_names(found))


def with_names(runs: Sequence[RunResult]) -> list[RunResult]:
    """The runs, with names that tell validation sets of different documents apart, also in their steps."""
    names = told_apart({run.name: run.sets for run in runs})

    def renamed(run: RunResult) -> pd.DataFrame | None:
        columns = {f"{VALIDATION_SET}{name}": f"{VALIDATION_SET}{shown}" for name, shown in names[run.name].items()}
        return run.steps if run.steps is None else run.steps.rename(columns=columns)

    return [replace(run, names=names[run.name], steps=renamed(run)) if names[run.name] else run for run in runs]


def with_texts(results: Path, runs: Sequence[RunResult]) -> list[RunResult]:
    """The runs with the texts of their validation sets."""
    texts = Texts(results)
    return [replace(run, text=texts.of(run.name, run.asked)) if run.asked else run for run in runs]


def read_plan(results: Path) -> list[dict[str, str]]:
    """Rows of plan.tsv, completed with the recipes' own values, which preflight has found."""
    with ExperimentFolder(results).plan.open(encoding="utf-8", newline="") as stream:
        rows = list(csv.DictReader(stream, delimiter="\t"))
    found = read_if_there(Preflight, ExperimentFolder(results).preflight)
    checked = found.runs if found else {}
    return [_with_recipes_values(row, checked.get(row["run"])) for row in rows]


def _with_recipes_values(row: dict[str, str], checked: RunCheck | None) -> dict[str, str]:
    if not checked or not checked.facts:
        return row
    own = {**checked.facts.get("training", {}), **checked.facts.get("layout", {}), "dp": checked.data_parallel_size}
    own["train_iters"] = own.get("iters")
    sizes = [own.get(name) for name in ("train_iters", "gbs", "seq_length")]
    own["tokens"] = math.prod(sizes) if all(sizes) else None
    return row | {name: cell(own[name]) for name, value in row.items() if value == RECIPE and name in own}


def is_left_out(plan: dict[str, str]) -> bool:
    """Whether a run was left out on purpose: the device doesn't support it, or `sweep.skip_illegal` skips it."""
    return plan.get("state") == "INVALID"


def load_run(folder: RunFolder, plan: dict[str, str]) -> RunResult:
    if is_left_out(plan):
        return RunResult(folder.name, plan, "INVALID", [plan["why"]])
    if not folder.summary.exists():
        return RunResult(folder.name, plan, "NOT_RUN", ["it has no metrics"])
    steps = pd.read_parquet(folder.steps_table)
    spent = files.read_json(folder.goodput) if folder.goodput.exists() else None  # null if nothing is known
    goodput = spent and parse(Goodput, spent, folder.goodput)
    return result_of(folder, plan, read(Summary, folder.summary), steps, goodput)


def result_of(
    folder: RunFolder,
    plan: dict[str, str],
    summary: Summary,
    steps: pd.DataFrame,
    goodput: Goodput | None,
) -> RunResult:
    """A run's measurements, and its later exports and evaluations."""
    train = read_if_there(TrainRecord, folder.train_manifest)
    export, evaluation, along = exported.export_of(folder), exported.evaluation_of(folder), exported.along_of(folder)
    return RunResult(
        name=folder.name,
        plan=plan,
        state=summary.state,
        reasons=list(summary.reasons),
        summary=plain(summary),
        steps=steps[~steps["replayed"]].reset_index(drop=True),
        checkpoint=train and train.checkpoint,
        export=export and export.path,
        goodput=goodput,
        evaluation=evaluation.numbers if evaluation else {},
        along=along.exports if along else (),
        asked=folder.document("run") if folder.file("run").exists() else {},
        launched=folder.document("launch") if folder.file("launch").exists() else {},
        sets=_sets(folder) if folder.file("run").exists() else {},
    )


def _sets(folder: RunFolder) -> dict[str, tuple[str, ...]]:
    """The documents of each further validation set, and before them those that it had until the run continued in
    place, if they were others."""
    run, before = folder.run, folder.parent_folder if folder.is_in_place else None
    earlier = _sets(before) if before and before.file("run").exists() else {}
    found = {name: documents_of_set(run.data, one, run.held_out) for name, one in validation_sets(run.data).items()}
    return {name: tuple(dict.fromkeys((one, *earlier.get(name, ())))) for name, one in found.items()}


def in_bits(runs: Sequence[RunResult]) -> dict[str, dict[str, float]]:
    """The last validation losses in bits per byte, by run, if runs have different tokenizers. Sets of the same
    documents have one column, although their corpora have other names."""
    if not has_several_tokenizers(run.text for run in runs):
        return {}
    same = alike(run.text for run in runs)

    def column(run: RunResult, shown: str) -> str:
        name = run.asked_names.get(shown, shown)
        return name if name in same else shown

    found = {run.name: {column(run, name): bits for name, bits in run.bits_per_byte.items()} for run in runs}
    return {run: values for run, values in found.items() if values}


def by_score(numbers: Mapping[str, float]) -> dict[str, float]:
    """Values of `evaluate` by their names in tables, which have columns of their own, too."""
    return {score(key): value for key, value in numbers.items()}


def passed(runs: Sequence[RunResult]) -> list[RunResult]:
    return [run for run in runs if run.state == "PASS"]


def count_states(states: list[str]) -> dict[str, int]:
    return {state: states.count(state) for state in (*STATES, LEFT_OUT) if state in states}
