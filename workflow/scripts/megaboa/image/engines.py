"""The programs that build images, and what each of them is called with."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from megaboa.errors import InputError

ENGINES = ("docker", "podman", "buildah")  # in the order in which they are tried
# What an engine answers to only if it works here: the client of Docker is often there without its server.
_ASKED = {"docker": ["docker", "info"], "podman": ["podman", "info"], "buildah": ["buildah", "info"]}
ASK_SECONDS = 60


def find(asked: str = "auto", purpose: str = "built") -> str:
    """The engine by which an image can be built, or fetched; one sentence where there is none."""
    found = {name: _works(name) for name in (ENGINES if asked == "auto" else (asked,))}
    if works := next((name for name, problem in found.items() if problem is None), None):
        return works
    listed = "; ".join(f"{name}: {problem}" for name, problem in found.items())
    remedy = "install one of them" if asked == "auto" else "install it, or set image.build.engine to auto"
    remedy = "install one of them, or enroot" if purpose == "fetched" else remedy
    raise InputError(f"no image can be {purpose} here ({listed}): {remedy}, or give a finished image (image.path)")


def _works(name: str) -> str | None:
    if shutil.which(name) is None:
        return "not installed"
    try:
        done = subprocess.run(_ASKED[name], capture_output=True, text=True, timeout=ASK_SECONDS)
    except subprocess.TimeoutExpired:
        return f"no answer in {ASK_SECONDS} s"
    said = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
    return None if done.returncode == 0 else (said[-1].strip() if said else f"exit code {done.returncode}")


def build_command(
    engine: str, file: Path, context: Path, args: Mapping[str, str], labels: Mapping[str, str], tag: str
) -> list[str]:
    return [
        *(engine, "build", "--file", str(file), "--tag", tag),
        *(["--layers"] if engine == "buildah" else []),  # the others keep finished steps by themselves
        *(word for name, value in args.items() for word in ("--build-arg", f"{name}={value}")),
        *(word for name, value in labels.items() for word in ("--label", f"{name}={value}")),
        str(context),
    ]


def pull_command(engine: str, image: str) -> list[str]:
    return [engine, "pull", image]


def tag_command(engine: str, image: str, tag: str) -> list[str]:
    return [engine, "tag", image, tag]


def inspect_command(engine: str, image: str) -> list[str]:
    return [engine, "inspect", "--type", "image", image]


def variables(engine: str, said: str) -> list[str]:
    """What the image sets, `NAME=value` each, from what `inspect_command` prints."""
    found = json.loads(said)
    config = found["OCIv1"]["config"] if engine == "buildah" else found[0]["Config"]
    return config.get("Env") or []


def create_command(engine: str, image: str, container: str) -> list[str]:
    """A container that is never started: its root file system is what is wanted."""
    if engine == "buildah":
        return ["buildah", "from", "--pull-never", "--name", container, image]
    return [engine, "create", "--name", container, image, "true"]


def copy_command(engine: str, container: str, tree: Path) -> list[str]:
    """Lays a folder's content over the root file system."""
    if engine == "buildah":
        return ["buildah", "copy", "--quiet", container, str(tree), "/"]
    return [engine, "cp", f"{tree}/.", f"{container}:/"]


def remove_command(engine: str, container: str) -> list[str]:
    return [engine, "rm", container] if engine == "buildah" else [engine, "rm", "--force", container]


def archive_command(engine: str, image: str, target: Path) -> list[str]:
    """The image in one file that apptainer reads, as `archive_source` names it."""
    if engine == "buildah":
        return ["buildah", "push", image, f"oci-archive:{target}"]
    if engine == "podman":
        return ["podman", "save", "--format", "oci-archive", "--output", str(target), image]
    return ["docker", "save", "--output", str(target), image]


def archive_source(engine: str, archive: Path) -> str:
    return f"docker-archive:{archive}" if engine == "docker" else f"oci-archive:{archive}"


def enroot_source(engine: str, image: str) -> str | None:
    """How enroot takes an image from an engine; None where it can't."""
    return {"docker": f"dockerd://{image}", "podman": f"podman://{image}"}.get(engine)


def squash_options() -> Sequence[str]:
    """Fast to write and to read; kernels mount zstd since 4.14."""
    return ("-noappend", "-no-progress", "-quiet", "-comp", "zstd", "-Xcompression-level", "3")
