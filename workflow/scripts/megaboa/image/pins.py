"""containers/versions.toml: every version that the images are made of, in one file."""

from __future__ import annotations

import functools
import tomllib
from dataclasses import dataclass
from pathlib import Path

from megaboa.image import dockerfile
from megaboa.image.dockerfile import Dockerfile

FILE = Path(__file__).parents[4] / "containers" / "versions.toml"
BEGIN, END = "<!-- versions: generated from versions.toml by megaboa write-schema -->", "<!-- end of versions -->"
_ROLES = {"argument": "build argument", "python": "Python package"}


@dataclass(frozen=True, kw_only=True)
class Pin:
    """A pinned version: of a build `argument` or a `python` package."""

    name: str
    version: str
    why: str
    device: list[str]  # in whose images it is
    argument: str | None = None
    python: str | None = None
    installed: str | None = None  # what the package calls its version, where that is another


@functools.cache
def entries() -> tuple[Pin, ...]:
    return tuple(Pin(**one) for one in tomllib.loads(FILE.read_text(encoding="utf-8"))["pin"])


def arguments() -> dict[str, str]:
    """Pinned versions by build argument."""
    return {one.argument: one.version for one in entries() if one.argument}


def packages(device: str) -> dict[str, str]:
    """Python packages whose versions an image for this device must have."""
    wanted = {one.python: one.installed or one.version for one in entries() if one.python and device in one.device}
    return dict(sorted(wanted.items()))


def are_changed(given: dict[str, str]) -> bool:
    """Whether build arguments ask for other versions of Python packages than the pinned ones."""
    return any(one.argument in given for one in entries() if one.python)


def build_arguments(file: Dockerfile, given: dict[str, str]) -> dict[str, str]:
    return dockerfile.arguments(file, arguments(), given)


def table() -> str:
    """A Markdown table with a row for every pin."""
    lines = ["| what | version | in the images for | how it is given | why |", "|---|---|---|---|---|"]
    for one in entries():
        how = ", ".join(f"{text} `{getattr(one, role)}`" for role, text in _ROLES.items() if getattr(one, role))
        lines.append(f"| {one.name} | `{one.version}` | {', '.join(one.device)} | {how} | {one.why} |")
    return "\n".join(lines)


def readme_with_table(text: str) -> str:
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"
