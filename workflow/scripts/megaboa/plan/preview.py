"""A plan that is only looked at (`snakemake -n`), written where no job reads it.

Snakemake says which jobs would run by comparing files. So those that would change are written to a folder of their own,
and take the place of the experiment's in that dry run.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from megaboa import files
from megaboa.plan.model import Plan
from megaboa.plan.shared import Shared

FOLDER = "preview"


def write(plan: Plan, shared: Shared) -> dict[str, str]:
    """Write the files of the plan that differ from the experiment's; return these, with what stands for each."""
    results, preview = shared.folder, shared.folder / FOLDER
    shutil.rmtree(preview, ignore_errors=True)  # all is newer than any result, or isn't there
    found = {}
    for name, text in (*plan.texts(), *shared.texts()):
        path = results / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            files.write_bytes(preview / name, text.encode(), durable=False)
            found[str(path)] = str(preview / name)
    return found


def remove(results: Path) -> None:
    """What was looked at is old as soon as something is done."""
    shutil.rmtree(results / FOLDER, ignore_errors=True)
