"""Downstream evaluation: runs the user's command on an exported model and reads the numbers of its JSON output."""

from __future__ import annotations

import json
import math
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from megaboa import store
from megaboa.errors import InputError
from megaboa.records import Evaluation, ExportRecord

SHOWN_LINES = 5
MOST_VALUES = 1000


def evaluate(command: str, export: ExportRecord, payloads: Path, experiment: str) -> Evaluation:
    """Evaluate an export, or reuse an earlier result; returns the content of evaluation.json."""
    run = export.run
    identity = {"command": command, "export": export.digest}
    target = store.folder(payloads, "evaluations", f"{experiment}/{run}", identity)
    with store.building(target) as partial:
        if partial:
            _call(command, Path(export.path), partial / "out.json", run)
            numbers(partial)  # raises before an unreadable result is kept
    return Evaluation(
        run=run,
        command=command,
        export=export.digest,
        iteration=export.iteration,
        path=str(target),
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
