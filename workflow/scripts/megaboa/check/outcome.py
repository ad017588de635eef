"""The outcome of preflight for all runs of an experiment, here and in the image: report, result file, exit code."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from megaboa import files
from megaboa.check import calibration, costs, overview, refusals
from megaboa.check.costs import Costs
from megaboa.check.facts import Facts
from megaboa.formats import counted
from megaboa.paths import ExperimentFolder, RunFolder
from megaboa.records import (
    CostsSpec,
    InsideAsked,
    InsideCheck,
    Preflight,
    PreflightInImage,
    RunCheck,
    RunsSpec,
    read,
    write,
)

REMEDY = "change what its config or overrides say of these, or leave the run out of export.runs"
LEFT_OUT = "They are INVALID: run the same command again to leave them out."


def conclude(order: Path, found: Mapping[str, tuple[RunCheck, Facts | None]], out: Path) -> int:
    """Report Bridge's verdicts on the runs in `order` (specs/runs.json), and return the exit code.

    Writes `out`, and a table of the same name (.tsv).
    """
    asked, folder = read(RunsSpec, order), order.parents[1]
    specs = ExperimentFolder(folder).specs
    added_up = read(CostsSpec, specs.costs)
    runs = {name: result for name, (result, _) in found.items()}
    earlier = costs.history(folder.parent)
    expected = {name: _costs(folder, added_up, name, facts, earlier) for name, (_, facts) in found.items()}
    rows = [overview.row(name, result, facts, expected[name]) for name, (result, facts) in found.items()]
    total = costs.total(expected.values())
    files.write_text(out.with_suffix(".tsv"), overview.tsv(rows))
    print(overview.text(rows, total))
    predicted = [name for name, cost in expected.items() if cost and cost.source.startswith("predicted")]
    for line in _assumed_networks(facts for name in predicted if (facts := found[name][1])):
        print(line)
    unlike = {name: (unlike_its_config(result.export),) for name, result in runs.items() if result.export}
    exported = {name: said for name, said in unlike.items() if name in added_up.exports}
    for warning in refusals.grouped({name: _warnings(result, name in exported) for name, result in runs.items()}):
        _say(f"warning: {warning}")
    for left in refusals.grouped({name: _open_here(result) for name, result in runs.items()}):
        _say(f"not checked here: {left}")
    if read(InsideAsked, specs.inside).container:
        _say("The image is checked before training, or by `snakemake preflight_in_image`.")

    refused = _reasons(runs, "FAIL")
    if refused:
        _say("\n".join(refusals.grouped(refused, "is refused", "are refused")))
        _say(f"{len(refused)} of {len(runs)} runs could never work; nothing was trained.")
        if asked.skip_illegal:
            refusals.write(folder, refused)
            _say(LEFT_OUT)
    unread = refusals.grouped(_reasons(runs, "NOT_RUN"), "is not checked", "are not checked")
    for line in unread:  # at the end, where the doctor looks for it
        _say(f"error: {line}")
    for line in refusals.grouped(exported):
        _say(f"export.runs: {line}: {REMEDY}; nothing was trained.")
    if refused or unread or exported:
        return 1
    untimed = [name for name, one in expected.items() if one is None or one.step_seconds is None]
    if added_up.budget.gpu_hours is not None and untimed:
        _say(f"warning: {costs.UNCHECKED} ({refusals.some(untimed)})")
    exceeded = costs.over_budget(total, added_up.budget.gpu_hours, added_up.budget.disk)
    for key, problem in exceeded.items():
        _say(f"{key}: {problem}: raise it, or plan less; nothing was trained.")
    if exceeded:
        return 1
    write(out, Preflight(runs=runs, identities=asked.identities))
    print(f"{_accepted(runs)} by Bridge")
    return 0


def _assumed_networks(facts: Iterable[Facts]) -> list[str]:
    """What is said of networks between nodes that were not measured."""
    rates = (calibration.assumed_network(calibration.of(f.cluster.gpu), f.cluster.nodes) for f in facts)
    return [
        f"between nodes {rate / 1e9:.0f} GB/s per GPU are assumed, whatever launch.network says: `snakemake calibrate` "
        "with a run on several nodes measures them"
        for rate in dict.fromkeys(filter(None, rates))
    ]


def unlike_its_config(found: str) -> str:
    return f"Megatron-Bridge can't write the trained model as its config says: {found}"


def _warnings(result: RunCheck, exported: bool) -> Sequence[str]:
    unlike = (unlike_its_config(result.export),) if result.export and not exported else ()
    unknown = f"whether it can be exported is not known: {result.export_unknown}"
    return (*result.warnings, *unlike, *((unknown,) if result.export_unknown else ()))


def conclude_in_image(order: Path, digest: str, report: PreflightInImage, out: Path) -> int:
    """Report verdicts from inside the image with this digest. If it can't be started here, problems only show in
    training."""
    if report.state == "NOT_RUN":
        _say(f"not checked in the image: {report.why}")
        write(out, replace(report, image=digest))
        return 0
    runs = report.runs or {}
    for left in refusals.grouped({name: _open_in_image(result) for name, result in runs.items()}):
        _say(f"not checked in the image: {left}")
    if refused := _reasons(runs, "FAIL"):
        _say("\n".join(refusals.grouped(refused, "is refused in the image", "are refused in the image")))
        _say(f"{len(refused)} of {len(runs)} runs could never work in this image; nothing was trained.")
        if read(RunsSpec, order).skip_illegal:
            refusals.write(out.parent, refused, in_image=True)
            _say(LEFT_OUT)
        return 1
    write(out, replace(report, image=digest))
    print(f"{_accepted(runs)} in the image ({report.how})")
    return 0


def _accepted(runs: Collection[str]) -> str:
    return f"{counted(len(runs), 'run')} {'is' if len(runs) == 1 else 'are'} accepted"


def _costs(folder: Path, added_up: CostsSpec, name: str, facts: Facts | None, earlier: costs.History) -> Costs | None:
    if facts is None:
        return None
    run = RunFolder(folder / "runs" / name)
    own, like_it = earlier.own.get((run.experiment, run.name)), earlier.of(run.run, run.launch.gpu)
    mfu, exported = added_up.budget.mfu, name in added_up.exports
    return costs.of_run(facts, given=run.launch.step_seconds, own=own, earlier=like_it, mfu=mfu, exported=exported)


def _open_here(result: RunCheck) -> Sequence[str]:
    """What only the image can check."""
    stopped = result.stopped_at
    return [*(result.needs_image or ()), *([f"needs the image: {stopped}"] if stopped else [])]


def _open_in_image(result: InsideCheck) -> Sequence[str]:
    """What only a GPU, or a network, can decide."""
    stopped, unread = result.stopped_at, result.reasons if result.state == "NOT_RUN" else None
    return [*(result.needs_gpu or ()), *([f"needs a GPU: {stopped}"] if stopped else []), *(unread or ())]


def _reasons(runs: Mapping[str, RunCheck | InsideCheck], state: str) -> dict[str, Sequence[str]]:
    return {name: result.reasons or () for name, result in runs.items() if result.state == state}


def _say(text: str) -> None:
    print(text, file=sys.stderr)
