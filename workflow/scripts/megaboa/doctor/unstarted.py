"""Why a run has not begun: its job waits, was refused, or ended before the run could write anything.

Nothing of that is in the run's ledger: the queue has the first, and the logs of Snakemake's calls have the others.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megaboa.causes import CAUSES
from megaboa.doctor import troubles
from megaboa.paths import RunFolder
from megaboa.run.failures import EVIDENCE_LENGTH, Tails, classify
from megaboa.scheduler.answers import QueuedJob
from megaboa.scheduler.ranks import Ended
from megaboa.scheduler.registry import cluster

CALLS = Path(".snakemake", "log")
NEWEST = 20  # calls that are looked through
MOST = 4  # lines of a message
HAS_NOT_BEGUN = "has not begun"
_OUTPUT = re.compile(r"^    output: (.+)$", re.MULTILINE)
_ERROR = re.compile(r"^Error in rule \S+:\n", re.MULTILINE)
_NEXT = re.compile(r"^\[\w{3} \w{3} ", re.MULTILINE)  # the time that begins whatever Snakemake says next
# Up to the next field, which is indented as the message is; Snakemake puts its own sentence behind it.
_MESSAGE = re.compile(r"^    message: (.*?)(?:For further error details see .*?)?(?=^    \w[\w ]*:)", re.M | re.S)
_LOGS = re.compile(r"^    log: (.+?)(?: \(check log file.*)?$", re.MULTILINE)


@dataclass(frozen=True)
class Error:
    """What Snakemake said of a failed job. `logs`: the rule's, then those of the scheduler."""

    call: Path
    message: str
    logs: tuple[Path, ...]


class Calls:
    """The logs of Snakemake's last calls. Each is read once, for all runs, and only if no later one tells of a run."""

    def __init__(self, results: Path):
        self._folder = results.absolute().parents[1] / CALLS
        self._errors: dict[str, Error | None] = {}  # of each run that one of the calls was to train

    def last_error(self, folder: RunFolder) -> Error | None:
        """The error of the job that trains a run, if its last call ended with one."""
        name = _name(str(folder.train_manifest))
        while name not in self._errors and (call := next(self._unread, None)):
            self._read(call)
        return self._errors.get(name)

    @functools.cached_property
    def _unread(self) -> Iterator[Path]:
        calls = self._folder.glob("*.snakemake.log")
        return iter(sorted(calls, key=lambda path: path.name, reverse=True)[:NEWEST])  # their names begin with the time

    def _read(self, call: Path) -> None:
        try:
            text = call.read_text(encoding="utf-8", errors="replace")
        except OSError:  # another user's, or removed meanwhile
            return
        errors = dict(_errors(call, text))
        outputs = {name for line in _OUTPUT.findall(text) for name in map(_name, line.split(", "))}
        for name in outputs:
            self._errors.setdefault(name, errors.get(name))


def told(folder: RunFolder, jobs: Sequence[QueuedJob], calls: Calls) -> list[str]:
    """`jobs`: those of the queue that are for this run."""
    if living := [job for job in jobs if not job.only_ends]:
        job = min(living, key=lambda job: job.waits)
        does = f"waits{f' ({job.reason})' if job.reason else ''}" if job.waits else f"has just started on {job.nodes}"
        return [f"{folder.name}: {HAS_NOT_BEGUN}: its {cluster().name} job {job.id} {does}"]
    if (error := calls.last_error(folder)) is None:
        return [f"{folder.name}: {HAS_NOT_BEGUN}"]
    own = next((path for path in error.logs[1:] if path.exists()), None)
    found = _found(own) if own else None
    evidence = [line.strip() for line in error.message.splitlines() if line.strip()][:MOST]
    if own:
        what = "its job ended before the run could begin"
    else:
        what = "its job ended before it started" if error.logs[1:] else "its job could not be submitted"
    return [
        f"{folder.name}: {HAS_NOT_BEGUN}: {what}{f': {found[0].replace("_", " ")}' if found else ''}",
        *(f"  | {line[:EVIDENCE_LENGTH]}" for line in [*evidence, *(found[1:] if found else ())]),
        f"  logs: {_shown(own or error.call)}",
        *(f"  try: {line}" for line in (troubles.advice(found[0], troubles.Case())[:1] if found else ())),
    ]


def _shown(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _name(output: str) -> str:
    """experiment/runs/run/train.json, wherever the results are."""
    return "/".join(Path(output).parts[-4:])


def _errors(call: Path, text: str) -> Iterator[tuple[str, Error]]:
    for block in _ERROR.split(text)[1:]:
        block = _NEXT.split(block, maxsplit=1)[0]
        message, logs, output = (pattern.search(block) for pattern in (_MESSAGE, _LOGS, _OUTPUT))
        if output:
            paths = tuple(Path(path) for path in logs[1].split(", ")) if logs else ()
            error = Error(call, message[1] if message else "", paths)
            yield from ((_name(one), error) for one in output[1].split(", "))


def _found(log: Path) -> tuple[str, ...] | None:
    """The trouble that the scheduler's log of a job shows, and the line that shows it; None if it shows none."""
    failure = classify(Ended(0, 1), Tails([(None, log)]), 0)
    name = CAUSES[failure.cause].trouble
    return None if name == "unknown" else (name, failure.evidence)
