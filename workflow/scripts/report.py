"""Make the report of an experiment: figures, checks and one page."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megaboa.config.models.report import Figure
from megaboa.doctor import examine
from megaboa.files import read_json, write_json, write_text
from megaboa.report.checks import agreement_checks, faults, proof_checks, stage_checks, unprofiled, verdict
from megaboa.report.corpora import load_corpora, load_data
from megaboa.report.expected import gap_rows, load_expected
from megaboa.report.figures import time_rows
from megaboa.report.frames import Frames
from megaboa.report.interim import load_interim
from megaboa.report.page import ReportError, draw, read_captions, render, verdict_text
from megaboa.report.profiles import draw_profiles, load_profiles
from megaboa.report.provenance import provenance
from megaboa.report.runs import load_runs, passed
from megaboa.report.tables import save_tables


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--settings", type=Path, required=True, help="the experiment's specs/report.json")
    parser.add_argument("--captions", type=Path, required=True, help="YAML with a caption for every figure")
    parser.add_argument("--config-file", type=Path, nargs="*", default=[], help="the experiment's files, to be shown")
    parser.add_argument("--command", default="snakemake", help="the command that makes this report")
    parser.add_argument("--out", type=Path, required=True, help="page to write; figures and checks.json go beside it")
    parser.add_argument("--interim", action="store_true", help="report on what is there, whichever runs are missing")
    parser.add_argument("--after-failure", action="store_true", help="no run is missing, but other jobs failed")
    args = parser.parse_args()

    try:
        captions = read_captions(args.captions)
    except ReportError as error:
        sys.exit(str(error))
    results = args.settings.parents[1]
    settings = read_json(args.settings)
    careful = args.interim or args.after_failure  # there may be files of what was configured before
    runs, interim = load_interim(results) if careful else (load_runs(results), None)
    interim = interim if args.interim else None
    corpora = load_corpora(results)
    checks = agreement_checks(settings["agreements"], runs)
    profiled = settings.get("profiles", [])
    if careful:
        checks += stage_checks(results, settings, runs, over=args.after_failure)
        profiled = [run for run in profiled if run not in unprofiled(results, settings)]
    else:
        checks += proof_checks([Path(path) for path in settings["proofs"]])
    expected = load_expected(results, runs)
    frames = Frames(passed(runs), settings.get("values"), {one.run: one.predicted_gib for one in expected})
    own = [Figure.model_validate(figure) for figure in settings.get("figures", [])]
    try:
        drawn = draw(runs, corpora, settings["agreements"], captions, args.out.parent, frames, own, args.interim)
    except ReportError as error:
        sys.exit(str(error))
    profiles, published = load_profiles(results, profiled), settings.get("published")
    gaps, times = gap_rows(published, passed(runs)) if published else [], time_rows(passed(runs))
    tables = save_tables(runs, frames, checks, gaps, times, expected, args.out.parent)
    page = render(
        title=settings["title"] or results.name,
        experiment=results.name,
        runs=runs,
        corpora=corpora,
        checks=checks,
        drawn=drawn,
        provenance=provenance(results, args.config_file, args.command),
        data=load_data(results, runs),
        published=published,
        tables=tables,
        question=settings.get("question"),
        profiles=profiles,
        profile_figures=draw_profiles(profiles, captions, args.out.parent),
        expected=expected,
        failures=examine.failures(results, [run.name for run in runs]),
        interim=interim,
    )
    result = verdict(runs, checks)
    found = {"state": result["state"], "counts": result["counts"], "failed": faults(runs, checks), "checks": checks}
    write_json(args.out.with_name("checks.json"), found)
    write_text(args.out, page)
    print(f"{args.out}: {'interim, ' if interim else ''}{result['state']}. {verdict_text(result)}")


if __name__ == "__main__":
    main()
