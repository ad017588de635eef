"""Megatron-Bridge at a certain commit, to be mounted over the image's own."""

from __future__ import annotations

import os
from pathlib import Path

from megaboa import store
from megaboa.errors import InputError
from megaboa.image import tools
from megaboa.records import BridgeSource

PACKAGE = Path("src/megatron/bridge/__init__.py")


def folder(root: str, source: BridgeSource) -> Path:
    """The folder of the checkout, known before it is made."""
    identity = {"repo": source.repo, "commit": source.commit}
    return store.folder(root, "sources", "megatron-bridge", identity)


def check_out(root: str, source: BridgeSource) -> Path:
    """Check out the commit's files, once for all experiments."""
    tools.require("git", "install it")
    final = folder(root, source)
    with store.building(final) as partial:
        if partial:
            _clone(source.repo, source.commit, partial)
    return final


def _clone(repository: str, commit: str, target: Path) -> None:
    where = f"image.bridge_source: {repository}"
    clone = ["clone", "--quiet", "--no-checkout", "--", repository, str(target)]
    _git(clone, f"image.bridge_source: cloning {repository}")
    try:
        _git(["-C", str(target), "checkout", "--quiet", "--detach", commit], where)
    except InputError:
        raise InputError(f"{where} has no commit {commit}: check both, or push the commit there") from None
    update = ["-C", str(target), "submodule", "--quiet", "update", "--init", "--recursive"]
    _git(update, f"{where}: getting its submodules")
    if not (target / PACKAGE).is_file():
        raise InputError(f"{where} at {commit} has no {PACKAGE}: it is not a checkout of Megatron-Bridge")


def _git(arguments: list[str], what: str) -> None:
    """Run git without a password prompt, because a job has no terminal."""
    environment = {**os.environ, "GIT_TERMINAL_PROMPT": "0"}
    tools.call(["git", *arguments], what, environment=environment, explain=lambda said, _: None)
