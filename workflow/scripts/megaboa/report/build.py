"""Make the report of an experiment: figures, tables, checks and one page."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megaboa.config.models.outputs import Figure
from megaboa.doctor import examine
from megaboa.files import write_text
from megaboa.paths import ExperimentFolder
from megaboa.records import Checks, ReportCheck, ReportSpec, read, write
from megaboa.report.agreement import agreement_checks
from megaboa.report.baseline import baseline_checks
from megaboa.report.checks import (
    along_checks,
    counts,
    failed_evaluations,
    faults,
    figure_checks,
    number_checks,
    proof_checks,
    stage_checks,
    tensor_checks,
    unprofiled,
    verdict,
)
from megaboa.report.contents import Contents
from megaboa.report.corpora import load_corpora, load_data
from megaboa.report.drawing import draw
from megaboa.report.expected import load_expected
from megaboa.report.frames import Frames
from megaboa.report.interim import load_interim
from megaboa.report.notes import read_captions
from megaboa.report.page import render, verdict_text
from megaboa.report.profiles import draw_profiles, load_profiles
from megaboa.report.provenance import provenance
from megaboa.report.runs import RunResult, load_runs, passed
from megaboa.report.tables import save_tables, settings_table, swept_columns

CAPTIONS = Path(__file__).parents[3] / "report" / "captions.yaml"  # a caption for every figure


@dataclass(frozen=True)
class Wanted:
    """Input and output of a report.

    In an interim report runs may be missing; after a failure, results of other jobs.
    """

    results: Path
    page: Path  # figures and checks.json are written next to it
    command: str  # the command that makes this report
    config_files: list[Path]  # the experiment's files, shown on the page
    captions: Path = CAPTIONS
    interim: bool = False
    after_failure: bool = False

    @property
    def is_careful(self) -> bool:
        """Whether files of an earlier configuration may be left."""
        return self.interim or self.after_failure


def make(wanted: Wanted) -> str:
    """Write the report; return its verdict in one line, and a line for each of its notes."""
    results, folder = wanted.results, wanted.page.parent
    captions = read_captions(wanted.captions)
    asked = read(ReportSpec, ExperimentFolder(results).specs.report)
    runs, interim = load_interim(results) if wanted.is_careful else (load_runs(results), None)
    corpora, checks = load_corpora(results), _checks(wanted, asked, runs)
    expected = load_expected(results, runs)
    predicted = {one.run: one.predicted_gib for one in expected}
    frames = Frames(passed(runs), asked.values, predicted, asked.unset, asked.axes, failed_evaluations(checks))
    own = [Figure.model_validate(figure) for figure in asked.figures]
    drawn = draw(runs, corpora, asked.agreements, captions, folder, frames, own, wanted.interim)
    checks += figure_checks(drawn)
    without = unprofiled(results, asked) if wanted.is_careful else ()
    profiles = load_profiles(results, [run for run in asked.profiles if run not in without])
    contents = Contents(
        title=asked.title or results.name,
        experiment=results.name,
        runs=runs,
        checks=checks,
        drawn=drawn,
        provenance=provenance(results, wanted.config_files, wanted.command),
        question=asked.question,
        interim=interim if wanted.interim else None,
        excluded=asked.excluded,
        swept=swept_columns(runs, frames),
        settings=settings_table(runs, frames),
        corpora=corpora,
        data=load_data(results, runs),
        expected=expected,
        published=asked.published,
        baseline=asked.baseline,
        profiles=profiles,
        profile_figures=draw_profiles(profiles, captions, folder),
        failures=examine.failures(results, [run.name for run in runs]),
    )
    page = render(contents, save_tables(contents, frames, folder))
    found = Checks(
        state=verdict(runs, checks),
        counts=counts(runs, checks),
        failed=tuple(faults(runs, checks)),
        checks=tuple(checks),
        notes=tuple(f"warning: report.figures: {one.note}" for one in drawn if not (one.svg or one.fault)),
    )
    write(wanted.page.with_name("checks.json"), found)
    write_text(wanted.page, page)
    said = f"{wanted.page}: {'interim, ' if wanted.interim else ''}{found.state}. {verdict_text(found.counts)}"
    return "\n".join([said, *found.notes])


def _checks(wanted: Wanted, asked: ReportSpec, runs: list[RunResult]) -> list[ReportCheck]:
    checks = agreement_checks(asked.agreements, runs)
    checks += tensor_checks(asked.agreements, wanted.results, checks, wanted.after_failure)
    if asked.baseline:
        earlier = [load_runs(folder) for folder in ExperimentFolder(wanted.results).copied_baselines]
        checks += baseline_checks(asked.baseline, runs, earlier)
    if wanted.is_careful:
        checks += stage_checks(wanted.results, asked, runs, over=wanted.after_failure)
    else:
        checks += proof_checks([Path(path) for path in asked.proofs]) + along_checks(wanted.results, asked)
    return [*checks, *number_checks(runs)]
