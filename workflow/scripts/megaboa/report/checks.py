"""Checks of an experiment: runs whose losses must agree, proofs that imports and exports lost nothing, and evaluations
and profiles that failed. What an earlier call left of another export or capture doesn't count.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from megaboa.doctor.failed_stages import Job, of_model, of_run, told
from megaboa.paths import FAILED_PROOF, ExperimentFolder, ModelFolder, RunFolder
from megaboa.records import (
    AgreementCheck,
    AgreementSpec,
    Counts,
    Evaluation,
    ExportRecord,
    Fault,
    Flip,
    ImportRecord,
    Proof,
    ReportCheck,
    ReportSpec,
    StageCheck,
    State,
    Tree,
    read,
    read_if_there,
)
from megaboa.report.runs import RunResult, count_states

# What two runs may differ by, as a multiple of the tolerance (docs/benchmarks/agreement.md has the measurements).
# After a token has gone to another expert as rounding wanted it, they differ by more than rounding.
LOSS_AFTER_TIE, NORM_AFTER_TIE = 100, 1000
# Rounding errors in the gradient norm grow, on some texts a hundredfold in 30 steps; real errors show at once.
EARLY_STEPS, NORM_LATER = 10, 100
# How near to each other the logits of two experts must be for rounding to decide between them, likewise. Before any
# token has gone to another expert, logits of two runs differ by up to 4e-5.
TIE = 10


def differences(reference: RunResult, run: RunResult) -> pd.DataFrame:
    """Of every step that both runs have, `difference` (of the loss, absolute) and `grad_norm` (relative)."""
    names = ["step", "loss", "grad_norm"]
    both = reference.steps[names].merge(run.steps[names], on="step", suffixes=("", "_other"))
    return pd.DataFrame(
        {
            "step": both["step"],
            "difference": (both["loss"] - both["loss_other"]).abs(),
            "grad_norm": ((both["grad_norm"] - both["grad_norm_other"]) / both["grad_norm"]).abs(),
        }
    )


def agreement_checks(agreements: Sequence[AgreementSpec], runs: list[RunResult]) -> list[ReportCheck]:
    """One check for every run that must agree with a reference."""
    known = {run.name: run for run in runs}
    return [
        _agreement(agreement, name, known)
        for agreement in agreements
        for name in agreement.runs
        if name != agreement.reference
    ]


def _agreement(agreement: AgreementSpec, name: str, known: dict[str, RunResult]) -> AgreementCheck:
    reference, tolerance = agreement.reference, agreement.tolerance
    check = AgreementCheck(
        kind="agreement",
        name=f"{name} agrees with {reference}",
        run=name,
        reference=reference,
        tolerance=tolerance,
        state="NOT_RUN",
        detail="",
    )
    for wanted in (reference, name):
        run = known.get(wanted)
        if run is None or run.state == "NOT_RUN":
            why = "is not in the plan" if run is None else "is not trained"
            return replace(check, detail=f"{wanted} {why}")
        if run.state != "PASS":
            return replace(check, state=run.state, detail=f"{wanted} is {run.state}: {'; '.join(run.reasons)}")
    found = differences(known[reference], known[name])
    first = max(_first_step(known[wanted]) for wanted in (reference, name))
    lengths = {len(found), *((known[wanted].steps["step"] >= first).sum() for wanted in (reference, name))}
    if not found.empty:
        worst = found.loc[found["difference"].idxmax()]
        check = replace(
            check,
            max_difference=float(worst["difference"]),
            step=int(worst["step"]),
            steps=len(found),
            max_grad_norm=float(found["grad_norm"].max()),
        )
    if len(lengths) > 1 or found.empty:
        return replace(check, state="FAIL", detail=f"only {len(found)} of {max(lengths)} steps can be compared")
    flip = first_flip(known[reference], known[name])
    tied = flip is not None and flip.margin <= TIE * tolerance
    before = found["step"] < flip.step if tied else found["step"] > 0
    check = replace(check, exact_steps=int(before.sum()), flip=flip)
    apart = _apart(found, agreement, np.ones(len(found), bool))
    if not apart:
        return replace(check, state="PASS", detail=f"{len(found)} steps compared")
    wrong = _apart(found, agreement, before.to_numpy())
    if wrong:
        why = [f"{flip}{'' if tied else ', which no tie explains'}"] if flip else []
        return replace(check, state="FAIL", detail="; ".join([*wrong, *why]))
    exact = found["difference"][before].max() if before.any() else 0.0
    return replace(check, state="PASS", detail=f"{check.exact_steps} steps agree to {exact:.1e}; then {flip}")


def _apart(found: pd.DataFrame, agreement: AgreementSpec, before_tie: np.ndarray) -> list[str]:
    """Where two runs are farther apart than they may be."""
    wrong = _above(found, "difference", "", agreement.tolerance * np.where(before_tie, 1, LOSS_AFTER_TIE))
    if limit := agreement.grad_norm_tolerance:
        later = np.where(found["step"] < found["step"].min() + EARLY_STEPS, 1, NORM_LATER)
        norms = limit * np.where(before_tie, later, NORM_AFTER_TIE)
        wrong += _above(found, "grad_norm", " in the gradient norm", norms)
    return wrong


def _above(found: pd.DataFrame, column: str, where: str, limits: np.ndarray) -> list[str]:
    above = (found[column] > limits).to_numpy()
    if found[column].isna().all():
        return [f"no step{where} can be compared"]
    if not above.any():
        return []
    passed = " and ".join(f"{limit:g}" for limit in sorted(set(limits[above])))
    return [f"{above.sum()} of {len(found)} steps differ{where} by more than {passed}"]


def first_flip(reference: RunResult, run: RunResult) -> Flip | None:
    """By each expert's number of tokens. None if these are the same at all steps, or weren't recorded."""
    if not all("routing" in one.steps for one in (reference, run)):
        return None
    names = ["step", "routing"]
    both = reference.steps[names].merge(run.steps[names], on="step", suffixes=("", "_other"))
    for row in both.itertuples():
        if row.routing is None or row.routing_other is None:
            return None
        ours, theirs = json.loads(row.routing), json.loads(row.routing_other)
        for layer in sorted(ours.keys() & theirs.keys(), key=int):
            one, other = ours[layer], theirs[layer]
            if one["load"] != other["load"]:
                return _flip(row.step, int(layer), one, other)
    return None


def _flip(step: int, layer: int, one: Tree, other: Tree) -> Flip:
    moved = [ours - theirs for ours, theirs in zip(one["load"], other["load"], strict=True)]
    gained, lost = sum(max(0, more) for more in moved), sum(max(0, -more) for more in moved)
    choices = max(gained, lost)
    # A token that is near a tie in one run is near it in the other too. Choices that vanish are no ties at all.
    near = [run["margins"][choices - 1] if len(run["margins"]) >= choices else math.inf for run in (one, other)]
    margin = max(near) if gained == lost else math.inf
    return Flip(step=step, layer=layer, choices=choices, of=sum(one["load"]), margin=margin)


def _first_step(run: RunResult) -> int:
    """Of a run that continued from another's checkpoint, the one after it."""
    parent = (run.summary or {}).get("parent")
    return parent["iteration"] + 1 if parent else 1


def proof_checks(proofs: list[Path]) -> list[ReportCheck]:
    """The checks inside `models/<model>/proof.json` (imports) and `runs/<run>/proof.json` (exports)."""
    found = []
    for path in sorted(proofs):
        subject, kind = path.parent.name, "import" if path.parent.parent.name == "models" else "export"
        for check in read(Proof, path).checks:
            one = _of_stage(kind, subject, check.name, check.state, check.detail)
            found.append(replace(one, difference=check.difference))
    return found


def _of_stage(kind: str, subject: str, check: str, state: State, detail: str) -> StageCheck:
    name = f"{kind} of {subject}: {check}"
    return StageCheck(kind=kind, subject=subject, check=check, name=name, state=state, detail=detail)


def by_subject(proofs: Sequence[StageCheck]) -> list[dict[str, object]]:
    """One row for every import and export: how many of its checks passed, and the differences that they measured."""
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
    """What ends the call with an error, and where the page shows it. Not what was left out of the plan on purpose."""
    wrong = [run for run in runs if run.state in ("FAIL", "INVALID") and run.plan.get("state") != "INVALID"]
    found = [Fault(name=f"run {run.name}", detail="; ".join(run.reasons), anchor=f"run-{run.name}") for run in wrong]
    failed = [check for check in checks if check.state == "FAIL"]
    return found + [Fault(name=one.name, detail=one.detail, anchor=one.anchor) for one in failed]


def verdict(runs: Sequence[RunResult], checks: Sequence[ReportCheck]) -> State:
    """What the report comes to: PASS only where every run and every check passed."""
    everything = {one.state for one in (*runs, *checks)}
    return next((state for state in ("FAIL", "INVALID", "NOT_RUN") if state in everything), "PASS")


def counts(runs: Sequence[RunResult], checks: Sequence[ReportCheck]) -> Counts:
    of_runs, of_checks = [run.state for run in runs], [check.state for check in checks]
    return Counts(runs=count_states(of_runs), checks=count_states(of_checks))


def stage_checks(results: Path, asked: ReportSpec, runs: Sequence[RunResult], over: bool) -> list[ReportCheck]:
    """`over`: no call works on the experiment, so missing results have failed. Otherwise they may still come."""
    exported = {run.name for run in runs if run.export}
    checks = proofs_so_far([Path(path) for path in asked.proofs], exported, over)
    checks += [_missing("evaluation", run, of_run(results, run), over) for run in unevaluated(results, asked)]
    return checks + [_missing("profile", run, of_run(results, run), over) for run in unprofiled(results, asked)]


def proofs_so_far(proofs: Sequence[Path], exported: Collection[str], over: bool = False) -> list[ReportCheck]:
    """The checks of all proofs, failed ones too; where there is none yet, one that has not run."""
    return [check for path in sorted(proofs) for check in _of_proof(path, exported, over)]


def unevaluated(results: Path, asked: ReportSpec) -> list[str]:
    return [run for run in asked.evaluated if not is_evaluated(results / "runs" / run)]


def unprofiled(results: Path, asked: ReportSpec) -> list[str]:
    folders = [ExperimentFolder(results).run(run) for run in asked.profiles]
    return [folder.name for folder in folders if not (folder.trace.exists() and folder.analysis.exists())]


def is_evaluated(run: Path) -> bool:
    """Whether the numbers are those of the present export."""
    export = read_if_there(ExportRecord, RunFolder(run).export)
    evaluation = read_if_there(Evaluation, RunFolder(run).evaluation)
    return bool(export and evaluation) and evaluation.export == export.digest


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
    """Whether it proves the present conversion. Older proofs don't say."""
    digest = read(Proof, proof).digest
    return digest is None or (converted is not None and converted.digest == digest)


def _missing(kind: str, subject: str, jobs: Sequence[Job], over: bool) -> StageCheck:
    """By the first of the kind's jobs that left nothing."""
    wanted = {"evaluation": ("evaluation",), "profile": ("trace", "analysis")}
    chain = [job for job in jobs if job.manifest.stem in wanted.get(kind, (job.manifest.stem,))]
    lost = next((job for job in chain if not job.manifest.exists()), chain[-1])
    said = told(lost, over)
    blamed = (lost if said else chain[-1]).manifest.stem
    what = {"trace": "capture"}.get(blamed, blamed)
    evidence = [line.removeprefix("  | ") for line in said if line.startswith("  | ")]
    if not said:
        return _of_stage(kind, subject, what, "NOT_RUN", "is yet to be made")
    return _of_stage(kind, subject, what, "FAIL", "; ".join(evidence) or said[0].partition(": ")[2])
