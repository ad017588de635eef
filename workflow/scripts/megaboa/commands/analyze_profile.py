"""Say where a profiled step's time goes, whoever captured it.

CAPTURES are files or folders: .nsys-rep, .sqlite, .json, .json.gz. `--trace` takes them, and what was asked for, from
the manifest of a run's capture. `--against` compares with an earlier analysis, or with other captures.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from megaboa import commands, files
from megaboa.formats import counted
from megaboa.layout import Layout
from megaboa.observe.traces.analysis import Expected, analyse
from megaboa.observe.traces.comparison import compare
from megaboa.records import Analysis, RunSpec, Trace, parse, read, write

ANALYSED = ("pytorch", "nsys")
VIEWERS = {"viztracer": "vizviewer", "memory": "PyTorch's memory_viz"}


def main(words: list[str]) -> None:
    parser = commands.parser("analyze-profile", __doc__)
    parser.add_argument("captures", type=Path, nargs="*", help="files or folders")
    parser.add_argument("--trace", type=Path, help="trace.json of a run, with run.json next to it")
    parser.add_argument("--run", type=Path, help="run.json: says which rank holds which part of the model")
    parser.add_argument("--against", type=Path, help="analysis.json of an earlier profile, or its captures")
    parser.add_argument("--out", type=Path, help="analysis to write (JSON)")
    parser.add_argument("--figures", type=Path, help="folder for figures")
    arguments = parser.parse_args(words)
    if not arguments.captures and not arguments.trace:
        parser.error("give captures, or --trace")

    paths, expected = wanted(arguments)
    document = analyse(paths, expected)
    if arguments.against:
        before = earlier(arguments.against)
        document = replace(document, comparison=replace(compare(before, document), against=str(arguments.against)))
    if arguments.out:
        write(arguments.out, document)
    if arguments.figures:
        from megaboa.report.profiles import draw_all

        draw_all(document, arguments.figures)
    print("\n".join(document.summary))
    if document.comparison:
        print("\n".join(["", f"against {arguments.against}:", *document.comparison.summary]))


def wanted(arguments: argparse.Namespace) -> tuple[list[Path], Expected]:
    """Captures, and what they should be."""
    trace = read(Trace, arguments.trace) if arguments.trace else None
    run_path = arguments.run or (arguments.trace.with_name("run.json") if arguments.trace else None)
    run = read(RunSpec, run_path) if run_path else None
    layout, training = (Layout.of_run(run), run.training) if run else (None, {})
    paths = [*arguments.captures, *([Path(trace.path)] if trace else [])]
    return paths, Expected(
        ranks=list(trace.ranks) if trace else [],
        steps=list(trace.steps) if trace else [],
        step_log=Path(trace.step_log) if trace and trace.step_log else None,
        train_iters=training.get("train_iters"),
        layout=layout,
        device=("gpu" if run.device == "cuda" else "cpu") if run else None,
        microbatches=layout and layout.microbatches(training["global_batch_size"], training["micro_batch_size"]),
        kept=kept(trace) if trace else "",
    )


def kept(trace: Trace) -> str:
    """What is said of captures that aren't read here."""
    if trace.tool in ANALYSED:
        return ""
    viewer = VIEWERS.get(trace.tool, "its own viewer")
    return f"{trace.path} keeps {counted(len(trace.traces), 'file')} of {trace.tool}, for {viewer} to read."


def earlier(path: Path) -> Analysis:
    """An analysis that was written, or one of captures."""
    if path.is_file() and path.suffix == ".json":
        document = files.read_json(path)
        if isinstance(document, dict) and "form" in document:
            return parse(Analysis, document, path)
    return analyse([path])
