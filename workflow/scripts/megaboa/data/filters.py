"""The user's filters: Python files with a function `keep`, which decides about every record of a corpus.

    def keep(record: dict) -> bool | str

True keeps a record. False drops it; so does a string, which is the reason that it is counted under.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaboa.errors import InputError
from megaboa.files import file_digest, python_problem
from megaboa.records import Filtered, FilterVersion

FUNCTION = "keep"
UNNAMED = "dropped"  # reason if the function gives none
SHOWN = 100  # number of characters shown of a record's text
REASONS, SAMPLES = 50, 3  # limits: number of distinct reasons, and records shown for each
FURTHER = "further reasons"


@dataclass(frozen=True)
class Dropped:
    """A record that the filter drops."""

    reason: str
    text: str  # the beginning of the text


@dataclass(frozen=True)
class Failed:
    """A record for which the filter gives no valid answer."""

    why: str


Judge = Callable[[dict[str, Any], str], Dropped | Failed | None]


class Tally:
    """Counts the records that a filter drops."""

    def __init__(self) -> None:
        self._reasons: dict[str, int] = {}
        self._samples: dict[str, list[str]] = {}

    def add(self, reason: str, count: int, samples: Callable[[], list[str]]) -> None:
        """Count dropped records. `samples` is only called while there are few."""
        told_apart = len(self._reasons) - (FURTHER in self._reasons)
        name = reason if reason in self._reasons or told_apart < REASONS else FURTHER
        self._reasons[name] = self._reasons.get(name, 0) + count
        shown = self._samples.setdefault(name, [])
        if len(shown) < SAMPLES:
            shown += samples()[: SAMPLES - len(shown)]

    def record(self) -> Filtered:
        return Filtered(records=sum(self._reasons.values()), reasons=self._reasons, samples=self._samples)


def together(parts: Iterable[Filtered | None]) -> Filtered | None:
    """The sum over all shards; None if there is no filter."""
    tally, found = Tally(), False
    for part in filter(None, parts):
        found = True
        for reason, count in part.reasons.items():
            tally.add(reason, count, functools.partial(part.samples.get, reason, []))
    return tally.record() if found else None


def problem(path: str) -> str | None:
    """A problem in a filter's source, as far as it shows without executing it; None if there is none."""
    file = Path(path).expanduser()
    if file.suffix != ".py":
        return f"{path!r} is not a Python file (.py)"
    if wrong := python_problem(path):
        return wrong
    code = ast.parse(file.read_bytes())
    named = {node.name for node in code.body if isinstance(node, ast.FunctionDef)}
    assigned = {
        name.id for node in code.body if isinstance(node, ast.Assign) for name in node.targets if hasattr(name, "id")
    }
    imported = {
        alias.asname or alias.name
        for node in code.body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    if FUNCTION not in named | assigned | imported:
        return f"{path} has no function {FUNCTION}(record), which returns True, False, or the reason to drop a record"
    return None


def version(path: str) -> FilterVersion:
    return FilterVersion(path=path, sha256=file_digest(path))


def load(wanted: FilterVersion, key: str) -> Judge:
    """The filter, if it is still the version that the corpus was started with."""
    path = Path(wanted.path)
    if not path.is_file() or file_digest(path) != wanted.sha256:
        gone = "was changed" if path.is_file() else "is gone"
        raise InputError(f"{key}: {path} {gone} after the corpus's files were listed: call again")
    spec = importlib.util.spec_from_file_location(f"filter_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up the names of annotations there
    try:
        spec.loader.exec_module(module)
        keep = getattr(module, FUNCTION)
    except Exception as error:  # the user's code may raise anything
        raise InputError(f"{key}: {path} can't be imported ({_said(error)})") from error

    def judge(record: dict[str, Any], text: str) -> Dropped | Failed | None:
        try:
            answer = keep(record)
            answer = answer.item() if hasattr(answer, "item") else answer  # a NumPy scalar
        except Exception as error:
            return Failed(f"{FUNCTION}() raised {_said(error)}")
        if answer is True:
            return None
        if answer is False or (isinstance(answer, str) and answer.strip()):
            return Dropped(" ".join(answer.split()) if answer else UNNAMED, " ".join(text[:SHOWN].split()))
        return Failed(f"{FUNCTION}() returned {answer!r}, and neither True, False, nor the reason to drop a record")

    return judge


def _said(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
