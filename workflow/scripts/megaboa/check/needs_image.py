"""Checks that need the image: without Transformer Engine and GPU libraries they remain open.

A rule here doesn't refuse anything. It reports that a run uses something that was left out or replaced when the run was
built and validated. Inside the image the installed packages decide: if a package that the run uses is missing or too
old, the run is refused. What depends on the GPU itself remains open.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from collections.abc import Collection, Mapping

from megaboa import peaks
from megaboa.check.facts import Facts
from megaboa.check.rule import Broken, Finding, Rule, finding
from megaboa.model_kinds import BY_NAME

# Messages of Bridge about something that only the image has, and what that is. The first match wins. Mentioning
# Transformer Engine isn't enough, as many messages are about a run's setting (transformer_impl, the op fuser, graphs).
TE = r"(?:Transformer[ _-]?Engine|\bTE\b)"
ABSENT_TE = "|".join(
    (
        rf"\b(?:requires?|needs?|install|without|at least) {TE}(?!\w)",
        rf"{TE}(?: with)?(?: version)?(?: v[\d.]+ must be)? ?>= ?v?\d",
        rf"{TE}(?: version| v?[\d.]+)* (?:and later|or (?:later|higher))",
        rf"{TE}[\w. ()]{{0,40}} (?:is|are) (?:not (?:installed|found|available|present|detected)|unavailable|required)",
        rf"\bTE [\w ]{{0,20}}is not (?:available|present)|{TE} version does not have",
        r"No module named 'transformer_engine",
    )
)
MISSING = {
    r"^StopIteration\b": "Transformer Engine layers, for which Bridge has only mocks here that can't be built",
    # The last two are what a name or a mock in place of Transformer Engine's modules leads to.
    r"'TESpecProvider' is not defined|TESpecProvider\(\)|^TypeError: cannot pickle 'cell' object": (
        "Transformer Engine's layers"
    ),
    "MambaSSM is not installed|No module named 'mamba_ssm": "mamba-ssm",
    "requires FusedAdam from TransformerEngine, but not found": "Transformer Engine's Adam with states in fewer bits",
    ABSENT_TE: "Transformer Engine",
}
# Switches that are always off here, Bridge's message about each, and what they need. If the run itself has turned one
# off, the message is about the run.
SWITCHES = {
    "gradient_accumulation_fusion": (
        "gradient accumulation fusion is not used",
        "fused gradients of weights (APEX, Transformer Engine)",
    ),
    "moe_grouped_gemm": (r"(?:with|requires?) moe_grouped_gemm", "grouped matrix products (Transformer Engine)"),
}
# Largest heads with a kernel of cuDNN (docs/benchmarks/h200.md): on Hopper, and on all GPUs of today.
ON_HOPPER, ANYWHERE = 256, 128

BACKEND = "model.attention_backend"

Packages = Mapping[str, str | None]  # version of each package, or None if it isn't installed

DISTRIBUTIONS = {
    "transformer_engine": "transformer-engine",
    "deep_ep": "deep-ep",
    "mamba_ssm": "mamba-ssm",
    "emerging_optimizers": "emerging-optimizers",
    "flash_attn": "flash-attn",
}
SUCCESSORS = {"flash_attn": ("flash_attn_interface",)}  # version 3 has a module of its own
UNKNOWN = "of an unknown version"
# The package with the kernels that a rule is about; None: only a GPU can tell whether they support the run.
NEEDS = {
    "low_precision_has_kernels": "transformer_engine",
    "dispatcher_is_installed": "deep_ep",
    "graphs_can_be_captured": "transformer_engine",
    "tensor_overlap_has_buffers": "transformer_engine",
    "optimizer_is_installed": "emerging_optimizers",
    "flash_attention_is_installed": "flash_attn",
    "attention_takes_the_head": None,
}
# Versions of the package itself; messages may also name versions of CUDA, or GPU architectures.
_VERSION = re.compile(r"(?:transformer[ _-]?engine|\bTE\b|mamba[_-]?ssm)\D{0,20}?(\d+(?:\.\d+)+)", re.IGNORECASE)


def low_precision_has_kernels(f: Facts) -> Broken | None:
    """Transformer Engine says whether it has FP8, MXFP8 or NVFP4 for this GPU, and for these modules; without it every
    format passes validation."""
    precision = f.training.precision or ""
    if "fp8" not in precision and "fp4" not in precision:
        return None
    return _open("training.precision", f"{precision}: Transformer Engine's kernels for it")


def dispatcher_is_installed(f: Facts) -> Broken | None:
    """DeepEP, HybridEP and NCCL EP are packages of the image; here the model is built with alltoall instead."""
    if f.kernels.dispatcher != "flex":
        return None
    return _open("model.moe_flex_dispatcher_backend", f"{f.kernels.flex_backend}: installed, and for this GPU")


def graphs_can_be_captured(f: Facts) -> Broken | None:
    """Which modules Transformer Engine can capture depends on its version; here the model is built without graphs."""
    if f.kernels.graphs == "none":
        return None
    return _open("model.cuda_graph_impl", f"{f.kernels.graphs}: what it captures")


def tensor_overlap_has_buffers(f: Facts) -> Broken | None:
    """Overlapped tensor parallel communication needs Transformer Engine's user buffers (and MPI, or none, as it was
    built); here it is left out."""
    if not f.kernels.tp_comm_overlap:
        return None
    return _open("comm_overlap.tp_comm_overlap", "true: user buffers")


def optimizer_is_installed(f: Facts) -> Broken | None:
    """Muon is in the package emerging-optimizers: megatron-core's optimizer/__init__.py ends the ranks without it. Here
    no optimizer is built."""
    return _open("optimizer.name", f"{f.training.optimizer}: its code") if f.training.is_emerging else None


def flash_attention_is_installed(f: Facts) -> Broken | None:
    """With attention_backend: flash, which Bridge sets for Gemma, Transformer Engine takes flash-attn or nothing; here
    the model is built with PyTorch's attention. Hybrid models have it too, and perhaps no attention."""
    is_asked = f.kernels.attention == "flash" and BY_NAME[f.model.kind].package is None
    return _open(BACKEND, "flash: the package flash-attn") if is_asked else None


def attention_takes_the_head(f: Facts) -> Broken | None:
    """Transformer Engine's fused attention takes heads of a multiple of 8, up to 128 channels, on Hopper 256; others
    are calculated unfused, with the scores of all pairs of tokens in memory, or fail."""
    head, gpu = f.model.head_dim, peaks.of(f.cluster.gpu)
    is_hopper = f.cluster.gpu is None or (gpu is not None and gpu.generation == peaks.Generation.HOPPER)
    largest = ON_HOPPER if is_hopper else ANYWHERE
    if f.model.latent or head is None or (head <= largest and head % 8 == 0):
        return None
    return _open("model.kv_channels", f"{head}: attention kernels for it")


def _open(key: str, what: str) -> Broken:
    return Broken(key, what, level="image")


RULES: tuple[Rule, ...] = (
    low_precision_has_kernels,
    dispatcher_is_installed,
    graphs_can_be_captured,
    tensor_overlap_has_buffers,
    optimizer_is_installed,
    flash_attention_is_installed,
    attention_takes_the_head,
)


def missing(error: str, turned_off: Collection[str] = ()) -> str | None:
    """What an error of Bridge says is missing outside of the image; None if the error is about the run itself.

    `turned_off`: switches that the run itself has turned off.
    """
    switched = {said: what for name, (said, what) in SWITCHES.items() if name not in turned_off}
    known = {**switched, **MISSING}
    return next((what for said, what in known.items() if re.search(said, error, re.IGNORECASE)), None)


def found(f: Facts) -> list[Finding]:
    """Findings for a run on GPUs."""
    if f.cluster.device != "cuda":
        return []
    return [finding(rule, broken) for rule in RULES if (broken := rule(f))]


def unchecked(f: Facts) -> list[str]:
    """Findings as lines, if there is no image to check them in."""
    return [f"{one.key}: needs the image: {one.message} [{one.rule}]" for one in found(f)]


def installed() -> dict[str, str | None]:
    """Installed versions. Must be called before the CPU backend hides packages; imports nothing, as that may need a
    GPU."""
    return {module: _version(module, name) for module, name in DISTRIBUTIONS.items()}


def _version(module: str, distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        modules = (module, *SUCCESSORS.get(module, ()))
        return UNKNOWN if any(importlib.util.find_spec(one) for one in modules) else None


def judge(f: Facts, has: Packages) -> tuple[list[str], list[str]]:
    """What the image lacks for a run, and what can't be decided without a GPU."""
    lacking, still_open = [], []
    for one in found(f):
        package = _needed(one.rule, f)
        if package and has[package] is None:
            lacking.append(f"{one.key}: the image has no {package}: {one.message} [{one.rule}]")
        else:
            there = f" ({package} {has[package]} is in the image)" if package else ""
            still_open.append(f"{one.key}: needs a GPU: {one.message}{there} [{one.rule}]")
    return lacking, still_open


def lacking_package(f: Facts, has: Packages, where: str) -> str | None:
    """A message if a package that a run needs is known to be missing where its ranks start; None otherwise.

    The image of containers/ has all but Mamba's; of flash-attn it isn't known."""
    if f.cluster.device != "cuda":
        return None
    package = BY_NAME[f.model.kind].package
    if package is not None and has.get(package) is None:
        return (
            f"model: {BY_NAME[f.model.kind].text} needs the package {package}, which {where} lacks (the package index "
            "has it as CUDA source alone): install it there, or name an image that has it (image.path), such as "
            "NVIDIA's for NeMo"
        )
    if optimizer_is_installed(f) and has.get("emerging_optimizers", UNKNOWN) is None:
        return (
            f"optimizer.name: {f.training.optimizer} needs the package emerging_optimizers, which {where} lacks: "
            "install it there (`make setup` does), or take adam"
        )
    if flash_attention_is_installed(f) and has.get("flash_attn", UNKNOWN) is None:
        remedy = "install it" if attention_takes_the_head(f) else f"set overrides.{BACKEND}: auto for cuDNN's attention"
        why = "as Bridge sets it for Gemma, needs the package flash-attn"
        return f"{BACKEND}: flash, {why}, which {where} lacks: {remedy}"
    return None


def _needed(rule: str, f: Facts) -> str | None:
    if rule == "dispatcher_is_installed" and f.kernels.flex_backend == "ncclep":  # part of Transformer Engine's package
        return "transformer_engine"
    return NEEDS[rule]


def lacks(what: str, said: str, has: Packages) -> str | None:
    """Why a run that Bridge stopped because `what` is missing can't run in this image; None if only a GPU can tell.

    `said`: Bridge's message, which may name the required version.
    """
    package = "mamba_ssm" if what == "mamba-ssm" else "transformer_engine"
    if has[package] is None:
        return f"the image has no {package}: {what}; Bridge says: {said}"
    wanted = max(map(_numbers, _VERSION.findall(said)), default=())
    if wanted > _numbers(has[package]) > ():
        return f"the image has {package} {has[package]}; Bridge says: {said}"
    return None


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version; empty if it is unknown."""
    leading = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, leading[0].split("."))) if leading else ()
