"""What the Snakefile says and does beside its rules. Imports no Snakemake."""

from __future__ import annotations

import fcntl
import os
import socket
import sys
from pathlib import Path
from typing import IO

from megaboa.files import read_json
from megaboa.plan import Plan

_held: list[IO[str]] = []  # open for as long as this process lives


def hold_experiment(results: str | Path) -> None:
    """Keep other workflow processes away from this experiment until this one ends, however it ends."""
    path = Path(results) / ".lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    stream = path.open("a+")
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        stream.seek(0)
        sys.exit(f"{results} is being worked on by {stream.read().strip()}. Wait for it, or end it, and try again.")
    stream.truncate(0)
    stream.write(f"snakemake, process {os.getpid()} on host {socket.gethostname()}")
    stream.flush()
    _held.append(stream)


def introduce(plan: Plan) -> None:
    """Say on one screen what was planned."""
    results = Path("results") / plan.name
    count = len(plan.runs)
    say(f"experiment {plan.name}: {count} run{'s' if count > 1 else ''} on {plan.experiment.device}, in {results}/")
    say(f"one run by hand, for debugging: python workflow/scripts/pretrain.py {results}/runs/{plan.runs[0].name}")


def print_outcome(results: str | Path) -> None:
    checks = Path(results) / "report" / "checks.json"
    if not checks.exists():
        return
    verdict = read_json(checks)["verdict"]
    say(f"{verdict}\nreport: {Path(results) / 'report' / 'index.html'}")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
