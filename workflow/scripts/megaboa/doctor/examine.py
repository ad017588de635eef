"""Every stage that failed and every run that isn't PASS: what happened, what the pipeline did, what to try.

And runs that passed, but not well.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megaboa import files
from megaboa.doctor import advice, classes, curve, passed, stages
from megaboa.preflight.facts import Facts, from_json
from megaboa.results import AttemptFolder, RunFolder, RunStore
from megaboa.run import checkpoints, claims, ledger
from megaboa.run.failures import read_tails
from megaboa.run.identity import is_outdated, is_trained


def experiment(results: Path) -> list[str]:
    """What there is to say, in lines; a healthy run has none."""
    plan = files.read_json(results / "specs" / "runs.json")
    path = results / "preflight.json"
    known = files.read_json(path)["runs"] if path.exists() else {}
    lines = [f"{one}: left out of the plan" for one in files.read_json(results / "specs" / "report.json")["invalid"]]
    lines += stages.failed(results)
    for name in plan["runs"]:
        facts = known.get(name, {}).get("facts")
        lines += run(RunFolder(results / "runs" / name), from_json(facts) if facts else None)
    return lines


def failures(results: Path, names: Iterable[str]) -> list[str]:
    """Of these runs each attempt that failed, in a line, also where a later one has mended it: for the report."""
    return [line for name in names for line in _failed_attempts(RunFolder(results / "runs" / name))]


def _failed_attempts(folder: RunFolder) -> list[str]:
    if (store := _store(folder)) is None:
        return []
    ends = [end for end in ledger.ends(files.read_jsonl(store.ledger)) if end.get("outcome") == "failed"]
    lines = []
    for end in ends:
        found = _trouble(store, end)
        said = f": {found.evidence[0]}" if found.evidence else ""
        lines.append(f"{folder.name}, attempt {end['attempt']}: {found.name.replace('_', ' ')}{said}. {_done(end)}")
    return lines


def run(folder: RunFolder, facts: Facts | None) -> list[str]:
    if is_trained(folder):  # a summary beside anything else is that of the run as it was before
        summary = folder.path / "metrics" / "summary.json"
        return _of_summary(folder, files.read_json(summary), facts) if summary.exists() else []
    store = _store(folder)
    if store is None:
        return [f"{folder.name}: has not begun"]
    entries = files.read_jsonl(store.ledger)
    if begun := ledger.open_attempt(entries):
        return _of_failure(folder, store, _lost(store, begun), facts) if claims.is_held(store.claims) is False else []
    ends = ledger.ends(entries)
    if not ends or ends[-1].get("outcome") == "completed":
        return []
    return _of_failure(folder, store, ends[-1], facts)


def _store(folder: RunFolder) -> RunStore | None:
    """Where the run's attempts lie; None before it has begun as it is configured now."""
    if not folder.attempts_link.exists():
        return None
    store = RunStore(folder.attempts_link.resolve().parent)
    return None if is_outdated(folder, store) else store


def _lost(store: RunStore, begun: dict[str, Any]) -> dict[str, Any]:
    """The end that nobody wrote down, as the next call will."""
    events = files.read_jsonl(store.attempt(begun["attempt"]).steps)
    steps = [event["step"] for event in events if event["event"] == "step"]
    job = f"SLURM job {begun['job']}, " if begun.get("job") else ""
    where = ", ".join(begun.get("nodes") or [begun["host"]])
    return {
        "attempt": begun["attempt"],
        "cause": "lost",
        "detail": f"nobody wrote down its end, and nobody trains it: its supervisor was killed, or lost ({job}{where})",
        "first_step": min(steps, default=None),
        "last_step": max(steps, default=None),
        "iteration": checkpoints.latest(store.checkpoints),
    }


def _of_summary(folder: RunFolder, summary: dict[str, Any], facts: Facts | None) -> list[str]:
    if summary["state"] != "PASS":
        return [f"{folder.name}: {summary['state']}", *(f"  {reason}" for reason in summary["reasons"])]
    path = folder.path / "analysis.json"
    analysis = files.read_json(path) if path.exists() else None
    lines = passed.waits_for_data(analysis, folder.launch.get("num_workers"))
    if facts is not None:
        lines += [*passed.slow(facts, summary), *passed.unbalanced(facts, analysis)]
        lines += [*passed.waits_for_host(facts, analysis), *passed.casts_single_rows(facts)]
    lines += curve.findings(_steps(folder), _course(folder))
    return [line if line.startswith(" ") else f"{folder.name}: passed; {line}" for line in lines]


def _steps(folder: RunFolder) -> list[dict[str, Any]]:
    """Of every step the last time that it was done, over all attempts."""
    if not folder.attempts_link.exists():
        return []
    attempts = sorted((folder.attempts_link.resolve().parent / "attempts").glob("[0-9]*"))
    events = (event for attempt in attempts for event in files.read_jsonl(AttemptFolder(attempt).steps))
    found = {event["step"]: event for event in events if event["event"] == "step"}
    return [found[step] for step in sorted(found)]


def _course(folder: RunFolder) -> curve.Course:
    run = folder.run
    optimizer, schedule = run.get("optimizer") or {}, run.get("schedule") or {}
    return curve.Course(
        lr=optimizer.get("lr"),
        warmup=schedule.get("warmup_iters") or 0,
        clip=optimizer.get("clip_grad"),
        pretrained=bool(run.get("parent")) or (run.get("model") or {}).get("init") == "pretrained",
    )


def _of_failure(folder: RunFolder, store: RunStore, end: dict[str, Any], facts: Facts | None) -> list[str]:
    attempt, found = store.attempt(end["attempt"]), _trouble(store, end)
    case = advice.Case(
        facts=facts,
        evidence=found.evidence,
        iteration=end.get("iteration") or 0,
        save_interval=(folder.launch.get("checkpoint") or {}).get("save_interval"),
        lr=folder.run["optimizer"].get("lr"),
    )
    rank = "" if end.get("rank") is None else f", rank {end['rank']}"
    return [
        f"{folder.name}: {found.name.replace('_', ' ')} (attempt {end['attempt']}{rank}; cause: {end.get('cause')})",
        *(f"  | {line}" for line in found.evidence),
        f"  logs: {attempt.path}",
        f"  done: {_done(end)}",
        *(f"  try: {line}" for line in advice.of(found.name, case)),
    ]


def _trouble(store: RunStore, end: dict[str, Any]) -> classes.Trouble:
    logs = read_tails(store.attempt(end["attempt"]).logs.items())
    return classes.trouble(str(end.get("cause")), str(end.get("detail") or ""), logs)


def _done(end: dict[str, Any]) -> str:
    """What the pipeline did about it."""
    steps = f"steps {end['first_step']} to {end['last_step']}" if end.get("last_step") else "no step"
    kept = f"checkpoint of iteration {end['iteration']} is kept" if end.get("iteration") else "no checkpoint yet"
    avoided = f"; avoids {', '.join(end['bad_nodes'])}" if end.get("bad_nodes") else ""
    return f"{steps}; {kept}; then: {end.get('action') or 'nothing'}{avoided}"
