"""Results of finished runs."""

from __future__ import annotations

import json
from inspect import getdoc
from pathlib import Path

from megaboa import commands, records
from megaboa.bridge import handover
from megaboa.errors import InputError
from megaboa.files import read_json, write_json
from megaboa.formats import counted
from megaboa.paths import ExperimentFolder, RunFolder, run_of


def summarize(words: list[str]) -> None:
    """Make one table of all attempts of a run, its summary, and where its time went."""
    parser = commands.job(summarize, "train")
    parser.add_argument("--steps", type=Path, required=True, help="table to write (Parquet)")
    parser.add_argument("--summary", type=Path, required=True, help="summary to write (JSON)")
    parser.add_argument("--goodput", type=Path, required=True, help="ledger of the run's time to write (JSON)")
    parser.add_argument("--peak-tflops", type=float, help="peak TFLOP/s of a GPU; default: by its name")
    args = parser.parse_args(words)
    from megaboa.observe import measure
    from megaboa.observe.steps import write_steps

    found = measure.trained(RunFolder(args.train.parent), args.peak_tflops)
    write_steps(args.steps, found.rows)
    write_json(args.goodput, found.goodput and records.plain(found.goodput))
    records.write(args.summary, found.summary)


def evaluate(words: list[str]) -> None:
    """Call the user's command on a run's exported model, and note its numbers."""
    args = commands.job(evaluate, "spec", "export", "store", "out").parse_args(words)
    handover.to_zygote("cpu")
    from megaboa import evaluation

    spec, export = records.read(records.EvaluateSpec, args.spec), records.read(records.ExportRecord, args.export)
    found = evaluation.evaluate(spec, export, args.store, run_of(args.out).experiment_folder.path)
    records.write(args.out, found)
    print(f"{found.run}: {counted(len(found.values), 'number')}")


def export_along(words: list[str]) -> None:
    """Export, prove and evaluate what a run has saved, also while it trains.

    Which ones, `export.checkpoints` says. What is made is not made again, neither by the next call nor by Snakemake.
    """
    parser = commands.parser("export-along", getdoc(export_along))
    parser.add_argument("run", type=commands.run, help="EXPERIMENT/RUN, or the run's folder")
    parser.add_argument("--follow", action="store_true", help="wait for further checkpoints until the run is finished")
    parser.add_argument("--out", type=Path, help="file to write, once the run is finished")
    args = parser.parse_args(words)
    from megaboa.run import along

    folder = RunFolder(args.run)
    spec = records.read_if_there(records.AlongSpec, folder.experiment_folder.specs.of("along", folder.name))
    if spec is None:
        raise InputError(f"run {folder.name}: set export.checkpoints (`all`, or `every: N`), and plan it")
    found = along.export_along(folder, spec, follow=args.follow)
    if args.out:
        records.write(args.out, found)
    for one in found.exports:
        loss = "" if one.loss is None else f", validation loss {one.loss:.4f}"
        values = "".join(f", {name} {value:.4g}" for name, value in one.values.items())
        print(f"step {one.iteration}: {one.path}{loss}{values}")


def compare_tensors(words: list[str]) -> None:
    """Compare checkpoints and samples of runs that must agree.

    Ends without an error whatever it finds: what differs is a failed check of the report.
    """
    args = commands.job(compare_tensors, "spec", "out").parse_args(words)
    handover.to_zygote("cpu")
    from megaboa.bridge.tensor_agreement import compare

    found = compare(records.read(records.TensorsSpec, args.spec), ExperimentFolder(args.out.parent))
    records.write(args.out, found)
    for one in found.checks:
        print(f"{one.state} {one.name}: {one.detail}")


def report(words: list[str]) -> None:
    """Make the report of an experiment: figures, checks and one page."""
    parser = commands.job(report, "settings", "out")
    parser.add_argument("--captions", type=Path, required=True, help="YAML with a caption for every figure")
    parser.add_argument("--config-file", type=Path, nargs="*", default=[], help="the experiment's files, to be shown")
    parser.add_argument("--command", default="snakemake", help="the command that makes this report")
    parser.add_argument("--after-failure", action="store_true", help="no run is missing, but other jobs failed")
    args = parser.parse_args(words)
    from megaboa.bundle.baseline import keep
    from megaboa.report.build import Wanted, make

    results = args.settings.parents[1]
    keep(results)
    wanted = Wanted(results, args.out, args.command, args.config_file, args.captions, after_failure=args.after_failure)
    print(make(wanted))


def bundle(words: list[str]) -> None:
    """Bundle an experiment: one RO-Crate with all that others need to check it."""
    parser = commands.job(bundle, "settings", "store", "out")
    parser.add_argument("--config-file", type=Path, nargs="+", required=True, help="the experiment's files")
    parser.add_argument("--command-line", type=json.loads, default={}, help="what --config gave, as JSON")
    args = parser.parse_args(words)
    from megaboa.bundle.contents import Asked
    from megaboa.bundle.crate import make
    from megaboa.bundle.rebuild import parents_outside

    results = ExperimentFolder(args.settings.parents[1])
    runs = {name: results.run(name).document("run") for name in records.read(records.RunsSpec, results.specs.runs).runs}
    asked = Asked(results.path, args.config_file, args.command_line)
    print(make(asked, read_json(args.settings)["title"], args.store, args.out))
    if outside := parents_outside(results.path.name, runs):
        print(f"`megaboa reproduce` trains none of its runs, as some start from checkpoints of others: {outside}")
