"""How a call ends: the report's verdict, or what failed."""

from __future__ import annotations

import atexit
import functools
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from megaboa.calls import beginning, lock, say
from megaboa.calls.dry_run import shows_jobs, try_each_rule
from megaboa.doctor import failed_stages
from megaboa.observe import status
from megaboa.observe.queue import read_queue
from megaboa.paths import ExperimentFolder
from megaboa.records import Checks, Fault, read
from megaboa.scheduler.registry import cluster

_interrupted: list[int] = []
ANSWER = b"Ctrl-C again: the call is ending already, as soon as its runs have saved; once more ends it at once\n"
SHOWN, LENGTH = 5, 400  # of the last line: number of failed checks, and characters for each
REMEDY = 150  # characters at the end of a longer one, where its remedy is
MOST_LINES = 20  # limit for lines about other failed jobs


def concluding(
    workflow: Any,
    results: str | Path,
    report: str,
    onstart: Callable[[], None] | None = None,
    onerror: Callable[[], None] | None = None,
) -> Callable[..., None]:
    """Snakemake's own `execute` with our hooks added and the report's verdict at the end.

    Snakemake calls no hook if there is nothing to do, and no hook is sure to come last.
    """
    execute = workflow.execute

    @functools.wraps(execute)
    def executed(*arguments: Any, **options: Any) -> None:
        beginning.require_rules_with_files(workflow)
        for name, hook in (("_onstart", onstart), ("_onerror", onerror)):
            if hook:
                setattr(workflow, name, _both(hook, getattr(workflow, name)))
        execute(*arguments, **options)
        if workflow.dryrun:
            if onstart is None and not shows_jobs(workflow):
                try_each_rule(workflow.dag)
        elif not workflow.touch and _is_made(report, workflow.dag):
            conclude(results)

    return executed


def _both(hook: Callable[[], None], other: Callable[[Any], None]) -> Callable[[Any], None]:
    def called(log: Any) -> None:
        hook()
        other(log)

    return called


def _is_made(rule: str, dag: Any) -> bool:
    """Whether the call includes this rule, and its output is up to date."""
    jobs = [job for job in dag.jobs if job.rule.name == rule]
    return any(dag.finished(job) or not dag.needrun(job) for job in jobs)


def conclude(results: str | Path) -> None:
    """Print the report's verdict and path as the last lines of a call; exit with an error if a check failed."""
    found = read(Checks, ExperimentFolder(Path(results)).checks)
    by_state = {"checks": found.counts.checks, "runs": found.counts.runs}
    counts = "; ".join(_count(states, what) for what, states in by_state.items() if states)
    say("\n".join([*found.notes, f"{found.state}: {counts}\nreport: {Path(results) / 'report' / 'index.html'}"]))
    untold = (Fault(name=found.state, detail=""),) if found.state == "FAIL" else ()
    if failed := untold if found.failed is None else found.failed:
        sys.exit(f"failed: {'; '.join(map(_failed, failed[:SHOWN]))}{_more(failed)}")


def _failed(one: Fault) -> str:
    return f"{one.name} ({_short(one.detail)})" if one.detail else one.name


def _short(detail: str) -> str:
    """Whole words of a long sentence's beginning and end."""
    if len(detail) <= LENGTH:
        return detail
    start, end = detail[: LENGTH - REMEDY].rpartition(" "), detail[-REMEDY:].partition(" ")
    return f"{start[0] or start[2]} … {end[2] or end[0]}"


def _more(failed: Sequence[Fault]) -> str:
    return f"; and {len(failed) - SHOWN} more" if len(failed) > SHOWN else ""


def trained_runs(dag: Any, rule: str) -> set[str]:
    """The runs that a call trains, by the rule that does."""
    return {job.wildcards.run for job in dag.needrun_jobs() if job.rule.name == rule}


def print_failures(results: str | Path, trained: Collection[str]) -> None:
    """Print which runs and other jobs failed, what is available without them, and where runs stopped, of those that
    this call trains."""
    if not lock.is_elsewhere() and ExperimentFolder(Path(results)).plan.exists():
        cluster().ask_once()  # nothing more is submitted
        # By its ledger alone, a run whose job could not record its end is still trained.
        missing = status.missing(Path(results), read_queue())
        for line in status.failed(Path(results).name, missing):
            say(line)
        last = status.interrupted([run for run in missing if run.run in trained])
        if last or _interrupted:
            last = last or ["interrupted: the same call makes what is missing"]
            atexit.register(say, "\n".join(last))  # after Snakemake's own errors, which no hook can follow
        lines = failed_stages.failed(Path(results), over=True)
        for line in lines[:MOST_LINES]:
            say(line)
        if len(lines) > MOST_LINES:
            say(f"`megaboa doctor {Path(results).name}` says the rest")


def note_interrupts() -> None:
    """Note Ctrl-C, so that the interrupted call isn't reported as a failure; it still ends the call.

    A second one would break off Snakemake's own end, with a traceback in place of what became of the runs. It is only
    answered; a third one isn't.
    """

    def noted(number: int, frame: Any) -> None:
        _interrupted.append(number)
        if len(_interrupted) == 2:
            os.write(2, ANSWER)  # a signal may interrupt a print, which then takes no other
            return
        signal.default_int_handler(number, frame)

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, noted)


def report_after_failure(results: str | Path, report: str, command: str, needed: Collection[str], dag: Any) -> None:
    """Make the report in spite of failed jobs, if what it needs is made. The report names the failures.

    It isn't made by a job, because the rule's inputs include what has failed. The next call retries the failed jobs,
    and then makes the report by its rule.
    """
    asked = any(job.rule.name == report for job in dag.jobs)
    if _interrupted or lock.is_elsewhere() or not asked or _is_made(report, dag):
        return
    if not all(map(os.path.exists, needed)) or status.missing(Path(results)):
        return
    if any(dag.needrun(job) and not dag.finished(job) for job in dag.jobs if not {*needed}.isdisjoint(job.output)):
        return  # what is there is an earlier call's, for example if the tokenizer couldn't be trained again
    log = Path(results) / "logs" / "report.log"
    with log.open("w") as stream:
        done = subprocess.run(["bash", "-c", f"{command} --after-failure"], stdout=stream, stderr=subprocess.STDOUT)
    if done.returncode:
        say(f"the report could not be made: {log}")
        return
    conclude(results)


def _count(states: dict[str, int], what: str) -> str:
    """`all 7 runs` if all passed, else the number of each state."""
    total = sum(states.values())
    noun = what.removesuffix("s") if total == 1 else what
    if set(states) == {"PASS"}:
        return f"{'all ' if total > 1 else ''}{total} {noun}"
    return f"{', '.join(f'{number} {state}' for state, number in states.items())} {noun}"
