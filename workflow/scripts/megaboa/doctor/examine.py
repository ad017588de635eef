"""Every run that isn't PASS: what happened, what the pipeline did, what to try. And runs that passed, but slowly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megaboa import files
from megaboa.doctor import advice, classes
from megaboa.estimate import costs, flops, memory, speed
from megaboa.preflight.facts import Facts, from_json
from megaboa.results import RunFolder, RunStore
from megaboa.run.failures import read_tails

LOW = 0.2  # of the peak: a third of what large models reach


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
        return _of_summary(folder.name, files.read_json(summary), facts)
    if not folder.attempts_link.exists():
        return [f"{folder.name}: has not begun"]
    store = RunStore(folder.attempts_link.resolve().parent)
    ends = [entry for entry in files.read_jsonl(store.ledger) if entry["event"] == "end"]
    if not ends or ends[-1].get("outcome") == "completed":
        return []
    return _of_failure(folder, store, ends[-1], facts)


def _of_summary(name: str, summary: dict[str, Any], facts: Facts | None) -> list[str]:
    if summary["state"] != "PASS":
        return [f"{name}: {summary['state']}", *(f"  {reason}" for reason in summary["reasons"])]
    timed = summary.get("step_seconds")
    return _slow(name, facts, timed["median"]) if facts and timed else []


def _slow(name: str, f: Facts, seconds: float) -> list[str]:
    """A run that passed, far below what its GPUs can do, and what a step goes into by the model of speed."""
    peak = costs.PEAK.get((f.cluster.gpu or "").split("-")[0])
    if f.cluster.device != "cuda" or peak is None or not memory.is_known(f):
        return []
    share = flops.of_step(f) / (seconds * (f.layout.world_size or 1) * peak)
    if share >= LOW:
        return []
    expected = speed.of_step(f)
    parts = sorted(vars(expected).items(), key=lambda part: -part[1])[:3]
    spent = ", ".join(f"{what} {part / expected.seconds:.0%}" for what, part in parts)
    return [
        f"{name}: passed, at {share:.0%} of its GPUs' peak: a step takes {seconds:.3g} s",
        f"  the model of speed expects {expected.seconds:.3g} s ({spent}); if it takes longer, profile a few steps",
        "  try: python workflow/scripts/advise.py lists layouts that should be faster",
    ]


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
