"""What the Snakefile says and does beside its rules. Imports no Snakemake."""

from __future__ import annotations

import _thread
import fcntl
import functools
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import IO, Any

from megaboa.files import read_json
from megaboa.observe import standing
from megaboa.plan import Plan, preview
from megaboa.plan.shared import Shared
from megaboa.plan.submission import describe, submission
from megaboa.preflight.refusals import some
from megaboa.run import submitted
from megaboa.run.identity import is_trained

PLACEHOLDER = "CHANGE_ME"
LOOKS = {
    *("--dag", "--rulegraph", "--filegraph", "--d3dag", "--summary", "-S", "--detailed-summary", "-D", "--lint"),
    *("--list-rules", "--list", "-l", "--list-target-rules", "--lt", "--list-changes", "--list-untracked", "--lu"),
    *("--report", "--unlock", "--cleanup-metadata", "--print-compilation", "--archive"),
}  # Snakemake's other ways to look at a workflow without doing its jobs
READERS = {"doctor", "interim"}  # rules that leave alone what others make and read
_held: list[IO[str]] = []  # open for as long as this process lives
_holder: list[str] = []  # who else works on the experiment
_STARTED = time.time()


def use_this_python() -> None:
    """Let jobs run with the Python that runs Snakemake, where no conda environment or container is deployed."""
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"


def in_a_thread(handler: Callable[[Any], None]) -> Callable[..., None]:
    """Snakemake's handler of SIGTERM in a thread of its own.

    It takes a lock (9.27), which the main thread holds while it selects jobs and looks at those that ended. Signals are
    handled in that thread: it would wait for itself, for ever, and only SIGKILL would end it.
    """

    @functools.wraps(handler)
    def handle(scheduler: Any, *_: Any) -> None:
        _thread.start_new_thread(handler, (scheduler,))  # threading's own start takes locks too

    return handle


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
        say(f"{_holder[0]}: its files are left as they are")
        return False
    stream.truncate(0)
    stream.write(f"snakemake, process {os.getpid()} on host {socket.gethostname()}")
    stream.flush()
    _held.append(stream)
    return True


def looks_only(dry_run: bool, words: Collection[str]) -> bool:
    """Whether a call submits nothing, by Snakemake's command line."""
    return dry_run or not LOOKS.isdisjoint(words)


def write_plan(
    plan: Plan,
    shared: Shared,
    config_files: Sequence[str | Path],
    looks: bool,
    mine: bool,
    restarted: Collection[str] = (),
) -> tuple[dict[str, str], list[Path]]:
    """Write down what is planned: a call that only looks does so where no job reads it, one that works keeps what it
    submits. Return which files stand for which in the look, and the configuration that jobs read.

    `mine`: nobody else works on the experiment.
    """
    if looks and (submitted.was_called(shared.folder) or not mine):
        if differing := preview.write(plan, shared):
            count = f"{len(differing)} file{'s differ' if len(differing) > 1 else ' differs'}"
            say(f"{count} from the last call's: this plan lies in {shared.folder / preview.FOLDER}/")
        return differing, []
    if not mine:
        return {}, []
    plan.write(shared.folder.parent)
    shared.write()
    if looks:
        return {}, []
    preview.remove(shared.folder)
    return {}, submitted.record(shared.folder, config_files, plan.submitted(restarted))


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
        trained = {run.name for run in plan.runs if is_trained(run.folder("results", plan.name))}
        for line in describe(submission(plan.runs, trained), plan.experiment.device):
            say(line)
    say(f"one run by hand, for debugging: python workflow/scripts/pretrain.py {results}/runs/{plan.runs[0].name}")


def print_outcome(results: str | Path) -> None:
    """The last lines that a user sees: what the report comes to, and where it is."""
    checks = Path(results) / "report" / "checks.json"
    if checks.exists() and checks.stat().st_mtime >= _STARTED:  # not the verdict of an earlier call
        found = read_json(checks)
        counts = "; ".join(f"{_count(states)} {what}" for what, states in found["counts"].items() if states)
        say(f"{found['state']}: {counts}\nreport: {Path(results) / 'report' / 'index.html'}")


def print_failures(results: str | Path) -> None:
    """After a call that failed: which runs did, and what can be had without them."""
    if not _holder and (Path(results) / "plan.tsv").exists():
        for line in standing.failed(standing.missing(Path(results))):
            say(line)


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
