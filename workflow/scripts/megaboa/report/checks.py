"""Checks of an experiment's stages, and the verdict over all checks.

The stages are proofs that imports and exports lost nothing, evaluations and profiles. Results of an earlier export or
capture don't count.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from megaboa.doctor.failed_stages import Job, of_model, of_run, told
from megaboa.formats import some_of, written
from megaboa.paths import ALONG, FAILED_PROOF, AlongFolder, ExperimentFolder, ModelFolder, RunFolder
from megaboa.records import (
    AgreementSpec,
    ComparedTensors,
    Counts,
    ExportRecord,
    Fault,
    FigureCheck,
    Flip,
    ImportRecord,
    Proof,
    ReportCheck,
    ReportSpec,
    StageCheck,
    State,
    TensorCheck,
    TrainRecord,
    read,
    read_if_there,
)
from megaboa.report.exported import along_of, along_so_far, evaluation_of
from megaboa.report.runs import LEFT_OUT, RunResult, count_states, passed
from megaboa.report.style import Shown

SHOWN = 5  # numbers that a check names
NOT_FINITE = {
    "validation": "look at the loss before that step, and at the documents of the set",
    "evaluation": "correct the command, or leave such numbers out of its JSON",
}


def proof_checks(proofs: list[Path]) -> list[ReportCheck]:
    """The checks in `models/<model>/proof.json` (imports) and `runs/<run>/proof.json` (exports)."""
    found = []
    for path in sorted(proofs):
        subject, kind = path.parent.name, "import" if path.parent.parent.name == "models" else "export"
        if path.parent.parent.name == ALONG:
            subject = f"{path.parents[2].name}@{subject}"
        for check in read(Proof, path).checks:
            one = _of_stage(kind, subject, check.name, check.state, check.detail)
            found.append(replace(one, difference=check.difference))
    return found


def tensor_checks(
    agreements: Sequence[AgreementSpec], results: Path, losses: Sequence[ReportCheck], over: bool
) -> list[ReportCheck]:
    """The comparison of checkpoints and samples, if agreements ask for it.

    `losses`: the checks of the losses. `over`: see `stage_checks`.
    """
    wanted = [one for one in agreements if one.tensors]
    if not wanted:
        return []
    folder = ExperimentFolder(results)
    found = read_if_there(ComparedTensors, folder.tensors)
    names = {name for one in wanted for name in (one.reference, *one.runs, *one.twins)}
    trained = {name: read_if_there(TrainRecord, folder.run(name).train_manifest) for name in names}
    if found and all(run and found.identities.get(name) == run.identity for name, run in trained.items()):
        flips = {(one.reference, one.run): one.flip for one in losses if one.state == "PASS" and one.flip}
        return [_after_flip(check, flips.get((check.reference, check.run))) for check in found.checks]
    log = folder.logs / "tensors.log"
    detail = f"failed: {log}" if over else "is yet to be made"
    return [
        ReportCheck(
            kind="tensors", name="comparison of checkpoints", state="FAIL" if over else "NOT_RUN", detail=detail
        )
    ]


def _after_flip(check: TensorCheck, flip: Flip | None) -> TensorCheck:
    """Don't fail tensors after rounding has sent a token to another expert: twins without that give too low limits."""
    if flip is None or check.state != "FAIL" or check.limit is None:
        return check
    return replace(check, state="NOT_RUN", verdict=None, detail=f"can't be told, as {flip}; {check.detail}")


def _of_stage(kind: str, subject: str, check: str, state: State, detail: str) -> StageCheck:
    name = f"{kind} of {subject}: {check}"
    return StageCheck(kind=kind, subject=subject, check=check, name=name, state=state, detail=detail)


def along_checks(results: Path, asked: ReportSpec, over: bool = False) -> list[ReportCheck]:
    """The checks of exports along the training: those of every proof or, if a job has left none, its failure."""
    found: list[ReportCheck] = []
    for run in asked.along:
        folder = ExperimentFolder(results).run(run)
        steps = [AlongFolder(folder.path, iteration=one.iteration).proof for one in along_so_far(folder)]
        proofs = [path for path in steps if path.exists()]
        found += proof_checks(proofs)
        if proofs != steps or not along_of(folder):
            found.append(_missing("along", run, of_run(results, run), over))
    return found


def number_checks(runs: Sequence[RunResult]) -> list[ReportCheck]:
    """A failed check for each run that passed and of which a validation loss or an evaluation isn't finite."""
    found = []
    for run in passed(runs):
        losses = {f"{name} at step {step}": loss for step, all_of in run.validation for name, loss in all_of.items()}
        of_steps = [(f"{run.name}@{one.iteration}", one.numbers) for one in run.along]
        for kind, subject, numbers in (
            ("validation", run.name, losses),
            *(("evaluation", *one) for one in [(run.name, run.evaluation), *of_steps]),
        ):
            wrong = [f"{name} is {written(value)}" for name, value in numbers.items() if not math.isfinite(value)]
            if wrong:
                detail = f"{some_of(wrong, SHOWN, '; ')}: {NOT_FINITE[kind]}"
                found.append(_of_stage(kind, subject, "finite numbers", "FAIL", detail))
    return found


def figure_checks(drawn: Sequence[Shown]) -> list[ReportCheck]:
    """A failed check for each own figure that can't be drawn."""
    return [
        FigureCheck(kind="figure", name=f"figure {one.name}", state="FAIL", detail=one.fault)
        for one in drawn
        if one.fault
    ]


def failed_evaluations(checks: Sequence[ReportCheck]) -> list[str]:
    """The runs whose evaluation failed, by `stage_checks`."""
    return [one.subject for one in checks if one.kind == "evaluation" == one.check and one.state == "FAIL"]


def by_subject(proofs: Sequence[StageCheck]) -> list[dict[str, object]]:
    """One row for every import and export: the number of passed checks, and the measured differences."""
    groups: dict[tuple[str, str], list[StageCheck]] = {}
    for check in proofs:
        groups.setdefault((check.kind, check.subject), []).append(check)
    return [
        {
            "kind": kind,
            "subject": subject,
            "state": next((check.state for check in checks if check.state != "PASS"), "PASS"),
            "passed": sum(check.state == "PASS" for check in checks),
            "total": len(checks),
            **{name: _difference_in(checks, name) for name in ("logits", "validation loss")},
        }
        for (kind, subject), checks in sorted(groups.items(), key=lambda group: (group[0][0] == "export", group[0]))
    ]


def _difference_in(checks: list[StageCheck], name: str) -> float | None:
    return next((check.difference for check in checks if check.check == name), None)


def faults(runs: list[RunResult], checks: Sequence[ReportCheck]) -> list[Fault]:
    """The faults that make the call fail, and their places on the page."""
    wrong = [run for run in runs if run.state in ("FAIL", "INVALID") and not run.left_out]
    found = [Fault(name=f"run {run.name}", detail="; ".join(run.reasons), anchor=f"run-{run.name}") for run in wrong]
    failed = [check for check in checks if check.state == "FAIL"]
    return found + [Fault(name=one.name, detail=one.detail, anchor=one.anchor) for one in failed]


def verdict(runs: Sequence[RunResult], checks: Sequence[ReportCheck]) -> State:
    """The verdict of the report: PASS if every run and every check passed, except for runs left out on purpose."""
    planned = [run for run in runs if not run.left_out] or runs
    everything = {one.state for one in (*planned, *checks)}
    return next((state for state in ("FAIL", "INVALID", "NOT_RUN") if state in everything), "PASS")


def counts(runs: Sequence[RunResult], checks: Sequence[ReportCheck]) -> Counts:
    of_runs = [LEFT_OUT if run.left_out else run.state for run in runs]
    of_checks = [check.state for check in checks]
    return Counts(runs=count_states(of_runs), checks=count_states(of_checks))


def stage_checks(results: Path, asked: ReportSpec, runs: Sequence[RunResult], over: bool) -> list[ReportCheck]:
    """The checks of all stages but training. `over`: no call works on the experiment, so missing results count as
    failed."""
    exported = {run.name for run in runs if run.export}
    checks = proofs_so_far([Path(path) for path in asked.proofs], exported, over)
    checks += [_missing("evaluation", run, of_run(results, run), over) for run in unevaluated(results, asked)]
    checks += along_checks(results, asked, over)
    return checks + [_missing("profile", run, of_run(results, run), over) for run in unprofiled(results, asked)]


def proofs_so_far(proofs: Sequence[Path], exported: Collection[str], over: bool = False) -> list[ReportCheck]:
    """The checks of all proofs, including failed ones; a missing proof gives a check that has not run."""
    return [check for path in sorted(proofs) for check in _of_proof(path, exported, over)]


def unevaluated(results: Path, asked: ReportSpec) -> list[str]:
    return [run for run in asked.evaluated if not evaluation_of(ExperimentFolder(results).run(run))]


def unprofiled(results: Path, asked: ReportSpec) -> list[str]:
    folders = [ExperimentFolder(results).run(run) for run in asked.profiles]
    return [folder.name for folder in folders if not (folder.trace.exists() and folder.analysis.exists())]


def _of_proof(path: Path, exported: Collection[str], over: bool) -> list[ReportCheck]:
    subject, is_import = path.parent.name, path.parent.parent.name == "models"
    converted = ModelFolder(path.parent).imported if is_import else RunFolder(path.parent).export
    made = read_if_there(ImportRecord if is_import else ExportRecord, converted)
    for found in (path, path.with_name(FAILED_PROOF)):
        if found.exists() and (is_import or subject in exported) and _is_of(found, made):
            return proof_checks([found])
    results = path.parents[2]
    jobs = of_model(results, subject) if is_import else of_run(results, subject)[:2]
    return [_missing("import" if is_import else "export", subject, jobs, over)]


def _is_of(proof: Path, converted: ImportRecord | ExportRecord | None) -> bool:
    """Whether a proof is that of the present conversion. Older proofs don't record it."""
    digest = read(Proof, proof).digest
    return digest is None or (converted is not None and converted.digest == digest)


def _missing(kind: str, subject: str, jobs: Sequence[Job], over: bool) -> StageCheck:
    """The check of a missing result, by the first job of its kind that left none."""
    wanted = {"evaluation": ("evaluation",), "profile": ("trace", "analysis"), "along": ("along",)}
    chain = [job for job in jobs if job.manifest.stem in wanted.get(kind, (job.manifest.stem,))]
    lost = next((job for job in chain if not job.manifest.exists()), chain[-1])
    said = told(lost, over)
    blamed = (lost if said else chain[-1]).manifest.stem
    what = {"trace": "capture"}.get(blamed, blamed)
    evidence = [line.removeprefix("  | ") for line in said if line.startswith("  | ")]
    if not said:
        return _of_stage(kind, subject, what, "NOT_RUN", "is yet to be made")
    return _of_stage(kind, subject, what, "FAIL", "; ".join(evidence) or said[0].partition(": ")[2])
