"""What a call of Snakemake submits, recorded once and read by its jobs, whenever these start.

A job may wait for days, and restarts when a node dies. In the meantime the experiment file may be edited and planned
again. So each call keeps a copy of its configuration, for Snakemake in the jobs, and of every run's documents, for the
supervisors. Standard library only.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from megaboa import files
from megaboa.paths import ExperimentFolder, RunFolder
from megaboa.records import Tree
from megaboa.run.inputs import UnusableInputError

VARIABLE = "MEGABOA_CALL"  # in a job's environment: the folder of the call that submitted it
RUNS = "runs.jsonl"
COMMAND = "command.txt"
ID_LENGTH = 12


@dataclass(frozen=True)
class Submitted:
    """A call's configuration, and the command that repeats it."""

    config_files: list[Path]
    command: str

    def with_words(self, words: str) -> str:
        """The same call with more words, in front, as `--configfile` would take a target after it for a file."""
        return self.command.replace("snakemake", f"snakemake {words}", 1)


def record(results: str | Path, config_files: Iterable[str | Path], runs: Iterable[Tree], command: str) -> list[Path]:
    """Record what is submitted (`runs`: name, run, launch, profile of each); return the copies of the configuration."""
    contents = [(Path(path).name, Path(path).read_bytes()) for path in config_files]
    lines = "".join(json.dumps(run, sort_keys=True) + "\n" for run in runs)
    name = files.digest([*((name, data.decode(errors="replace")) for name, data in contents), lines])[:ID_LENGTH]
    call = ExperimentFolder(Path(results).absolute()).calls / name
    # Each in its own folder, because the first one's name may be the experiment's, and names may repeat.
    copies = [call / "config" / str(number) / name for number, (name, _) in enumerate(contents)]
    if not (call / RUNS).exists():
        for copy, (_, data) in zip(copies, contents, strict=True):
            files.write_bytes(copy, data)
        files.write_text(call / RUNS, lines)
    files.write_text(call / COMMAND, command)  # rewritten by every call, so that the newest file is the last call's
    return copies


def last(results: Path) -> Submitted:
    """The last call's submission; empty if there was no call."""
    commands = list(ExperimentFolder(results).calls.glob(f"*/{COMMAND}"))
    if not commands:
        return Submitted([], "snakemake")
    command = max(commands, key=lambda path: path.stat().st_mtime)
    return Submitted(_copies(command.parent), command.read_text(encoding="utf-8"))


def copies_here(results: Path) -> list[Path]:
    """The configuration of the call that submitted this job, as it was then; empty outside of such a job."""
    call = _call_here(results)
    return _copies(call) if call else []


def _call_here(results: Path) -> Path | None:
    """The folder of the call that submitted this job; None outside of a job of this experiment."""
    call = Path(os.environ.get(VARIABLE, ""))
    return call if call.parent.resolve() == ExperimentFolder(results.resolve()).calls else None


def _copies(call: Path) -> list[Path]:
    return sorted(call.glob("config/*/*"), key=lambda path: int(path.parent.name))


def call_of(config_file: str | Path) -> Path | None:
    """The folder of the call that this copy of the configuration belongs to; None if it isn't a copy."""
    path = Path(config_file)
    call = path.parents[2] if len(path.parents) > 2 else path
    return call if (call / RUNS).exists() else None


def device_of(config_file: str | Path) -> str | None:
    """The device of the call with this configuration, which is the same for all its runs."""
    call = call_of(config_file) or Path(os.environ.get(VARIABLE, "")).absolute()
    if not (call / RUNS).is_file():
        return None
    with (call / RUNS).open(encoding="utf-8") as lines:
        return json.loads(lines.readline())["run"]["device"]


def submit_from(config_file: str | Path) -> None:
    """Let this process and its children, also in jobs, train what the call with this configuration submits."""
    os.environ.pop(VARIABLE, None)
    if call := call_of(config_file):
        os.environ[VARIABLE] = str(call)


def folder_of(run: Path, restart: bool = False) -> RunFolder:
    """The run as this job's call submitted it; outside of such a job, as its files are now.

    `restart`: the run may start again from step 0, despite other work in the store.
    """
    call = _call_here(run.parent.parent)
    if call is None:
        here = RunFolder(run)  # the variable may be another experiment's, for example in a shell within a job
        return RunFolder(run, {**here.documents, "restart": True}) if restart else here
    with (call / RUNS).open(encoding="utf-8") as lines:
        about = (json.loads(line) for line in lines if run.name in line)  # parsing all lines would take a second
        asked = next((one for one in about if one["name"] == run.name), None)
    if asked is None:
        raise UnusableInputError(f"{call / RUNS} has no run {run.name!r}, and this job was submitted by that call")
    return RunFolder(run, {**asked, "restart": restart or asked.get("restart", False)})
