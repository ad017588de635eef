"""The baseline of a report: metrics of earlier runs, copied from results folders and bundles.

The copies stay with the results and become part of the bundle, so that a report can be made again after the earlier
runs are gone.
"""

from __future__ import annotations

import fnmatch
import shutil
from pathlib import Path

from megaboa.bundle.rebuild import opened
from megaboa.errors import InputError
from megaboa.files import write_bytes, write_json
from megaboa.paths import ExperimentFolder
from megaboa.records import ReportSpec, read

# In results/<experiment>: files for a run's curve, speed and memory, and its specification.
KEPT = ("plan.tsv", "preflight.json", "runs/*/run.json", "runs/*/launch.json", "runs/*/metrics/*")


def keep(results: Path) -> None:
    """Update the copies for an experiment's report, from those sources that still exist."""
    folder = ExperimentFolder(results)
    asked = read(ReportSpec, folder.specs.report).baseline
    baselines = folder.baselines_of(asked.paths if asked else ())
    for one in baselines:
        if one.path.exists():
            take(one.path, one.copy)
            write_json(one.source, {"path": str(one.path)})
        elif not one.is_copied:
            raise InputError(f"report.baseline.path: {one.path}: there is neither a results folder nor a bundle")
    for old in set(folder.copied_baselines) - {one.copy for one in baselines}:
        shutil.rmtree(old)


def take(source: Path, copy: Path) -> None:
    """Copy the metrics of a results folder or a bundle."""
    if copy.exists():
        shutil.rmtree(copy)
    if source.is_dir():
        for path in (path for pattern in KEPT for path in source.glob(pattern) if path.is_file()):
            write_bytes(copy / path.relative_to(source), path.read_bytes())
        return
    files, manifest = opened(source)
    results = f"results/{manifest.experiment}/"
    for pattern in KEPT:
        for name in fnmatch.filter(files, f"{results}{pattern}"):
            write_bytes(copy / name.removeprefix(results), files[name])
