"""The origin of a report: versions, commit, configuration."""

from __future__ import annotations

import importlib.metadata
import subprocess
from pathlib import Path
from typing import Any

from megaboa.config.notify import in_command, in_yaml
from megaboa.files import canonical
from megaboa.paths import ExperimentFolder
from megaboa.records import Image, plain, read_if_there
from megaboa.run import submitted

PACKAGES = ("torch", "megatron-core", "megatron-bridge", "transformers")


def provenance(results: Path, config_files: list[Path], command: str) -> dict[str, Any]:
    return {
        "versions": versions(ExperimentFolder(results).image),
        "image_test": image_test(ExperimentFolder(results).image),
        "commit": commit(),
        "command": in_command(command),
        "config": _configuration(results, config_files),
    }


def _configuration(results: Path, config_files: list[Path]) -> list[dict[str, str]]:
    """The files' text as the call read it, as they may have been edited while it trained; without `recovery.notify`."""
    copies = submitted.copies_here(results)
    read = copies if [path.name for path in copies] == [path.name for path in config_files] else config_files
    return [
        {"path": str(path), "text": in_yaml(copy.read_text(encoding="utf-8"))}
        for path, copy in zip(config_files, read, strict=True)
    ]


def image_test(image: Path) -> str | None:
    """The test results from inside the image; None if ranks run without an image."""
    made = read_if_there(Image, image)
    return canonical(plain(made.contract)) if made and made.contract else None


def versions(image: Path) -> dict[str, str]:
    """Versions of the training's packages, from the image's manifest, and of Snakemake here."""
    found = {}
    if made := read_if_there(Image, image):
        packages = {name.lower().replace("_", "-"): value for name, value in made.packages.items()}
        found = {"runtime": made.runtime, "image": made.digest, "python": made.python}
        found |= {name: packages.get(name) for name in PACKAGES}
        found |= {"image file": made.path, "image test": made.contract and made.contract.state}
        found |= {"Bridge's commit": made.bridge_source and made.bridge_source.commit}
    try:
        found["snakemake"] = importlib.metadata.version("snakemake")
    except importlib.metadata.PackageNotFoundError:
        found["snakemake"] = None
    return {name: str(value) for name, value in found.items() if value}


def commit() -> str | None:
    """The commit of the present folder, and whether files differ from it; None outside of git."""
    head = _git("rev-parse", "HEAD")
    if not head:
        return None
    return f"{head} with local changes" if _git("status", "--porcelain", "--untracked-files=no") else head


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=True)
    except (FileNotFoundError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
