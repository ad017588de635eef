"""Checks of what is made beside training: proofs of imports and exports; evaluations and profiles that failed.

What an earlier call left of another export or capture doesn't count.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from megaboa.doctor.stages import Job, of_model, of_run, told
from megaboa.paths import FAILED_PROOF, ExperimentFolder, ModelFolder, RunFolder
from megaboa.records import Evaluation, ExportRecord, ImportRecord, Proof, read, read_if_there
from megaboa.report.checks import Check, proof_checks
from megaboa.report.runs import RunResult


def stage_checks(results: Path, settings: dict[str, Any], runs: Sequence[RunResult], over: bool) -> list[Check]:
    """`over`: nobody works on the experiment, so that what isn't there failed. Else it may be yet to come."""
    exported = {run.name for run in runs if run.export}
    checks = proofs_so_far([Path(path) for path in settings["proofs"]], exported, over)
    checks += [_missing("evaluation", run, of_run(results, run), over) for run in unevaluated(results, settings)]
    return checks + [_missing("profile", run, of_run(results, run), over) for run in unprofiled(results, settings)]


def proofs_so_far(proofs: Sequence[Path], exported: Collection[str], over: bool = False) -> list[Check]:
    """The checks of all proofs, failed ones too; where there is none yet, one that has not run."""
    return [check for path in sorted(proofs) for check in _of_proof(path, exported, over)]


def unevaluated(results: Path, settings: dict[str, Any]) -> list[str]:
    return [run for run in settings.get("evaluated", []) if not is_evaluated(results / "runs" / run)]


def unprofiled(results: Path, settings: dict[str, Any]) -> list[str]:
    folders = [ExperimentFolder(results).run(run) for run in settings.get("profiles", [])]
    return [folder.name for folder in folders if not (folder.trace.exists() and folder.analysis.exists())]


def is_evaluated(run: Path) -> bool:
    """Whether the numbers are those of the export that is there."""
    export = read_if_there(ExportRecord, RunFolder(run).export)
    evaluation = read_if_there(Evaluation, RunFolder(run).evaluation)
    return bool(export and evaluation) and evaluation.export == export.digest


def _of_proof(path: Path, exported: Collection[str], over: bool) -> list[Check]:
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
    """Whether it is a proof of the conversion that is there. Older ones don't say."""
    digest = read(Proof, proof).digest
    return digest is None or (converted is not None and converted.digest == digest)


def _missing(kind: str, subject: str, jobs: Sequence[Job], over: bool) -> Check:
    """By the first of the kind's jobs that left nothing."""
    wanted = {"evaluation": ("evaluation",), "profile": ("trace", "analysis")}
    chain = [job for job in jobs if job.manifest.stem in wanted.get(kind, (job.manifest.stem,))]
    lost = next((job for job in chain if not job.manifest.exists()), chain[-1])
    said = told(lost, over)
    blamed = (lost if said else chain[-1]).manifest.stem
    what = {"trace": "capture"}.get(blamed, blamed)
    evidence = [line.removeprefix("  | ") for line in said if line.startswith("  | ")]
    check = {"kind": kind, "subject": subject, "check": what, "name": f"{kind} of {subject}: {what}"}
    if not said:
        return {**check, "state": "NOT_RUN", "detail": "is yet to be made"}
    return {**check, "state": "FAIL", "detail": "; ".join(evidence) or said[0].partition(": ")[2]}
