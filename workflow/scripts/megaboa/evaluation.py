"""Downstream evaluation: runs the user's command on an exported model and reads the numbers of its JSON output.

The values depend on the export, on the command, and on the files that the command names, such as a script of the
user's.
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from megaboa import store
from megaboa.errors import InputError
from megaboa.files import SCRIPTS, file_digest, inside
from megaboa.records import Evaluation, ExportRecord

SHOWN_LINES = 5
MOST_VALUES = 1000
MOST_BYTES = 100_000_000  # larger files are data: every call of Snakemake would read them for their digest
_BETWEEN_WORDS = re.compile(r"[\s'\"=;|&()<>`]+")
# A log that the command writes would be another one after every evaluation.
_WRITTEN = re.compile(r"(?:>+[|&]?|\btee\b(?:\s+-\S+)*)\s*[^\s;|&()<>]+")


def named_in(command: str | None) -> list[str]:
    """The words of a command that may be paths of files which it reads."""
    words = _BETWEEN_WORDS.split(_WRITTEN.sub(" ", command or ""))
    return list(dict.fromkeys(word for word in words if word and "{" not in word))


def files_of(command: str | None) -> dict[str, str]:
    """The experiment's own files that a command names, with their SHA-256: those in the working folder, and scripts
    elsewhere, but no installed programs."""
    found = {}
    for word in named_in(command):
        path = Path(os.path.expanduser(word))  # noqa: PTH111 (any word of a command: `~nobody`, a thousand letters)
        if not os.path.isfile(path):  # noqa: PTH113
            continue
        if (path.suffix in SCRIPTS or inside(path, Path())) and path.stat().st_size <= MOST_BYTES:
            found[word] = file_digest(path)
    return found


def evaluate(command: str, export: ExportRecord, payloads: Path, experiment: str) -> Evaluation:
    """Evaluate an export, or reuse an earlier result; returns the content of evaluation.json."""
    run = export.run
    used = files_of(command)
    identity = {"command": command, "export": export.digest} | ({"files": used} if used else {})
    target = store.folder(payloads, "evaluations", f"{experiment}/{run}", identity)
    with store.building(target) as partial:
        if partial:
            _call(command, Path(export.path), partial / "out.json", run)
            numbers(partial)  # raises before an unreadable result is kept
    if changed := [name for name, digest in files_of(command).items() if used.get(name) != digest]:
        print(f"warning: {', '.join(changed)} changed during the evaluation: the next call will evaluate again")
    return Evaluation(
        run=run,
        command=command,
        export=export.digest,
        iteration=export.iteration,
        path=str(target),
        files=used,
        values=numbers(target),
    )


def _call(command: str, model: Path, out: Path, run: str) -> None:
    """Run the command; its output goes to the log as it is printed."""
    filled = command.replace("{model}", shlex.quote(str(model))).replace("{out}", shlex.quote(str(out)))
    print(f"{run}: {filled}", flush=True)
    last: list[str] = []
    with subprocess.Popen(
        ["bash", "-c", filled], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        for line in process.stdout:
            text = line.decode(errors="replace")
            sys.stdout.write(text)
            last = [*last, text.strip()][-SHOWN_LINES:]
    if process.returncode:
        said = f": {' | '.join(filter(None, last))}" if any(last) else ""
        raise InputError(
            f"evaluate.command: run {run}: ended with {process.returncode}{said}. Nothing of it was kept; "
            f"fix it and call Snakemake again"
        )


def numbers(folder: Path) -> dict[str, float]:
    """All numbers of the only JSON file in the folder, by their keys joined with dots.

    If the document has a mapping `results` (lm-evaluation-harness), only the numbers in it.
    """
    written = sorted(folder.rglob("*.json"))
    written = [path for path in written if path.is_file()]
    if len(written) != 1:
        names = ", ".join(str(path.relative_to(folder)) for path in written[:5]) or "none"
        raise InputError(f"evaluate.command: must write one JSON file to {{out}}, or below it; it wrote {names}")
    try:
        document = json.loads(written[0].read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"evaluate.command: {written[0].name}: isn't JSON: {error}") from None
    if isinstance(document, dict) and isinstance(document.get("results"), dict):
        document = document["results"]
    found = _flat(document)
    if not found or len(found) > MOST_VALUES:
        raise InputError(
            f"evaluate.command: {written[0].name}: has {len(found)} numbers, and 1 to {MOST_VALUES} are wanted: write "
            "a mapping from names to numbers"
        )
    return found


def _flat(value: Any, name: str = "") -> dict[str, float]:
    if isinstance(value, dict):
        return {k: v for key, item in value.items() for k, v in _flat(item, f"{name}.{key}" if name else key).items()}
    if isinstance(value, list):
        return {k: v for key, item in enumerate(value) for k, v in _flat(item, f"{name}.{key}").items()}
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return {name or "value": value} if is_number else {}
