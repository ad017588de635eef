"""What the Snakefile says and does beside its rules. Imports no Snakemake."""

from __future__ import annotations

import fcntl
import os
import socket
import sys
import time
from pathlib import Path
from typing import IO

from megaboa.files import read_json
from megaboa.plan import Plan

_held: list[IO[str]] = []  # open for as long as this process lives
_holder: list[str] = []  # who else works on the experiment
_STARTED = time.time()


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


def require_claim() -> None:
    """Called before the first job."""
    if _holder:
        sys.exit(f"{_holder[0]}. Wait for it, or end it, and try again.")


def introduce(plan: Plan) -> None:
    """Say on one screen what was planned."""
    results = Path("results") / plan.name
    count = len(plan.runs)
    say(f"experiment {plan.name}: {count} run{'s' if count > 1 else ''} on {plan.experiment.device}, in {results}/")
    say(f"one run by hand, for debugging: python workflow/scripts/pretrain.py {results}/runs/{plan.runs[0].name}")


def print_outcome(results: str | Path) -> None:
    """The last lines that a user sees: what the report comes to, and where it is."""
    checks = Path(results) / "report" / "checks.json"
    if checks.exists() and checks.stat().st_mtime >= _STARTED:  # not the verdict of an earlier call
        found = read_json(checks)
        counts = "; ".join(f"{_count(states)} {what}" for what, states in found["counts"].items() if states)
        say(f"{found['state']}: {counts}\nreport: {Path(results) / 'report' / 'index.html'}")


def _count(states: dict[str, int]) -> str:
    """`7 of 7` where all passed, else each state with its number."""
    if set(states) == {"PASS"}:
        return "all {PASS}".format(**states)
    return ", ".join(f"{number} {state}" for state, number in states.items())


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
