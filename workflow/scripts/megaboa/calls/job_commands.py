"""Shell commands of rules whose words depend on the plan."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from megaboa.plan.shared import Shared


def report_command(scripts: str, captions: str, results: str, config_files: Sequence[str | Path], command: str) -> str:
    """The shell command that makes the report; configuration and command are shown in it."""
    words = [f"{scripts}/megaboa", "report", "--settings", f"{results}/specs/report.json", "--captions", captions]
    words += ["--config-file", *map(os.path.relpath, config_files), "--command", command]
    return shlex.join(["python", *words, "--out", f"{results}/report/index.html"])


def conversion_commands(scripts: str, shared: Shared) -> tuple[str, str, str]:
    """The shell words that start a model conversion: Python, the image option, and the starter for several ranks.

    The number of ranks is in specs/conversions, which is not an input, because it changes no weight.
    """
    results, scripts = shared.folder, shlex.quote(scripts)
    conversion = f"python {scripts}/convert.py --spec {results}/specs/conversions/{{model}}.json"
    if not shared.image_manifest:
        return "python", "", f"{conversion} "
    image, inside = f"{results}/image.json", f"{results}/specs/inside.json"
    python = f"python {scripts}/inside.py {inside} {image}"
    return python, f"--image {image}", f"{conversion} --image {image} --inside {inside}"


def export_command(shared: Shared, python: str, convert: str, run: str, kind: str) -> str:
    """The command that converts a run: `python`, or the starter for as many ranks as its model's conversion uses."""
    model = shared.runs[run].model
    if shared.plan.models[model].conversion.ranks == 1:
        return python
    return f"{convert.format(model=model)} --logs {shared.folder}/logs/export/{run}.{kind}.ranks"
