"""Every run that isn't PASS: what happened, what the pipeline did, and what to try."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megaboa import files
from megaboa.doctor import advice, classes
from megaboa.preflight.facts import Facts, from_json
from megaboa.results import RunFolder, RunStore
from megaboa.run.failures import read_tails


def experiment(results: Path) -> list[str]:
    """What there is to say, in lines; a healthy run has none."""
    plan = files.read_json(results / "specs" / "runs.json")
    path = results / "preflight.json"
    known = files.read_json(path)["runs"] if path.exists() else {}
    lines = [f"{one}: left out of the plan" for one in files.read_json(results / "specs" / "report.json")["invalid"]]
    for name in plan["runs"]:
        facts = known.get(name, {}).get("facts")
        lines += run(RunFolder(results / "runs" / name), from_json(facts) if facts else None)
    return lines


def run(folder: RunFolder, facts: Facts | None) -> list[str]:
    summary = folder.path / "metrics" / "summary.json"
    if summary.exists():
        return _of_summary(folder.name, files.read_json(summary))
    if not folder.attempts_link.exists():
        return [f"{folder.name}: has not begun"]
    store = RunStore(folder.attempts_link.resolve().parent)
    ends = [entry for entry in files.read_jsonl(store.ledger) if entry["event"] == "end"]
    if not ends or ends[-1].get("outcome") == "completed":
        return []
    return _of_failure(folder, store, ends[-1], facts)


def _of_summary(name: str, summary: dict[str, Any]) -> list[str]:
    if summary["state"] == "PASS":
        return []
    return [f"{name}: {summary['state']}", *(f"  {reason}" for reason in summary["reasons"])]


def _of_failure(folder: RunFolder, store: RunStore, end: dict[str, Any], facts: Facts | None) -> list[str]:
    attempt, cause, detail = store.attempt(end["attempt"]), str(end.get("cause")), str(end.get("detail") or "")
    found = classes.trouble(cause, detail, read_tails(attempt.logs.items()))
    case = advice.Case(
        facts=facts,
        evidence=found.evidence,
        iteration=end.get("iteration") or 0,
        save_interval=(folder.launch.get("checkpoint") or {}).get("save_interval"),
        lr=folder.run["optimizer"].get("lr"),
    )
    rank = "" if end.get("rank") is None else f", rank {end['rank']}"
    return [
        f"{folder.name}: {found.name.replace('_', ' ')} (attempt {end['attempt']}{rank}; cause: {cause})",
        *(f"  | {line}" for line in found.evidence),
        f"  logs: {attempt.path}",
        f"  done: {_done(end)}",
        *(f"  try: {line}" for line in advice.of(found.name, case)),
    ]


def _done(end: dict[str, Any]) -> str:
    """What the pipeline did about it."""
    steps = f"steps {end['first_step']} to {end['last_step']}" if end.get("last_step") else "no step"
    kept = f"checkpoint of iteration {end['iteration']} is kept" if end.get("iteration") else "no checkpoint yet"
    avoided = f"; avoids {', '.join(end['bad_nodes'])}" if end.get("bad_nodes") else ""
    return f"{steps}; {kept}; then: {end.get('action') or 'nothing'}{avoided}"
