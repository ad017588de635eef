"""Inspects the ranks' environment: `train_rank.py --self-test`, inside an image or outside."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import logging
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from megaboa import files
from megaboa.bridge import process
from megaboa.bridge.wheels import is_installed
from megaboa.image import pins
from megaboa.records import Contract, Lacking, OtherVersion, plain, write

# Modules without which nothing can be trained.
REQUIRED = ("torch", "transformers", "megatron.core", "megatron.bridge")
# Optional modules, the device for which each matters, and what isn't available without it.
OPTIONAL = {
    "transformer_engine": (
        "cuda",
        "fp8 and NVFP4, fused attention and norms, context parallelism, recipes that name it",
    ),
    "deep_ep": ("cuda", "MoE dispatch by DeepEP (`moe_token_dispatcher_type: flex`)"),
    "nvidia_resiliency_ext": (
        "cuda",
        "saving in the background, detection of stragglers (its wheels want glibc 2.39)",
    ),
    "mamba_ssm": ("cuda", "Mamba layers of hybrid models (the package index has CUDA source only)"),
    "causal_conv1d": ("cuda", "Mamba layers of hybrid models (the package index has CUDA source only)"),
    "fla": ("cuda", "gated delta nets (Qwen3-Next, Qwen3.5)"),
    "peft": ("any", "proof that the library peft makes the trained model of an export's adapters"),
    "viztracer": ("any", "traces of VizTracer"),
    "wandb": ("any", "Weights & Biases"),
    "tensorboard": ("any", "TensorBoard"),
}
# Those of them that are linked against CUDA, so that being installed doesn't suffice. (Transformer Engine hides it if a
# half of it is broken.) Torch is imported first, as in ranks, because it loads NCCL and cuDNN from their own packages.
LINKED = {"transformer_engine": "transformer_engine.pytorch", "deep_ep": "deep_ep"}
# Import errors that no driver can fix. Without a GPU, all others remain undecided.
BROKEN = re.compile(
    r"undefined symbol|No module named|ended by signal|cannot import name"
    r"|(?<!libcuda\.so\.1: )(?<!libnvidia-ml\.so\.1: )cannot open shared object file"
)
OFI_NCCL = Path("/opt/amazon/ofi-nccl/lib")
# The packages that people look for first, and the number of other deviations from pinned versions shown in a line.
TOLD = ("torch", "megatron-core", "megatron-bridge", "transformer-engine", "nvidia-resiliency-ext", "transformers")
OTHERS_TOLD = 6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--self-test", action="store_true", required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="what the experiment trains on")
    parser.add_argument("--strict", action="store_true", help="versions other than the pinned ones are a failure")
    parser.add_argument("--out", type=Path, help="file for the report; default: standard output")
    arguments = parser.parse_args()
    report = examine(arguments.device, arguments.strict)
    if arguments.out:
        write(arguments.out, report)
    else:
        print(files.canonical(plain(report)), end="")
    for line in told(report):
        print(f"self-test: {line}", file=sys.stderr)
    return 0 if report.state == "PASS" else 1


def examine(device: str, strict: bool = False) -> Contract:
    """Examine packages, imports, GPU libraries and tools; report what is missing, and what that disables."""
    packages = installed_packages()
    # before the CPU backend hides kernels
    absent = missing(device, is_installed, shutil.which)
    linked = linked_imports(is_installed) if device == "cuda" and is_installed("torch") else {}
    failed = _failed_imports(device)
    held = pins.packages_of_image(device) if pins.IN_IMAGE.exists() else pins.packages(device)
    other = differences(packages, pins.packages(device) | held)
    other = tuple(one for one in other if one.found or one.package in held)  # a base image may have other builds
    untried = {} if _has_gpu() else {name: why for name, why in linked.items() if why and not BROKEN.search(why)}
    failed |= {name: why for name, why in linked.items() if why and name not in untried}
    problems = [f"{name} can't be imported: {why}" for name, why in failed.items()]
    if strict:
        wrong = [one for one in other if one.package in held]
        problems += [f"{one.package} is {one.found or 'not installed'}, and {one.pinned} is pinned" for one in wrong]
    return Contract(
        state="FAIL" if problems else "PASS",
        problems=tuple(problems),
        device=device,
        python=platform.python_version(),
        architecture=platform.machine(),
        c_library=os.confstr("CS_GNU_LIBC_VERSION") or "not glibc",
        packages=dict(sorted(packages.items())),
        other_than_pinned=other,
        imports=tuple(name for name in (*REQUIRED, *linked) if name not in failed and name not in untried),
        untried=untried,
        bridge=_place_of("megatron.bridge"),
        gpu={} if "torch" in failed else _gpu(),
        tools={"nsys": _version_of("nsys"), "git": _version_of("git")},
        ofi_nccl=tuple(sorted(path.name for path in OFI_NCCL.glob("libnccl-net*.so"))),
        missing=tuple(absent),
    )


def told(report: Contract) -> list[str]:
    """A summary for people: the versions that matter, what can't be used, and what is missing."""
    found = {_normal(name): version for name, version in (report.packages or {}).items()}
    versions = [f"{name} {found[name]}" for name in TOLD if name in found]
    disabled: dict[str, list[str]] = {}
    for one in report.missing or ():
        disabled.setdefault(one.disables, []).append(one.what)
    on_gpus = []
    if report.device == "cuda" and (gpu := report.gpu):
        driver = f"driver {gpu['driver']}" if gpu.get("driver") else "no driver here"
        on_gpus = [f"CUDA {gpu['cuda']}, NCCL {gpu['nccl']}, {driver}"]
    return [
        ", ".join([f"Python {report.python}", str(report.c_library), *versions]),
        *on_gpus,
        *(report.problems or ()),
        *(f"{name} could not be tried here: {why}" for name, why in (report.untried or {}).items()),
        *_other_versions(report.other_than_pinned or ()),
        *(f"without {' and '.join(what)}: no {disables}" for disables, what in disabled.items()),
    ]


def _other_versions(other: tuple[OtherVersion, ...]) -> list[str]:
    """One line about versions other than the pinned ones, the most important first."""
    ordered = sorted(other, key=lambda one: (one.package not in TOLD, one.found is None, one.package))
    said = [f"{one.package} {one.found or 'missing'} (pinned: {one.pinned})" for one in ordered[:OTHERS_TOLD]]
    more = [f"{len(other) - OTHERS_TOLD} more in the report"] if len(other) > OTHERS_TOLD else []
    return [f"other than pinned: {', '.join([*said, *more])}"] if other else []


def installed_packages() -> dict[str, str]:
    """Versions by name.

    The first one on the path counts, as it is imported: an image's base may have another version.
    """
    first: dict[str, importlib.metadata.Distribution] = {}
    for package in importlib.metadata.distributions():
        if package.name:
            first.setdefault(_normal(package.name), package)
    return {package.name: package.version for package in first.values()}


def differences(found: dict[str, str], wanted: dict[str, str]) -> tuple[OtherVersion, ...]:
    """Packages with another version than the pinned one; the suffix after `+` that some builds have is ignored."""
    here = {_normal(name): version for name, version in found.items()}
    pairs = [OtherVersion(package=name, found=here.get(name), pinned=want) for name, want in sorted(wanted.items())]
    return tuple(one for one in pairs if (one.found or "").split("+")[0] != one.pinned)


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def missing(device: str, installed: Callable[[str], bool], which: Callable[[str], str | None]) -> list[Lacking]:
    """Optional modules and tools that are missing, and what that disables."""
    found = [
        Lacking(what=name, disables=disables)
        for name, (where, disables) in OPTIONAL.items()
        if where in ("any", device) and not installed(name)
    ]
    if device == "cuda" and not which("nsys"):
        found.append(Lacking(what="nsys", disables="profile.tool: nsys"))
    return found


def linked_imports(installed: Callable[[str], bool]) -> dict[str, str | None]:
    """Installed modules with compiled GPU code, each with the reason why it can't be imported, or None."""
    return {module: import_error(f"torch, {module}") for package, module in LINKED.items() if installed(package)}


def import_error(modules: str) -> str | None:
    """The last line of a failed import's error. It runs in a separate process, which a wrong library may crash."""
    done = subprocess.run([sys.executable, "-c", f"import {modules}"], capture_output=True, text=True)
    if done.returncode == 0:
        return None
    said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    if done.returncode < 0:
        return f"the process ended by signal {-done.returncode}" + (f" after: {said[-1]}" if said else "")
    return said[-1] if said else f"exit code {done.returncode}"


def _has_gpu() -> bool:
    """Whether the driver's own program finds a GPU. The CPU backend replaces CUDA in this process, so it can't be
    asked."""
    return _version_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") is not None


def _failed_imports(device: str) -> dict[str, str]:
    """Required modules that fail to import. Without a GPU, the CPU backend is used, as in preflight."""
    failed: dict[str, str] = {}
    logging.disable(logging.CRITICAL)  # Bridge logs everything that it does without; what matters is reported below
    try:
        import torch

        process.make_fit(device if device == "cuda" and torch.cuda.is_available() else "cpu")
    except Exception as error:
        return {"torch": _sentence(error)}
    for name in REQUIRED:
        try:
            importlib.import_module(name)
        except Exception as error:  # imports may raise anything
            failed[name] = _sentence(error)
    return failed


def _sentence(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _gpu() -> dict[str, str | None]:
    """The versions that torch was built with, and those found here."""
    import torch

    nccl = torch.distributed.is_nccl_available()
    return {
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if nccl and torch.version.cuda else None,
        "transformer_engine": _version("transformer-engine"),
        "driver": _version_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _place_of(module: str) -> str | None:
    spec = importlib.util.find_spec(module) if is_installed(module) else None
    return str(Path(spec.origin).parent) if spec and spec.origin else None


def _version_of(program: str, *arguments: str) -> str | None:
    """The first line of a program's version output."""
    if shutil.which(program) is None:
        return None
    done = subprocess.run([program, *(arguments or ("--version",))], capture_output=True, text=True)
    return done.stdout.strip().split("\n")[0] or None if done.returncode == 0 else None
