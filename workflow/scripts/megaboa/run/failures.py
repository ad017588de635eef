"""Why ranks failed: one cause from the output of ranks and launcher, with the line that shows it."""

from __future__ import annotations

import errno
import os
import re
import signal
from collections.abc import Container, Iterable, Iterator, Mapping
from pathlib import Path

from megaboa.causes import CAUSES, EXCEPTION, INTERRUPT, RANK, Cause, Failure
from megaboa.errors import forbidden
from megaboa.image.tools import plain, why_not_started
from megaboa.scheduler.ranks import STARTS, Ended
from megaboa.store_paths import AttemptFolder

TAIL_BYTES = 65_536
OTHERS_LENGTH = 32_768  # characters examined in logs of ranks that weren't the first to fail
EVIDENCE_LENGTH = 300
# Exceptions that Bridge catches and logs when it looks for optional libraries.
_HANDLED = re.compile(r"^.*failed with: Traceback \(most recent call last\):\n(?:(?:[ \t].*)?\n)*.*", re.MULTILINE)
# Functions of Bridge, and our own, that read a checkpoint before the first step.
_LOADERS = r"(?:_?load_checkpoint\w*|read_train_state|read_run_config|saved_with)"
_LOADING = re.compile(rf'\s+File ".*", line \d+, in {_LOADERS}$')
_RANK = re.compile(f"^{RANK}", re.MULTILINE)
# Each pattern alone: most begin with a literal, which is found ten times as fast as in one large alternation.
_COMPILED = tuple(
    (cause, tuple(re.compile(one, re.MULTILINE) for one in end.patterns)) for cause, end in CAUSES.items()
)
# Messages about effects from outside the rank: lost connections, or our own signals.
_SECOND_HAND = (
    *dict(_COMPILED)["transient"],
    *map(re.compile, (r"[Bb]roken ?[Pp]ipe", r"\bEOFError\b", r"DataLoader worker .* killed by signal: Terminated")),
)
_LAST_EXCEPTION = re.compile(rf"(?:{EXCEPTION}|{INTERRUPT}).*$", re.MULTILINE)
_DENIED = re.compile(rf"PermissionError: \[Errno ({errno.EACCES}|{errno.EPERM})\] .*?: (['\"])(.+?)\2")


def classify(ended: Ended, logs: Mapping[int | None, str], steps: int, resumed_from: int = 0) -> Failure:
    """The cause of an end, from the tails of the logs by rank (None: the launcher's) and the number of steps done.

    A run that has trained before can't be refused by its configuration, whatever exception ends it now.
    """
    candidates = {cause for cause, end in CAUSES.items() if end.patterns and not (end.before_first_step and steps)}
    if ended.killed or resumed_from:
        candidates.discard("config")

    def first_cause(ranks: Iterable[int | None]) -> Failure | None:
        """The failure whose cause comes first in the table; if several ranks name it, the first rank's."""
        best: tuple[int, Failure] | None = None
        for rank in ranks:
            log = logs[rank] if rank in (ended.rank, None) else logs[rank][-OTHERS_LENGTH:]
            found = _match(rank, _HANDLED.sub("", log), ended, candidates, bool(resumed_from))
            if found and (best is None or found[0] < best[0]):
                best = found
        return best[1] if best else None

    # With thousands of ranks, the others' logs are only read if the first one to fail doesn't know the cause.
    order = _in_order(logs, ended.rank)
    first = first_cause(rank for rank in order if rank in (ended.rank, None))
    if failure := first if first and not CAUSES[first.cause].second_hand else first_cause(order):
        return (failure.cause == "transient" and _of_its_own(logs, order)) or failure
    if ended.killed:
        return Failure("killed", str(ended), ended.rank)
    if ended.ok:
        return Failure("crash", "every rank ended with 0, but before the last step")
    if not steps and (why := _not_started(logs, ended)):
        return Failure("crash", why, ended.rank)
    return Failure("crash", _last_words(logs, ended) or str(ended), ended.rank)


def _of_its_own(logs: Mapping[int | None, str], order: Iterable[int | None]) -> Failure | None:
    """The exception of a rank that lost no connection. It is the cause: its peers lose theirs, and may be the first to
    end."""
    for rank in order:
        if rank is None:
            continue
        said = _HANDLED.sub("", logs[rank][-OTHERS_LENGTH:])
        raised = _LAST_EXCEPTION.findall(said)
        if raised and not any(pattern.search(said) for pattern in _SECOND_HAND):
            return Failure("crash", raised[-1].strip()[:EVIDENCE_LENGTH], rank)
    return None


def denied(failure: Failure) -> Failure | None:
    """The same failure, if a rank's last exception is that it may not use a file: whose that is, and the remedy."""
    found = _DENIED.search(failure.evidence) if failure.cause in ("crash", "config") else None
    if found is None:
        return None
    number, path = int(found[1]), found[3]
    error = PermissionError(number, os.strerror(number), path)
    # In a container, a folder may have another path than here.
    here = os.access(Path(path).parent, os.F_OK)
    return Failure("no_permission", forbidden(error) if here else failure.evidence, failure.rank)


class Tails(Mapping[int | None, str]):
    """The ends of logs, each read on demand. None also has the logs of node tasks that failed before they started
    ranks."""

    def __init__(self, logs: Iterable[tuple[int | None, Path]]):
        self._paths: dict[int | None, list[Path]] = {}
        for rank, path in logs:
            if path.exists():
                self._paths.setdefault(rank, []).append(path)

    def __getitem__(self, rank: int | None) -> str:
        said = [_tail(path) for path in self._paths[rank]]
        return "".join(text for text in said if rank is not None or STARTS not in text)

    def __iter__(self) -> Iterator[int | None]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)


def tails_of(folder: AttemptFolder) -> Tails:
    return Tails([*folder.logs.items(), *((None, path) for path in folder.node_logs)])


def _match(
    rank: int | None, log: str, ended: Ended, candidates: Container[Cause], resumed: bool
) -> tuple[int, Failure] | None:
    """The cause that one rank's log names, with its place in the table."""
    for place, (cause, patterns) in enumerate(_COMPILED):
        if cause not in candidates or (cause == "transient" and _is_victim(rank, ended)):
            continue
        line = _line(log, patterns, last=cause == "config")  # earlier exceptions were handled
        if line is None and cause == "damaged_checkpoint" and resumed:
            line = _failed_load(log)
        if line is not None:
            nodes = _nodes(cause, rank, ended, log)
            # Without a name no node can be avoided, but the health check before the next attempt finds the bad one.
            named = "transient" if cause == "node_failure" and not nodes else cause
            return place, Failure(named, line.strip()[:EVIDENCE_LENGTH], rank, nodes)
    return None


def _line(log: str, patterns: Iterable[re.Pattern[str]], last: bool = False) -> str | None:
    """The first (or last) line that matches one of the patterns."""
    found = [match.start() for one in patterns for match in (one.finditer(log) if last else [one.search(log)]) if match]
    if not found:
        return None
    place = max(found) if last else min(found)
    return log[log.rfind("\n", 0, place) + 1 :].split("\n", 1)[0]


def _failed_load(log: str) -> str | None:
    """An exception raised while a checkpoint was read, of any kind, unless another cause explains it.

    A rank that waits for another one there sees lost connections, which makes it a victim.
    """
    loading, found = False, None
    for line in _RANK.sub("", log).splitlines():
        if line.startswith("Traceback "):
            loading = False
        elif _LOADING.match(line):
            loading = True
        elif loading and line and not line[0].isspace():
            loading, found = False, line
    explained = (one for cause, patterns in _COMPILED if cause != "config" for one in patterns)
    if not found or any(one.search(found) for one in explained):
        return None
    return f"{found.strip()[:EVIDENCE_LENGTH]} (while the checkpoint was read)"


def _in_order(logs: Mapping[int | None, str], first: int | None) -> list[int | None]:
    """Log keys in order: the rank that failed first, the launcher, all other ranks."""
    return sorted(logs, key=lambda rank: (rank != first, -1 if rank is None else rank))


def _is_victim(rank: int | None, ended: Ended) -> bool:
    """Whether a rank's lost connections are only a consequence: when a rank is killed, its peers see them. The failed
    rank itself can only have written them if it aborted."""
    return ended.killed and (rank != ended.rank or ended.returncode == -signal.SIGKILL)


def _nodes(cause: Cause, rank: int | None, ended: Ended, log: str) -> tuple[str, ...]:
    """The nodes to blame, as far as the log or the failed rank tells them."""
    if cause == "node_failure":
        return tuple(re.findall(r"Node failure on (\S+)", log))
    return (ended.node,) if cause == "gpu_failure" and rank == ended.rank and ended.node else ()


def _not_started(logs: Mapping[int | None, str], ended: Ended) -> str | None:
    """The reason why an image can't be started, from the log that says most about it.

    The reason is the same on every host, but the first rank to fail ends the others, so its own log may be cut off.
    """
    said = [why for rank in _in_order(logs, ended.rank) if (why := why_not_started(logs[rank]))]
    return f"the image can't be started: {max(said, key=len)}"[:EVIDENCE_LENGTH] if said else None


def _last_words(logs: Mapping[int | None, str], ended: Ended) -> str:
    text = _HANDLED.sub("", logs.get(ended.rank, ""))
    lines = [line.strip() for line in _LAST_EXCEPTION.findall(text) or text.splitlines() if line.strip()]
    return lines[-1][:EVIDENCE_LENGTH] if lines else ""


def _tail(path: Path) -> str:
    with path.open("rb") as stream:
        size = stream.seek(0, 2)
        stream.seek(max(size - TAIL_BYTES, 0))
        return plain(stream.read().decode(errors="replace"))
