"""What the Snakefile says and does beside its rules. Imports no Snakemake."""

from __future__ import annotations

import fcntl
import functools
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import IO, Any

from megaboa.doctor import stages
from megaboa.files import read_json
from megaboa.observe import standing
from megaboa.plan import Plan
from megaboa.plan.submission import describe, submission
from megaboa.preflight.refusals import some
from megaboa.results import RunFolder
from megaboa.run.identity import is_trained

PLACEHOLDER = "CHANGE_ME"
READERS = {"doctor", "interim"}  # rules that leave alone what others make and read
_held: list[IO[str]] = []  # open for as long as this process lives
_holder: list[str] = []  # who else works on the experiment
_interrupted: list[int] = []
SHOWN, LENGTH = 5, 200  # failed checks that the last line names; characters that it says of each
MOST_LINES = 20  # about other jobs that failed


def use_this_python() -> None:
    """Let jobs run with the Python that runs Snakemake, where no conda environment or container is deployed."""
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"


def claim_experiment(results: str | Path) -> bool:
    """Keep other workflow processes away from this experiment until this one ends, however it ends.

    False where another one works on it: its files must not be written then.
    """
    path = Path(results) / ".lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    stream = path.open("a+")
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        stream.seek(0)
        _holder.append(f"{results} is being worked on by {stream.read().strip()}")
        say(f"{_holder[0]}: its files are left as they are, and the plan below is theirs")
        return False
    stream.truncate(0)
    stream.write(f"snakemake, process {os.getpid()} on host {socket.gethostname()}")
    stream.flush()
    _held.append(stream)
    return True


def release_experiment() -> None:
    """What only reads must not keep others from working."""
    while _held:
        _held.pop().close()


def only_reads(targets: Collection[str]) -> bool:
    """Whether a call may be made while another one works on the experiment."""
    return bool(targets) and set(targets) <= READERS


def require_claim() -> None:
    """Called before the first job."""
    if _holder:
        sys.exit(f"{_holder[0]}. Wait for it, or end it, and try again.")


def profile_resources(default_resources: Any) -> dict[str, str]:
    """What a profile's default-resources say, by name; names that its user hasn't filled in end the call."""
    found = {name: str(getattr(value, "raw", value)) for name, value in (default_resources or {}).items()}
    open_names = [name for name, value in found.items() if value == PLACEHOLDER]
    if open_names:
        sys.exit(
            f"profiles/slurm/config.yaml: default-resources: {' and '.join(open_names)} say {PLACEHOLDER}: put in your "
            f"account and partitions (`sacctmgr show associations user=$USER`, `sinfo`)"
        )
    return found


def require_cluster(plan: Plan, executor: str, starting: Collection[str]) -> None:
    """Called before the first job: several nodes are had from SLURM only.

    `starting`: the runs whose ranks this call will start. What comes before them needs no nodes, on any machine.
    """
    wide = next((run for run in plan.runs if run.name in starting and run.config.resources.nodes > 1), None)
    if wide and executor != "slurm":
        sys.exit(
            f"run {wide.name}: resources.nodes is {wide.config.resources.nodes}, and this machine is one: "
            f"call `snakemake --profile slurm`, or set it to 1; what comes before training works here too "
            f"(`snakemake preflight`, `data`, `import`)"
        )


def introduce(plan: Plan, on_cluster: bool) -> None:
    """Say on one screen what was planned and, where it costs something, how much."""
    results = Path("results") / plan.name
    count = len(plan.runs)
    for note in plan.notes:
        say(note)
    for text, runs in plan.warnings.items():
        say(f"warning: {text} ({some(runs)})")
    for left_out in plan.invalid:
        say(str(left_out))
    say(f"experiment {plan.name}: {count} run{'s' if count > 1 else ''} on {plan.experiment.device}, in {results}/")
    if recipes := sorted({run.model for run in plan.runs if run.config.models[run.model].recipe}):
        say(f"recipes have no Hugging Face import, export or proof: {', '.join(recipes)}")
    if on_cluster or plan.experiment.device == "cuda":
        trained = {run.name for run in plan.runs if is_trained(RunFolder(results / "runs" / run.name))}
        for line in describe(submission(plan.runs, trained), plan.experiment.device):
            say(line)
    say(f"one run by hand, for debugging: python workflow/scripts/pretrain.py {results}/runs/{plan.runs[0].name}")


def concluding(execute: Callable[..., None], workflow: Any, results: str | Path) -> Callable[..., None]:
    """Snakemake's own `execute`, and the report's verdict after it.

    Of Snakemake's hooks none is called where nothing is to be done, and none can be sure to have the last word.
    """

    @functools.wraps(execute)
    def executed(*arguments: Any, **options: Any) -> None:
        execute(*arguments, **options)
        if not (workflow.dryrun or workflow.touch) and _is_made("report", workflow.dag):
            conclude(results)

    return executed


def _is_made(rule: str, dag: Any) -> bool:
    """Whether the call has asked for what a rule makes, and it is there."""
    jobs = [job for job in dag.jobs if job.rule.name == rule]
    return any(dag.finished(job) or not dag.needrun(job) for job in jobs)


def conclude(results: str | Path) -> None:
    """The last lines that a user sees: what the report comes to, and where it is. A failed check ends the call with an
    error."""
    found = read_json(Path(results) / "report" / "checks.json")
    counts = "; ".join(f"{_count(states)} {what}" for what, states in found["counts"].items() if states)
    say(f"{found['state']}: {counts}\nreport: {Path(results) / 'report' / 'index.html'}")
    if failed := found.get("failed", [{"name": found["state"], "detail": ""}] if found["state"] == "FAIL" else []):
        sys.exit(f"failed: {'; '.join(map(_failed, failed[:SHOWN]))}{_more(failed)}")


def _failed(one: dict[str, str]) -> str:
    return f"{one['name']} ({one['detail'][:LENGTH]})" if one["detail"] else one["name"]


def _more(failed: list[dict[str, str]]) -> str:
    return f"; and {len(failed) - SHOWN} more" if len(failed) > SHOWN else ""


def print_failures(results: str | Path) -> None:
    """After a call that failed: which runs and other jobs did, and what can be had without them."""
    if not _holder and (Path(results) / "plan.tsv").exists():
        for line in standing.failed(standing.missing(Path(results))):
            say(line)
        lines = stages.failed(Path(results), over=True)
        for line in lines[:MOST_LINES]:
            say(line)
        if len(lines) > MOST_LINES:
            say("`snakemake doctor` says the rest")


def note_interrupts() -> None:
    """Ctrl-C ends a call as before, but is no failure to be reported."""

    def noted(number: int, frame: Any) -> None:
        _interrupted.append(number)
        signal.default_int_handler(number, frame)

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, noted)


def report_after_failure(results: str | Path, command: str, needed: Collection[str], dag: Any) -> None:
    """Where every run is trained and measured, what failed beside training doesn't cost the report: it says so.

    It is made here and not by a job, as the rule needs what has failed. The next call tries that again, and then makes
    the report by its rule.
    """
    asked = any(job.rule.name == "report" for job in dag.jobs)
    if _interrupted or _holder or not asked or _is_made("report", dag):
        return
    if not all(map(os.path.exists, needed)) or standing.missing(Path(results)):
        return
    log = Path(results) / "logs" / "report.log"
    with log.open("w") as stream:
        done = subprocess.run(["bash", "-c", f"{command} --after-failure"], stdout=stream, stderr=subprocess.STDOUT)
    if done.returncode:
        say(f"the report could not be made: {log}")
        return
    conclude(results)


def _count(states: dict[str, int]) -> str:
    """`7 of 7` where all passed, else each state with its number."""
    if set(states) == {"PASS"}:
        return "all {PASS}".format(**states)
    return ", ".join(f"{number} {state}" for state, number in states.items())


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def given_values(values: dict[str, Any]) -> list[str]:
    """`--config` as it was given; Snakemake has turned the values into what they mean."""
    if not values:
        return []
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in values.items()}
    return ["--config", *(f"{key}={text}" for key, text in texts.items())]
