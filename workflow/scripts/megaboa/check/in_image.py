"""Inside the image: what preflight had to leave open outside of it, judged by the packages that are there.

A package that the run uses and the image lacks, or has in too old a version, is a reason to refuse the run. What hangs
on the GPU itself stays open.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from collections.abc import Mapping

from megaboa.check import image
from megaboa.check.facts import Facts

Packages = Mapping[str, str | None]  # the version of what is installed, None for what isn't

DISTRIBUTIONS = {"transformer_engine": "transformer-engine", "deep_ep": "deep-ep", "mamba_ssm": "mamba-ssm"}
UNKNOWN = "of an unknown version"
# The package that brings the kernels which a rule is about; None: whether they take the run, only a GPU can say.
NEEDS = {
    "low_precision_has_kernels": "transformer_engine",
    "dispatcher_is_installed": "deep_ep",
    "graphs_can_be_captured": "transformer_engine",
    "prediction_layers_are_there": "transformer_engine",
    "tensor_overlap_has_buffers": "transformer_engine",
    "attention_takes_the_head": None,
}
# Of the package itself: a sentence may name versions of CUDA, or of a GPU's architecture.
_VERSION = re.compile(r"(?:transformer[ _-]?engine|\bTE\b|mamba[_-]?ssm)\D{0,20}?(\d+(?:\.\d+)+)", re.IGNORECASE)
# What a node without a network says of a model that it can't fetch: nothing of the run or the image.
_HUB = re.compile(r"couldn't connect|LocalEntryNotFound|OfflineMode|offline mode", re.IGNORECASE)


def installed() -> dict[str, str | None]:
    """To be asked before the CPU backend hides the kernels of GPUs. Nothing is imported: that may need a GPU."""
    return {module: _version(module, name) for module, name in DISTRIBUTIONS.items()}


def _version(module: str, distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return UNKNOWN if importlib.util.find_spec(module) else None


def judge(f: Facts, has: Packages) -> tuple[list[str], list[str]]:
    """What the image lacks for a run, and what stays open without a GPU."""
    lacking, still_open = [], []
    for one in image.found(f):
        package = _needed(one.rule, f)
        if package and has[package] is None:
            lacking.append(f"{one.key}: the image has no {package}: {one.message} [{one.rule}]")
        else:
            there = f" ({package} {has[package]} is in the image)" if package else ""
            still_open.append(f"{one.key}: needs a GPU: {one.message}{there} [{one.rule}]")
    return lacking, still_open


def _needed(rule: str, f: Facts) -> str | None:
    if rule == "dispatcher_is_installed" and f.kernels.flex_backend == "ncclep":  # it lies in Transformer Engine
        return "transformer_engine"
    return NEEDS[rule]


def lacks(what: str, said: str, has: Packages) -> str | None:
    """Why a run at which Bridge stopped for want of `what` can't run in this image; None where only a GPU can tell.

    `said` is Bridge's sentence, which may name the version that it wants.
    """
    package = "mamba_ssm" if what == "mamba-ssm" else "transformer_engine"
    if has[package] is None:
        return f"the image has no {package}: {what}; Bridge says: {said}"
    wanted = max(map(_numbers, _VERSION.findall(said)), default=())
    if wanted > _numbers(has[package]) > ():
        return f"the image has {package} {has[package]}; Bridge says: {said}"
    return None


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version; none of one that isn't known."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


def is_verdict(reasons: list[str]) -> bool:
    """Whether a refusal is about the run: not where a model's config couldn't be fetched from within the image."""
    return not any(_HUB.search(reason) for reason in reasons)
