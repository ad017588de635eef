"""Pinned versions: containers/versions.toml, for images, and the locks in envs/."""

from __future__ import annotations

import functools
import os
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

from megaboa.image import dockerfile
from megaboa.image.dockerfile import Dockerfile

FILE = Path(__file__).parents[4] / "containers" / "versions.toml"
ENVS = FILE.parents[1] / "envs"
LOCKS = {  # for ranks
    "cpu": ("runtime-cpu", "megatron", "peft"),
    "cuda": ("runtime-cuda", "transformer-engine", "megatron", "peft"),
}
IN_IMAGE = Path("/opt/megaboa/versions.toml")  # the path in images built by our Dockerfiles
_ROLES = {"argument": "build argument", "python": "Python package"}


@dataclass(frozen=True, kw_only=True)
class Pin:
    """A pinned version, of a build `argument` or a `python` package."""

    name: str
    version: str
    why: str
    device: list[str]  # devices whose images include it
    argument: str | None = None
    python: str | None = None


@functools.cache
def entries() -> tuple[Pin, ...]:
    return tuple(Pin(**one) for one in tomllib.loads(FILE.read_text(encoding="utf-8"))["pin"])


def arguments() -> dict[str, str]:
    """Pinned versions by build argument."""
    return {one.argument: one.version for one in entries() if one.argument}


def locked(*names: str) -> dict[str, str]:
    """Versions of Python packages in these locks."""
    text = "".join((ENVS / f"{name}.txt").read_text(encoding="utf-8") for name in names)
    return dict(re.findall(r"^([a-z0-9.-]+)==(\S+)", text, re.MULTILINE))


def packages(device: str) -> dict[str, str]:
    """Python packages that `make setup` installs here for ranks."""
    resiliency = ["resiliency"] if device == "cuda" and _glibc() >= (2, 39) else []  # as envs/setup.sh
    return locked(*LOCKS[device], *resiliency)


def packages_of_image(device: str) -> dict[str, str]:
    """Packages of our images: without those that NVIDIA's base has in its own builds, but with DeepEP's build
    dependencies."""
    bases = locked("runtime-cuda").keys() - locked("image-cuda") if device == "cuda" else set()
    built = {one.python: one.version for one in entries() if one.python and one.argument and device in one.device}
    return {name: version for name, version in packages(device).items() if name not in bases} | built


def _glibc() -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", os.confstr("CS_GNU_LIBC_VERSION") or "")))


def are_changed(given: dict[str, str]) -> bool:
    """Whether build arguments change pinned versions of Python packages."""
    return any(one.argument in given for one in entries() if one.python)


def build_arguments(file: Dockerfile, given: dict[str, str]) -> dict[str, str]:
    return dockerfile.arguments(file, arguments(), given)


def markdown() -> str:
    """The table of containers/README.md, with a row for every pin."""
    lines = ["| what | version | in the images for | how it is given | why |", "|---|---|---|---|---|"]
    for one in entries():
        how = ", ".join(f"{text} `{getattr(one, role)}`" for role, text in _ROLES.items() if getattr(one, role))
        lines.append(f"| {one.name} | `{one.version}` | {', '.join(one.device)} | {how} | {one.why} |")
    return "\n".join(lines)
