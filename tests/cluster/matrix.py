"""The matrix of faults as a table: what was done, what came of it. `MEGABOA_WRITE_MATRIX=1` writes it to docs/.

`MEGABOA_WRITE_MATRIX=untimed` leaves the recovery out: where other work shares the machine it says nothing.
"""

from __future__ import annotations

import os
import platform
import subprocess
import time
from dataclasses import dataclass, replace
from importlib.metadata import version

from lab import REPOSITORY

WANTED = os.environ.get("MEGABOA_WRITE_MATRIX")
PAGE = REPOSITORY / "docs" / "reference" / "fault-matrix.md"
HEAD = """\
# Fault matrix: what happens when something breaks

Each row is a real event on a real SLURM cluster of two to four hosts (Debian's SLURM, network namespaces on one
machine), during a run that saves every 10 steps. The run uses two hosts, or one if the event only concerns calls or the
supervisor; it has 60 steps, or more if the wall time ends or several faults follow. The loss and gradient norm of every
step are compared, to the last bit, with those of an undisturbed run. Lost steps were done twice. Recovery is the time
from the event, or for a stopped run from the next call, to the next completed step; it is left out (–) if the event
stopped nothing, or if other work shared the machine. It includes SLURM's own time-outs: here a host is declared down
after 10 s and a requeued job waits 6 s; on most clusters these are 300 s and 120 s.

{made}
"""
TABLE = """\
| event | what Megaboa takes it for, and does | lost steps | jobs submitted | recovery | same curve |
|---|---|---|---|---|---|
"""


@dataclass(frozen=True)
class Row:
    event: str
    outcome: str
    lost: int | None  # None, as below: it has none
    jobs: int
    recovery: float | None
    same: bool | None

    def __str__(self) -> str:
        recovery = "–" if self.recovery is None else f"{self.recovery:.0f} s"
        same = {True: "yes", False: "no", None: "–"}[self.same]
        lost = "–" if self.lost is None else self.lost
        return f"| {self.event} | {self.outcome} | {lost} | {self.jobs} | {recovery} | {same} |"


def write(part: str, rows: list[Row], note: str = "") -> None:
    """Put these lines into a part of the page, in place of older ones of the same events, when somebody wants that.

    `note`: what is other than the page's head says; the head's last line is of the parts without one.
    """
    if WANTED not in ("1", "untimed"):
        return
    if WANTED == "untimed":
        rows = [replace(row, recovery=None) for row in rows]
    parts = _parts()
    lines = {**_lines(parts.get(part, "")), **{row.event: str(row) for row in rows}}
    parts[part] = (f"{note}\n{_made('test_gpus.py')}\n\n" if note else "") + TABLE + "\n".join(lines.values()) + "\n"
    head = PAGE.read_text().split("\n## ")[0] if note else HEAD.format(made=_made())
    PAGE.write_text("\n".join([head, *(f"## {name}\n\n{text}" for name, text in sorted(parts.items()))]))


def check(part: str, rows: list[Row]) -> None:
    """The page has a line for each event that was just tried."""
    if not WANTED:
        assert {row.event for row in rows} <= set(_lines(_parts().get(part, "")))


def has(part: str) -> bool:
    return part in _parts()


def _lines(part: str) -> dict[str, str]:
    """The lines of a part's table by their event."""
    table = [line for line in part.splitlines() if line.startswith("|")]
    return {line.split("|")[1].strip(): line for line in table[2:]}


def _parts() -> dict[str, str]:
    """The page as it is, by heading."""
    text = PAGE.read_text() if PAGE.exists() else ""
    parts = (part.split("\n\n", 1) for part in text.split("\n## ")[1:])
    return {name: part.strip() + "\n" for name, part in parts}


def _made(files: str = "test_faults_of_*.py") -> str:
    slurm = subprocess.run(["slurmctld", "-V"], capture_output=True, text=True, check=True).stdout.strip()
    packages = ", ".join(f"{name} {version(name)}" for name in ("megatron-bridge", "snakemake", "torch"))
    where = f"{os.cpu_count()} cores, Python {platform.python_version()}, {slurm}, {packages}"
    return f"Made by `tests/cluster/{files}` on {time.strftime('%Y-%m-%d')} ({where})."
