"""Make again what is in a bundle, with the code that is in it, in folders of its own."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megaboa.bundle.archive import Archive
from megaboa.bundle.compare import Compared, compare
from megaboa.bundle.contents import MANIFEST
from megaboa.bundle.crate import METADATA, checksums
from megaboa.errors import InputError
from megaboa.files import write_text
from megaboa.paths import ExperimentFolder
from megaboa.secrets import has_credentials, is_secret_name

Files = dict[str, bytes]

OF_REPORT = ("*/report/data/*.tsv", "*/report/checks.json", "*/report/*.svg")
OF_RUN = (
    *("*/runs/*/run.json", "*/runs/*/train.json", "*/runs/*/metrics/steps.parquet", "*/runs/*/export.json"),
    *("*/models/*/source.json", "*/models/*/import.json", "*/tokenizers/*.json", "*/report/data/*.tsv"),
)
CHECKS = "*/report/checks.json"
MARKER = ".megaboa-reproduced"


def opened(path: Path) -> tuple[Archive, dict[str, Any]]:
    """A bundle whose files are those that its metadata describes, and what it says about itself."""
    files = Archive(path)
    if missing := [name for name in (MANIFEST, METADATA) if name not in files]:
        raise InputError(f"{path}: is no bundle of this project, as it has no {missing[0]}")
    try:
        sums, manifest = checksums(files[METADATA]), json.loads(files[MANIFEST])
        manifest["experiment"], manifest["config"], manifest["device"], manifest["environment"]["packages"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path}: its {METADATA} or {MANIFEST} can't be read ({error!r}): not used") from None
    for name in sorted({*sums, *files} - {METADATA}):
        if name not in files or sums.get(name) != files.digest(name):
            raise InputError(f"{path}: {name} is not what {METADATA} says that it is: it was changed, and is not used")
    return files, manifest


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


def report_again(files: Archive, manifest: Mapping[str, Any], folder: Path) -> list[Compared]:
    """The report's figures and their data, from the metrics of the bundle."""
    results = f"results/{manifest['experiment']}"
    if folder.exists():
        shutil.rmtree(folder)
    files.unpack((name for name in files if f"{results}/report/" not in name), folder)
    command = ["workflow/scripts/report.py", "--settings", f"{results}/specs/report.json"]
    command += ["--captions", "workflow/report/captions.yaml", "--out", f"{results}/report/index.html"]
    _python([*command, "--config-file", *manifest["config"]], folder, "the report could not be made again")
    return compare(files, _below(folder, f"{results}/report"), OF_REPORT)


def run_again(files: Archive, manifest: Mapping[str, Any], folder: Path) -> list[Compared]:
    """The whole experiment. What an earlier call left is gone on with."""
    experiment = manifest["experiment"]
    files.unpack((name for name in files if not name.startswith("results/")), folder)
    command = ["-m", "snakemake", "--profile", "profiles/local", "--configfile", *manifest["config"]]
    try:
        _python(command, folder, f"the experiment did not run to its end; its results so far are in {folder}")
    except InputError:
        # A report that says FAIL ends the call with an error too, as it did where the bundle was made.
        if not (ExperimentFolder(folder / "results" / experiment).checks).exists():
            raise
    corpora = [f"*/data/{name}" for name in _corpora(files, experiment)]
    found = _below(folder, f"results/{experiment}")
    return compare(files, found, [*OF_RUN, CHECKS, *corpora])


def is_on_cpu(manifest: Mapping[str, Any]) -> bool:
    return manifest["device"] == ["cpu"]


def _corpora(files: Archive, experiment: str) -> list[str]:
    """The corpora's own manifests, without lists of sources and shards."""
    folder = f"results/{experiment}/specs/corpora/"
    return [name.removeprefix(folder) for name in files if name.startswith(folder)]


def other_packages(manifest: Mapping[str, Any]) -> list[str]:
    """Packages that the bundle was made with, and that have another version here, or none."""
    here = {_name(package.name): package.version for package in importlib.metadata.distributions() if package.name}
    made_with = {_name(name): version for name, version in manifest["environment"]["packages"].items()}.items()
    return [
        f"{name}: {version} in the bundle, {here.get(name, 'none')} here"
        for name, version in sorted(made_with)
        if here.get(name) != version
    ]


def _name(package: str) -> str:
    return package.lower().replace("_", "-")


def without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """Code of somebody else's needs none; not by length as in `secrets_in`, as a short password is one too."""
    return {
        name: value for name, value in environment.items() if not is_secret_name(name) and not has_credentials(value)
    }


def _python(arguments: list[str], folder: Path, failure: str) -> None:
    environment = without_secrets(os.environ)
    done = subprocess.run([sys.executable, *arguments], cwd=folder, stdout=sys.stderr, env=environment)
    if done.returncode:
        raise InputError(f"{failure}: `python {' '.join(arguments)}` ended with {done.returncode}")


def _below(folder: Path, part: str) -> Files:
    paths = [path for path in (folder / part).rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
