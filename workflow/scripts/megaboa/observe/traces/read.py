"""Reads every capture of a folder, of any tool. Unreadable ones become findings, not exceptions."""

from __future__ import annotations

import re
import shutil
import sqlite3
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from megaboa.observe.traces import kineto, nsys
from megaboa.observe.traces.captures import Capture, Finding
from megaboa.observe.traces.kineto import TornError
from megaboa.observe.traces.sqlite_file import torn

SUFFIXES = (".nsys-rep", ".sqlite", ".json", ".json.gz")
RANK_IN_NAME = re.compile(r"rank[-_]?(\d+)")


def find(paths: Iterable[Path]) -> list[Path]:
    """The captures among files and in folders. An `.nsys-rep` with an exported `.sqlite` next to it is skipped."""
    found = []
    for path in paths:
        inside = sorted(path.iterdir()) if path.is_dir() else [path]
        found += [file for file in inside if file.name.endswith(SUFFIXES) and not file.name.startswith(".")]
    exported = {file.with_suffix("") for file in found if file.suffix == ".sqlite"}
    return [file for file in found if not (file.suffix == ".nsys-rep" and file.with_suffix("") in exported)]


def read_all(paths: Iterable[Path]) -> tuple[list[Capture], list[Finding]]:
    """Read captures, sorted by rank, and findings about unreadable ones."""
    captures, findings = [], []
    for path in find(paths):
        found, problems = read(path)
        captures += found
        findings += [finding for capture in found for finding in capture.findings] + problems
    if not captures and not findings:
        where = ", ".join(map(str, paths)) or "no path"
        findings.append(Finding("no_captures", "error", "profile", f"no capture in {where} ({' '.join(SUFFIXES)})"))
    captures, about_ranks = ranked(captures)
    return captures, findings + about_ranks


def read(path: Path) -> tuple[list[Capture], list[Finding]]:
    try:
        if not path.stat().st_size:
            return _unusable("empty", path, "the file is empty: the profiler wrote nothing into it")
        if path.suffix == ".nsys-rep":
            return _exported(path)
        if path.suffix == ".sqlite":
            return _sqlite(path)
        capture = kineto.read(path)
    except (TornError, OSError) as error:
        return _unusable("truncated", path, f"it can't be read: {error}")
    return _with_rows(path, [capture])


def _unusable(code: str, path: Path, text: str) -> tuple[list[Capture], list[Finding]]:
    return [], [Finding(code, "error", path.name, text)]


def _sqlite(path: Path) -> tuple[list[Capture], list[Finding]]:
    if problem := torn(path):
        return _unusable("truncated", path, problem)
    try:
        return _with_rows(path, nsys.read(path))
    except sqlite3.DatabaseError as error:
        return _unusable("truncated", path, f"it can't be read: {error}")
    except (TypeError, ValueError, OverflowError) as error:
        return _unusable("malformed", path, f"a column holds what is none of its kind: {error}")


def _exported(path: Path) -> tuple[list[Capture], list[Finding]]:
    program = shutil.which("nsys")
    if program is None:
        text = "reading it takes Nsight Systems, and there is no `nsys` here: export it where it was captured"
        return _unusable("no_nsys", path, f"{text} (nsys export --type sqlite {path.name})")
    with _export_folder() as folder:
        target = folder / f"{path.stem}.sqlite"
        command = [program, "export", "--type", "sqlite", "--quiet", "true", "-o", str(target), str(path)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode or not target.exists():
            last = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["it said nothing"]
            return _unusable("truncated", path, f"nsys export failed: {last[0]}")
        captures, problems = _sqlite(target)
        return [replace(capture, path=path) for capture in captures], problems


@contextmanager
def _export_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="nsys-export-") as folder:
        yield Path(folder)


def _with_rows(path: Path, captures: list[Capture]) -> tuple[list[Capture], list[Finding]]:
    if any(len(capture.kernels) or len(capture.ranges) or len(capture.operators) for capture in captures):
        return captures, []
    text = "it has neither kernels nor ranges: nothing ran while it was captured, or the capture range never began"
    return _unusable("empty", path, text)


def ranked(captures: list[Capture]) -> tuple[list[Capture], list[Finding]]:
    """Captures in the order of their ranks. The rank is that in the capture, else in its name (`rank-3`), else its
    index."""
    placed, findings = [], []
    for index, capture in enumerate(captures):
        in_name = None if capture.owner else RANK_IN_NAME.search(capture.path.name)
        named = int(in_name.group(1)) if in_name else None
        if capture.rank is not None and named is not None and named != capture.rank:
            text = f"its name says rank {named}, what is in it says rank {capture.rank}: the latter is used"
            findings.append(Finding("rank_of_name", "warning", capture.path.name, text))
        rank = capture.rank if capture.rank is not None else named
        if rank is None:
            rank = index
            findings.append(_unknown_rank(capture, rank))
        placed.append(replace(capture, rank=rank))
    placed.sort(key=lambda capture: capture.rank)
    return one_session(placed, findings)


def _unknown_rank(capture: Capture, rank: int) -> Finding:
    if capture.owner:
        text = f"several processes or devices share this capture: {capture.owner} is called rank {rank}"
        return Finding("several_devices", "warning", capture.path.name, text)
    text = f"neither the capture nor its name says which rank it is: called {rank}, by its place"
    return Finding("rank_unknown", "warning", capture.path.name, text)


def one_session(captures: list[Capture], findings: list[Finding]) -> tuple[list[Capture], list[Finding]]:
    """Keep the newest of several captures of one rank, which come from different sessions."""
    newest: dict[int, Capture] = {}
    for capture in captures:
        other = newest.get(capture.rank)
        newest[capture.rank] = capture if other is None or _age(capture) >= _age(other) else other
    for rank in newest:
        several = [capture.path.name for capture in captures if capture.rank == rank]
        if len(several) > 1:
            kept = newest[rank].path.name
            text = f"{len(several)} captures of rank {rank} ({', '.join(several)}): two sessions; the newest is {kept}"
            findings.append(Finding("two_sessions", "warning", f"rank {rank}", text))
    sessions = sorted({capture.session for capture in newest.values() if capture.session})
    if len(sessions) > 1:
        text = f"the captures come from {len(sessions)} sessions (jobs {', '.join(sessions)}): ranks are not comparable"
        findings.append(Finding("two_sessions", "warning", "profile", text))
    return list(newest.values()), findings


def _age(capture: Capture) -> int:
    """The begin of a capture. The times of PyTorch's captures count from a moment far in the past."""
    begun = capture.kernels if len(capture.kernels) else capture.ranges
    return (capture.epoch or 0) + (int(begun.start[0]) if len(begun) and capture.kind == "pytorch" else 0)
