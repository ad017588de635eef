"""Downstream evaluation: runs the user's command on an exported model and reads the numbers of its JSON output.

The values depend on the export, on the command, and on the files that the command names, such as a script of the
user's.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
import reprlib
import shlex
import shutil
import subprocess
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megaboa import store
from megaboa.errors import InputError
from megaboa.files import SCRIPTS, file_digest, inside, write_text
from megaboa.formats import some_of
from megaboa.records import EvaluateSpec, Evaluation, ExportRecord

SHOWN_LINES = 5
MOST_VALUES = 1000
MOST_BYTES = 100_000_000  # larger files are data: every call of Snakemake would read them for their digest
# An edit of these while the command runs is a person's, and it isn't known which version made the values. What else
# changes meanwhile was written by the command, such as a log, a cache or a table of results.
EDITED_BY_PEOPLE = SCRIPTS - {".json"}
WRITTEN = "written"  # below an evaluation's folder in the store: names of files that the command wrote, one a line
_SHELL = re.compile(r"(?:.*/)?(?:python[\d.]*|bash|sh)")  # programs whose first word is a script
_BETWEEN_WORDS = re.compile(r"[\s'\"=;|&()<>`]+")
_PLACEHOLDERS = re.compile(r"\{(?:model|out)\}")
# A log that the command writes would be another one after every evaluation.
_OUTPUTS = re.compile(r"""(?:>+[|&]?|\btee\b(?:\s+-\S+)*)\s*(?:"[^"]*"|'[^']*'|[^\s;|&()<>"'])+""")


def named_in(command: str | None) -> list[str]:
    """The words of a command that may be paths of files which it reads, as they are written there.

    Unseen are paths relative to another folder (`cd x && python y.py`), and modules (`python -m my_eval`).
    """
    text = _OUTPUTS.sub(" ", command or "")
    words = shlex.shlex(text, posix=True, punctuation_chars=True)
    words.whitespace_split, words.commenters = True, ""
    try:
        split = list(words)
    except ValueError:  # an open quotation mark, such as that of a here-document
        split = [text]
    parts = (part for word in split for part in (word, word.partition("=")[2], *_BETWEEN_WORDS.split(word)))
    return list(dict.fromkeys(part for part in parts if part and not _PLACEHOLDERS.search(part)))


def script_of(command: str) -> str | None:
    """The script that a command starts (`python my_eval.py ...`), if it is named relative to the working folder."""
    try:
        program, *words = shlex.split(command)
    except ValueError:
        return None
    script = next((word for word in words if not word.startswith("-")), "") if _SHELL.fullmatch(program) else program
    is_plain = not _PLACEHOLDERS.search(script) and not set(script) & set("$*?~")
    return script if is_plain and Path(script).suffix in (".py", ".sh") and not Path(script).is_absolute() else None


def place(name: str) -> str:
    """The path that a word of a command means, in the form that Snakemake wants for inputs."""
    # bash sets PWD by itself; that of this process is where its caller was.
    path = re.sub(r"\$(?:PWD\b|\{PWD\})", lambda _: os.getcwd(), name)  # noqa: PTH109
    return os.path.normpath(os.path.expanduser(os.path.expandvars(path)))  # noqa: PTH111 (a word may be no path)


def files_of(command: str | None, results: Path) -> dict[str, str]:
    """The experiment's own files that a command names, with their SHA-256: those in the working folder, and scripts
    elsewhere, but no installed programs, and nothing below `results`, which other rules may make.

    This is the one rule for the plan, the record and the bundle.
    """
    found = {}
    for word in named_in(command):
        path = Path(place(word))
        if not os.path.isfile(path) or path.resolve().is_relative_to(results.resolve()):  # noqa: PTH113
            continue
        try:
            if (path.suffix in SCRIPTS or inside(path, Path())) and path.stat().st_size <= MOST_BYTES:
                found[word] = file_digest(path)
        except OSError as error:
            _warn_once(f"evaluate.command: {word} can't be read ({error.strerror}): its edits will evaluate nothing")
    return found


@functools.cache
def _warn_once(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr)


def may_be_written(name: str) -> bool:
    """Whether a command may have written this file that it names; other files only people edit."""
    return Path(name).suffix not in EDITED_BY_PEOPLE


def evaluate(spec: EvaluateSpec, export: ExportRecord, payloads: Path, experiment: Path) -> Evaluation:
    """Evaluate an export, or reuse an earlier result; returns the content of evaluation.json. `experiment`: the
    experiment's folder."""
    run, command, below = export.run, spec.command or "", experiment.parent
    first = files_of(command, below)
    # The plan knows what earlier calls of the command wrote. Plans of older versions name no files.
    used = {name: digest for name, digest in first.items() if name in spec.files or not spec.files}
    target = _folder(payloads, experiment, command, export, used)
    with store.building(target) as partial:
        if partial:
            _refuse_edited(used, files_of(command, below))  # while another job held the folder
            _call(command, export, partial / "out.json")
            numbers_in(partial)  # raises before an unreadable result is kept
            now = files_of(command, below)
            _refuse_edited(used, now)
            changed = sorted(name for name in {*first, *now} if now.get(name) != first.get(name))
            write_text(partial / WRITTEN, "".join(f"{name}\n" for name in changed if may_be_written(name)))
    written = _written(target)
    if left_out := used.keys() & written:
        _warn_once(
            f"evaluate.command: {', '.join(sorted(left_out))} changed during the evaluation, so the command writes "
            "there: its edits will evaluate nothing"
        )
        used = {name: digest for name, digest in used.items() if name not in written}
        target = _moved(target, _folder(payloads, experiment, command, export, used))
    found, notes = numbers_in(target)
    for note in notes:
        print(f"{run}: {note}", flush=True)
    return Evaluation(
        run=run,
        command=command,
        export=export.digest,
        iteration=export.iteration,
        path=str(target),
        files=used,
        written=written,
        values={name: value for name, value in found.items() if math.isfinite(value)},
        not_finite={name: str(value) for name, value in found.items() if not math.isfinite(value)},
    )


def _folder(payloads: Path, experiment: Path, command: str, export: ExportRecord, used: dict[str, str]) -> Path:
    identity = {"command": command, "export": export.digest} | ({"files": used} if used else {})
    return store.folder(payloads, "evaluations", f"{experiment.name}/{export.run}", identity)


def _refuse_edited(before: dict[str, str], now: dict[str, str]) -> None:
    """Raise InputError, so that nothing is kept, if a person edited a file: the values may be of either version."""
    edited = [name for name, digest in before.items() if now.get(name) != digest and not may_be_written(name)]
    if edited:
        raise InputError(
            f"evaluate.command: {', '.join(edited)} changed during the evaluation, so it isn't known which version "
            "made the values. Nothing of it was kept; call Snakemake again"
        )


def _written(target: Path) -> tuple[str, ...]:
    path = target / WRITTEN  # missing in evaluations of older versions
    return tuple(path.read_text(encoding="utf-8").splitlines()) if path.exists() else ()


def _moved(folder: Path, final: Path) -> Path:
    """Move an evaluation to where the next call looks for it: that one will know what the command writes."""
    with store.building(final) as partial:
        for path in sorted(folder.iterdir()) if partial else ():
            path.replace(partial / path.name)
    shutil.rmtree(folder, ignore_errors=True)
    return final


def _call(command: str, export: ExportRecord, out: Path) -> None:
    """Run the command, with the run and its step in its environment; its output goes to the log as it is printed."""
    run = export.run
    filled = command.replace("{model}", shlex.quote(export.path)).replace("{out}", shlex.quote(str(out)))
    print(f"{run}: {filled}", flush=True)
    last: list[str] = []
    with subprocess.Popen(
        ["bash", "-c", filled],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "MEGABOA_RUN": run, "MEGABOA_STEP": str(export.iteration)},
    ) as process:
        for line in process.stdout:
            text = line.decode(errors="replace")
            print(text, end="", flush=True)
            last = [*last, text.strip()][-SHOWN_LINES:]
    if process.returncode:
        said = f": {' | '.join(filter(None, last))}" if any(last) else ""
        raise InputError(
            f"evaluate.command: run {run}: ended with {process.returncode}{said}. Nothing of it was kept; "
            f"fix it and call Snakemake again"
        )


class Found(NamedTuple):
    """The numbers of a JSON file by their names, and sentences on what their names don't tell."""

    numbers: dict[str, float]
    notes: list[str]


def numbers_in(folder: Path) -> Found:
    """All numbers of the only JSON file in the folder, by their keys joined with dots, NaN and infinities among them.

    If the document has a mapping `results` (lm-evaluation-harness), only the numbers in it.
    """
    written = sorted(folder.rglob("*.json"))
    written = [path for path in written if path.is_file()]
    if len(written) != 1:
        names = ", ".join(str(path.relative_to(folder)) for path in written[:5]) or "none"
        raise InputError(f"evaluate.command: must write one JSON file to {{out}}, or below it; it wrote {names}")
    try:
        document = json.loads(written[0].read_text(encoding="utf-8"), object_pairs_hook=_distinct)
    except ValueError as error:
        raise InputError(f"evaluate.command: {written[0].name}: isn't JSON: {error}") from None
    if isinstance(document, dict) and isinstance(document.get("results"), dict):
        document = document["results"]
    found = _collected(document)
    if not found.numbers or len(found.numbers) > MOST_VALUES:
        said = "" if found.numbers else "".join(f" ({note})" for note in found.notes)
        raise InputError(
            f"evaluate.command: {written[0].name}: has {len(found.numbers)} numbers, and 1 to {MOST_VALUES} are "
            f"wanted: write a mapping from names to numbers{said}"
        )
    return found


def _collected(document: Any) -> Found:
    numbers, others, renamed = dict[str, float](), [], []
    for name, value in _flat(document):
        if isinstance(value, int | float) and not isinstance(value, bool):
            shown = _free(name, numbers)
            numbers[shown] = _float(value)
            renamed += [f"{name} is {shown}"] if shown != name else []
        else:
            others.append(f"{name} ({reprlib.repr(value) if isinstance(value, str) else json.dumps(value)})")
    notes = {"left out, as they are no numbers": others, "numbers of one name are kept apart": renamed}
    return Found(numbers, [f"{said}: {some_of(names, SHOWN_LINES)}" for said, names in notes.items() if names])


def _distinct(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON, which may have a key twice."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        found[_free(key, found)] = value
    return found


def _free(name: str, taken: Collection[str]) -> str:
    """A name for a number; `a.b (2)` where another is called so, such as of the keys `a` and `b` next to `a.b`."""
    number = 1
    while (shown := f"{name} ({number})" if number > 1 else name) in taken:
        number += 1
    return shown


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The values of a document, with their keys joined with dots."""
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _flat(item, f"{name}.{key}" if name else str(key))
    else:
        yield name or "value", value


def _float(value: float) -> float:
    try:
        float(value)
    except OverflowError:  # JSON's integers have no limit
        return math.inf if value > 0 else -math.inf
    return value
