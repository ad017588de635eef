"""Checks of an experiment: runs whose losses must agree, and proofs that imports and exports lost nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from megaboa.files import read_json
from megaboa.report.runs import RunResult, count_states

Check = dict[str, Any]


def differences(reference: RunResult, run: RunResult) -> pd.DataFrame:
    """Absolute difference of the loss at every step that both runs have: columns `step` and `difference`."""
    both = reference.steps[["step", "loss"]].merge(run.steps[["step", "loss"]], on="step", suffixes=("", "_other"))
    return pd.DataFrame({"step": both["step"], "difference": (both["loss"] - both["loss_other"]).abs()})


def agreement_checks(agreements: list[dict[str, Any]], runs: list[RunResult]) -> list[Check]:
    """One check for every run that must agree with a reference."""
    known = {run.name: run for run in runs}
    return [
        _agreement(agreement["reference"], name, agreement["tolerance"], known)
        for agreement in agreements
        for name in agreement["runs"]
        if name != agreement["reference"]
    ]


def _agreement(reference: str, name: str, tolerance: float, known: dict[str, RunResult]) -> Check:
    check: Check = {"kind": "agreement", "name": f"{name} agrees with {reference}", "run": name}
    check |= {"reference": reference, "tolerance": tolerance, "max_difference": None, "step": None, "steps": 0}
    for wanted in (reference, name):
        run = known.get(wanted)
        if run is None or run.state == "NOT_RUN":
            why = "is not in the plan" if run is None else "is not trained"
            return {**check, "state": "NOT_RUN", "detail": f"{wanted} {why}"}
        if run.state != "PASS":
            return {**check, "state": run.state, "detail": f"{wanted} is {run.state}: {'; '.join(run.reasons)}"}
    found = differences(known[reference], known[name])
    first = max(_first_step(known[wanted]) for wanted in (reference, name))
    lengths = {len(found), *((known[wanted].steps["step"] >= first).sum() for wanted in (reference, name))}
    if not found.empty:
        worst = found.loc[found["difference"].idxmax()]
        check |= {"max_difference": float(worst["difference"]), "step": int(worst["step"]), "steps": len(found)}
    if len(lengths) > 1 or found.empty:
        return {**check, "state": "FAIL", "detail": f"only {len(found)} of {max(lengths)} steps can be compared"}
    above = int((found["difference"] > tolerance).sum())
    if above:
        return {**check, "state": "FAIL", "detail": f"{above} of {len(found)} steps differ by more than {tolerance:g}"}
    return {**check, "state": "PASS", "detail": f"{len(found)} steps compared"}


def _first_step(run: RunResult) -> int:
    """Of a run that went on from another's checkpoint, the one after it."""
    parent = (run.summary or {}).get("parent")
    return parent["iteration"] + 1 if parent else 1


def proof_checks(proofs: list[Path]) -> list[Check]:
    """The checks inside `models/<model>/proof.json` (imports) and `runs/<run>/proof.json` (exports)."""
    found = []
    for path in sorted(proofs):
        subject, kind = path.parent.name, "import" if path.parent.parent.name == "models" else "export"
        for check in read_json(path)["checks"]:
            name = f"{kind} of {subject}: {check['name']}"
            found.append({**check, "kind": kind, "subject": subject, "check": check["name"], "name": name})
    return found


def by_subject(proofs: list[Check]) -> list[dict[str, Any]]:
    """One row for every import and export: how many of its checks passed, and the differences that they measured."""
    groups: dict[tuple[str, str], list[Check]] = {}
    for check in proofs:
        groups.setdefault((check["kind"], check["subject"]), []).append(check)
    return [
        {
            "kind": kind,
            "subject": subject,
            "state": next((check["state"] for check in checks if check["state"] != "PASS"), "PASS"),
            "passed": sum(check["state"] == "PASS" for check in checks),
            "total": len(checks),
            **{name: _difference_in(checks, name) for name in ("logits", "validation loss")},
        }
        for (kind, subject), checks in sorted(groups.items(), key=lambda group: (group[0][0] == "export", group[0]))
    ]


def _difference_in(checks: list[Check], name: str) -> float | None:
    return next((check.get("difference") for check in checks if check["check"] == name), None)


def faults(runs: list[RunResult], checks: list[Check]) -> list[dict[str, str]]:
    """What ends the call with an error, and where the page shows it. Not what was left out of the plan on purpose."""
    wrong = [run for run in runs if run.state in ("FAIL", "INVALID") and run.plan.get("state") != "INVALID"]
    found = [
        {"name": f"run {run.name}", "detail": "; ".join(run.reasons), "anchor": f"run-{run.name}"} for run in wrong
    ]
    failed = [check for check in checks if check["state"] == "FAIL"]
    return found + [{"name": one["name"], "detail": one["detail"], "anchor": anchor(one)} for one in failed]


def anchor(check: Check) -> str:
    return f"check-{check['name']}".replace(" ", "-")


def verdict(runs: list[RunResult], checks: list[Check]) -> dict[str, Any]:
    """What the report comes to: PASS only where every run and every check passed."""
    of_runs, of_checks = [run.state for run in runs], [check["state"] for check in checks]
    everything = {*of_runs, *of_checks}
    state = next((state for state in ("FAIL", "INVALID", "NOT_RUN") if state in everything), "PASS")
    return {"state": state, "counts": {"runs": count_states(of_runs), "checks": count_states(of_checks)}}
