"""Megatron-Bridge from a commit, to be mounted over the image's own."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from megaboa import store
from megaboa.data.errors import InputError
from megaboa.image import tools

PACKAGE = Path("src/megatron/bridge/__init__.py")


def folder(root: str, source: dict[str, Any]) -> Path:
    """Where the checkout lies: known before it is made."""
    identity = {"repo": source["repo"], "commit": source["commit"]}
    return store.folder(root, "sources", "megatron-bridge", identity)


def check_out(root: str, source: dict[str, Any]) -> Path:
    """The commit's files, once for all experiments."""
    tools.require("git", "install it")
    final = folder(root, source)
    with store.building(final) as partial:
        if partial:
            _clone(source["repo"], source["commit"], partial)
    return final


def _clone(repository: str, commit: str, target: Path) -> None:
    where = f"image.bridge_source: {repository}"
    _git(["clone", "--quiet", "--no-checkout", repository, str(target)], f"{where}: can't be cloned")
    try:
        _git(["-C", str(target), "checkout", "--quiet", "--detach", commit], where)
    except InputError:
        raise InputError(f"{where} has no commit {commit}: check both, or push the commit there") from None
    _git(["-C", str(target), "submodule", "--quiet", "update", "--init", "--recursive"], f"{where}: its submodules")
    if not (target / PACKAGE).is_file():
        raise InputError(f"{where} at {commit} has no {PACKAGE}: it is no checkout of Megatron-Bridge")


def _git(arguments: list[str], what: str) -> None:
    done = subprocess.run(["git", *arguments], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        raise InputError(f"{what}: {said[-1].strip() if said else f'git ended with {done.returncode}'}")
