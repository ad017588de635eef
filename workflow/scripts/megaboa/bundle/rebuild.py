"""Make again what is in a bundle, with the code that is in it, in folders of its own."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megaboa.bundle import archive
from megaboa.bundle.compare import Compared, compare
from megaboa.data.errors import InputError
from megaboa.files import write_text

Files = dict[str, bytes]

OF_REPORT = ("*/report/data/*.tsv", "*/report/checks.json", "*/report/*.svg")
OF_RUN = (
    *("*/runs/*/run.json", "*/runs/*/train.json", "*/runs/*/metrics/steps.parquet", "*/runs/*/export.json"),
    *("*/models/*/source.json", "*/models/*/import.json", "*/tokenizers/*.json", "*/report/data/*.tsv"),
)
CHECKS = "*/report/checks.json"
MARKER = ".megaboa-reproduced"


def claim(folder: Path) -> None:
    """Mark a new or empty folder as one to work in: only what is below a marked one is ever removed."""
    marker = folder / MARKER
    if marker.is_file():
        return
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise InputError(
            f"--into {folder}: is there already, and no folder of `make reproduce` (it has no {MARKER}): nothing in it "
            f"was touched. Name one that is new or empty"
        )
    write_text(marker, "Made by `make reproduce`, and written over by its next call.\n")


def report_again(files: Files, manifest: Mapping[str, Any], folder: Path) -> list[Compared]:
    """The report's figures and their data, from the metrics of the bundle."""
    results = f"results/{manifest['experiment']}"
    if folder.exists():
        shutil.rmtree(folder)
    archive.write({name: content for name, content in files.items() if f"{results}/report/" not in name}, folder)
    command = ["workflow/scripts/report.py", "--settings", f"{results}/specs/report.json"]
    command += ["--captions", "workflow/report/captions.yaml", "--out", f"{results}/report/index.html"]
    _python([*command, "--config-file", *manifest["config"]], folder, "the report could not be made again")
    return compare(files, _below(folder, f"{results}/report"), OF_REPORT)


def run_again(files: Files, manifest: Mapping[str, Any], folder: Path) -> list[Compared]:
    """The whole experiment. What an earlier call left is gone on with."""
    experiment = manifest["experiment"]
    archive.write({name: content for name, content in files.items() if not name.startswith("results/")}, folder)
    command = ["-m", "snakemake", "--profile", "profiles/local", "--configfile", *manifest["config"]]
    _python(command, folder, f"the experiment did not run to its end; its results so far are in {folder}")
    corpora = [f"*/data/{name}" for name in _corpora(files, experiment)]
    found = _below(folder, f"results/{experiment}")
    return compare(files, found, [*OF_RUN, CHECKS, *corpora])


def is_on_cpu(manifest: Mapping[str, Any]) -> bool:
    return manifest["device"] == ["cpu"]


def _corpora(files: Files, experiment: str) -> list[str]:
    """The corpora's own manifests, without lists of sources and shards."""
    folder = f"results/{experiment}/specs/corpora/"
    return [name.removeprefix(folder) for name in files if name.startswith(folder)]


def _python(arguments: list[str], folder: Path, failure: str) -> None:
    done = subprocess.run([sys.executable, *arguments], cwd=folder, stdout=sys.stderr)
    if done.returncode:
        raise InputError(f"{failure}: `python {' '.join(arguments)}` ended with {done.returncode}")


def _below(folder: Path, part: str) -> Files:
    paths = [path for path in (folder / part).rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
