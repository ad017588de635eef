"""Compares two bundles of one experiment, such as from two machines: whether they agree, and how they differ."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from markupsafe import Markup

from megaboa.errors import InputError
from megaboa.files import read_json, write_text
from megaboa.formats import counted
from megaboa.metrics import label
from megaboa.paths import ExperimentFolder
from megaboa.records import (
    AgreementCheck,
    AgreementSpec,
    BundleManifest,
    Checks,
    Evaluation,
    ReportSpec,
    read,
    read_if_there,
    write,
)
from megaboa.report import style
from megaboa.report.agreement import agreement_checks
from megaboa.report.baseline import TOLERANCE, differences_of, is_same, sample, settings_of
from megaboa.report.checks import counts, verdict
from megaboa.report.figures import agreement_figure
from megaboa.report.frames import Frames
from megaboa.report.intervals import Ratio, ratio
from megaboa.report.page import environment
from megaboa.report.runs import RunResult, load_runs, passed
from megaboa.report.style import Shades

QUANTITIES = ("step_seconds", "tokens_per_second", "memory.measured_gib")
FIGURE = "differences"
A, B = "A", "B"


@dataclass(frozen=True)
class Side:
    """A bundle: its path, results and manifest."""

    path: Path
    results: Path
    manifest: BundleManifest

    @property
    def runs(self) -> list[RunResult]:
        return load_runs(self.results)

    @property
    def agreements(self) -> tuple[AgreementSpec, ...]:
        return read(ReportSpec, ExperimentFolder(self.results).specs.report).agreements


@dataclass(frozen=True)
class Row:
    """One quantity of one setting: the middle values of both sides, and the ratio of B to A."""

    run: str
    quantity: str
    first: float
    second: float
    ratio: Ratio


def make(first: Side, second: Side, page: Path) -> Checks:
    """Write the page and, next to it, its figure and checks.json."""
    ours, theirs = first.runs, second.runs
    names = list(dict.fromkeys(run.name for run in (*ours, *theirs)))
    if not {run.name for run in ours} & {run.name for run in theirs}:
        raise InputError(
            f"{second.path}: has no run of a name that {first.path} has: name two bundles of one experiment"
        )
    renamed = [_of(run, A) for run in ours] + [_of(run, B) for run in theirs]
    specs = agreements_of(first, names, ours)
    checks = [one for one in agreement_checks(specs, renamed) if isinstance(one, AgreementCheck)]
    runs: list[RunResult] = []
    found = Checks(state=verdict(runs, checks), counts=counts(runs, checks), checks=tuple(checks))
    template = environment().get_template("comparison.html.j2")
    write_text(
        page,
        template.render(
            first=first,
            second=second,
            verdict=found.state,
            verdict_text=verdict_text(checks),
            checks=checks,
            figure=_figure(specs, passed(renamed), page.parent),
            rows=rows_of(ours, theirs),
            evaluated=evaluated(ours, theirs),
            same=[run.name for run in ours if any(is_same(run, other) for other in theirs)],
            machines=machines(first, second),
            packages=packages(first.manifest, second.manifest),
            differs=differs(ours, theirs) + evaluated_by(first.results, second.results, names),
            data=data(first.results, second.results),
            label=label,
        ),
    )
    write(page.with_name("checks.json"), found)
    return found


def _of(run: RunResult, side: str) -> RunResult:
    return replace(run, name=_named(run.name, side))


def _named(run: str, side: str) -> str:
    return f"{run} in {side}"


def agreements_of(first: Side, names: Sequence[str], runs: Sequence[RunResult]) -> list[AgreementSpec]:
    """Agreements of each run in B with that in A, with the limits that A's experiment set for its own layouts.

    Runs in A that differ only by rounding, which are twins and layouts that agreed, show the effect of rounding. Runs
    added by A's agreements are not compared themselves.
    """
    added = {name for one in first.agreements for name in (*one.twins, *one.seeds)}
    own = {check.run: check for check in agreement_checks(first.agreements, list(runs))}
    agreed = {name for name, check in own.items() if getattr(check, "verdict", None) in ("equal", "within rounding")}
    specs = []
    for name in names:
        if name in added:
            continue
        group = next((one for one in first.agreements if name in (one.reference, *one.runs)), None)
        spec = AgreementSpec(reference=_named(name, A), runs=(_named(name, B),), tolerance=TOLERANCE)
        if group is not None and (name == group.reference or name in agreed):
            alike = [group.reference, *group.twins, *(run for run in group.runs if run in agreed)]
            spec = replace(
                spec,
                tolerance=group.tolerance,
                grad_norm_tolerance=group.grad_norm_tolerance,
                within=group.within,
                twins=tuple(_named(run, A) for run in alike if run != name) if group.twins else (),
                seeds=tuple(_named(run, A) for run in group.seeds),
            )
        specs.append(spec)
    return specs


def verdict_text(checks: Sequence[AgreementCheck]) -> str:
    """The verdict as text: `2 runs equal, 1 within rounding.`"""
    words = [check.verdict or "not compared" for check in checks]
    parts = [f"{words.count(word)} {word}" for word in dict.fromkeys(words)]
    return f"Of {counted(len(checks), 'run')}: {', '.join(parts)}."


def _figure(specs: Sequence[AgreementSpec], runs: list[RunResult], folder: Path) -> Markup | None:
    style.apply_style()
    drawn = agreement_figure(specs, runs, Shades(Frames(runs)))
    if drawn is None:
        style.remove(folder, FIGURE)
        return None
    figure, table = drawn
    svg = style.save(figure, folder, FIGURE)
    style.save_data(table, folder, FIGURE)
    plt.close(figure)
    return Markup(svg)


def rows_of(ours: Sequence[RunResult], theirs: Sequence[RunResult]) -> list[Row]:
    """Speed and memory of the settings that passed on both sides."""
    rows, others = [], settings_of(passed(list(theirs)))
    for setting in settings_of(passed(list(ours))):
        like = next((other for other in others if other.names & setting.names), None)
        for quantity in QUANTITIES if like else ():
            one, other = sample(quantity, setting.runs), sample(quantity, like.runs)
            if one and other:
                rows.append(Row(setting.name, quantity, one.middle, other.middle, ratio(other, one)))
    return rows


@dataclass(frozen=True)
class Evaluated:
    """A result of an evaluation, in both bundles; None where a bundle lacks it."""

    run: str
    name: str
    first: float | None
    second: float | None

    @property
    def difference(self) -> float | None:
        known = self.first is not None and self.second is not None
        return self.second - self.first if known and math.isfinite(self.second - self.first) else None


def evaluated(ours: Sequence[RunResult], theirs: Sequence[RunResult]) -> list[Evaluated]:
    """Results of evaluations, by run, in the order of A."""
    one, other = ({run.name: run.evaluation for run in runs} for runs in (ours, theirs))
    rows = []
    for run in dict.fromkeys((*one, *other)):
        first, second = one.get(run, {}), other.get(run, {})
        names = dict.fromkeys((*first, *second))
        rows += [Evaluated(run, name, first.get(name), second.get(name)) for name in names]
    return rows


def machines(first: Side, second: Side) -> list[tuple[str, str, str]]:
    """Each bundle's machine and code, whether or not they differ."""
    pairs = [_machine(side) for side in (first, second)]
    return [(name, pairs[0][name], pairs[1][name]) for name in pairs[0]]


def _machine(side: Side) -> dict[str, str]:
    one, made = side.manifest, side.manifest.environment
    image = one.image or {}
    changed = f" with {len(one.changed_files)} changed files" if one.changed_files else ""
    gpus = sorted({run.summary["gpu"] for run in side.runs if run.summary and run.summary.get("gpu")})
    return {
        "experiment": one.experiment,
        "device": ", ".join(one.device),
        "GPU": ", ".join(gpus) or "none",
        "ranks ran in": f"{image.get('runtime', 'unknown')} {str(image.get('digest') or '')[:19]}".strip(),
        "Python": made.python or "unknown",
        "system": f"{made.system or 'unknown'}, {made.libc or 'unknown'}",
        "packages are those of": made.of or "unknown",
        "commit of the code": f"{one.commit or 'unknown'}{changed}",
    }


def packages(first: BundleManifest, second: BundleManifest) -> list[tuple[str, str, str]]:
    """Packages whose versions differ, or that only one side has."""
    one, other = ({_package(name): at for name, at in each.environment.packages.items()} for each in (first, second))
    names = sorted(name for name in {*one, *other} if one.get(name) != other.get(name))
    return [(name, one.get(name, "none"), other.get(name, "none")) for name in names]


def _package(name: str) -> str:
    return name.lower().replace("_", "-")


def differs(ours: Sequence[RunResult], theirs: Sequence[RunResult]) -> list[tuple[str, list[str]]]:
    """Differences in the runs' configuration, machine and environment, with the names of the runs."""
    others, found = {run.name: run for run in theirs}, {}
    for run in ours:
        if other := others.get(run.name):
            for text in differences_of(other, run, "in B"):
                found.setdefault(text, []).append(run.name)
    return list(found.items())


def evaluated_by(first: Path, second: Path, names: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Differences in the command that evaluated the runs and in the files that it names, with the names of the runs."""
    found: dict[str, list[str]] = {}
    sides = ExperimentFolder(first), ExperimentFolder(second)
    for name in names:
        one, other = (read_if_there(Evaluation, side.run(name).evaluation) for side in sides)
        for text in _other_evaluation(one, other) if one and other else ():
            found.setdefault(text, []).append(name)
    return list(found.items())


def _other_evaluation(one: Evaluation, other: Evaluation) -> Iterator[str]:
    is_same = one.command == other.command
    if not is_same:
        yield f"evaluate.command: {one.command}, in B {other.command}"
    # Another command may name other files. Records of older versions have none.
    named = {*one.files, *other.files} if is_same else one.files.keys() & other.files.keys()
    for name in sorted(named):
        digests = [side.files.get(name, "unknown") for side in (one, other)]
        if digests[0] != digests[1]:
            yield f"evaluate.command: {name} with SHA-256 {digests[0][:8]}, in B {digests[1][:8]}"


def data(first: Path, second: Path) -> list[str]:
    """Corpora, tokenizers and models that differ between both."""
    one, other = _digests(first), _digests(second)
    return sorted(name for name in {*one, *other} if one.get(name) != other.get(name))


def _digests(results: Path) -> dict[str, Any]:
    kinds = {"corpus": "data/*.json", "tokenizer": "tokenizers/*.json", "model": "models/*/source.json"}
    paths = {kind: sorted(results.glob(pattern)) for kind, pattern in kinds.items()}
    return {
        f"{kind} {path.parent.name if kind == 'model' else path.stem}": read_json(path).get("digest")
        for kind, found in paths.items()
        for path in found
    }
