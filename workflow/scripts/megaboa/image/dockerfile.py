"""Dockerfiles, as far as they have to be understood before a build: instructions, arguments, copied files."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from megaboa import files
from megaboa.errors import InputError

_HEREDOC = re.compile(r"<<-?\s*['\"]?(\w+)['\"]?")
_FLAG = re.compile(r"^--([\w-]+)(?:=(\S*))?$")
_LEADING_FLAGS = re.compile(r"^(?:\s*--[\w-]+(?:=\S*)?(?=\s))*\s*")
_URL = re.compile(r"^(\w+://|git@)")
_VARIABLE = re.compile(r"\$\{(\w+)\}|\$(\w+)")
GIVEN_BY_THE_BUILDER = {"TARGETARCH", "TARGETPLATFORM", "TARGETOS", "BUILDPLATFORM"}
IGNORE_FILE = ".dockerignore"
_PATTERNS = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}


@dataclass(frozen=True)
class Instruction:
    name: str
    text: str
    line: int

    @property
    def flags(self) -> dict[str, str]:
        words = [_FLAG.match(word) for word in _LEADING_FLAGS.match(self.text)[0].split()]
        return {match[1]: match[2] or "" for match in words if match}

    @property
    def mounts(self) -> list[dict[str, str]]:
        """The options of every `--mount`."""
        words = [_FLAG.match(word) for word in _LEADING_FLAGS.match(self.text)[0].split()]
        given = [match[2] or "" for match in words if match and match[1] == "mount"]
        return [dict(option.partition("=")[::2] for option in mount.split(",")) for mount in given]

    @property
    def words(self) -> list[str]:
        """The words without flags, also for the JSON form."""
        text = _LEADING_FLAGS.sub("", self.text)
        if text.startswith("["):
            return re.findall(r'"([^"]*)"', text)
        first = shlex.split(text.split("\n")[0])  # a here-document follows
        return [word for word in first if not word.startswith("<<")]


@dataclass(frozen=True)
class Dockerfile:
    path: Path
    instructions: tuple[Instruction, ...]

    def named(self, name: str) -> list[Instruction]:
        return [one for one in self.instructions if one.name == name]

    @property
    def arguments(self) -> dict[str, str | None]:
        """Every ARG with its default, or None."""
        found: dict[str, str | None] = {}
        for one in self.named("ARG"):
            name, equals, default = one.text.strip().partition("=")
            if not found.get(name):
                found[name] = default.strip("\"'") if equals else None
        return found

    @property
    def bases(self) -> list[str]:
        """The base images in FROM, without stages of the file itself."""
        stages = {one.text.split()[-1] for one in self.named("FROM") if " as " in one.text.lower()}
        return [one.words[0] for one in self.named("FROM") if one.words[0] not in stages]

    @property
    def mounts_context(self) -> bool:
        """Whether a RUN mounts files of the context that no COPY names."""
        mounts = [mount for one in self.named("RUN") for mount in one.mounts]
        return any(mount.get("type", "bind") == "bind" and "from" not in mount for mount in mounts)

    def copied(self, context: Path, values: Mapping[str, str] = MappingProxyType({})) -> list[Path]:
        """The files of the context that get into the image; `values`: the build's arguments."""
        sources = [
            (one, word)
            for one in self.instructions
            if one.name in ("COPY", "ADD") and "from" not in one.flags
            for word in (expand(word, values) for word in one.words[:-1])
            if not _URL.match(word)
        ]
        is_ignored = ignored(context)
        found: set[Path] = set()
        for one, word in sources:
            matched = sorted(context.glob(re.sub(r"^(\.?/)+|^\.$", "", word) or "*"))
            if not matched:
                raise InputError(f"{self.path}:{one.line}: {one.name} {word}: nothing of that name is in {context}/")
            for path in matched:
                found.update([path] if path.is_file() else (inner for inner in path.rglob("*") if inner.is_file()))
        return sorted(path for path in found if not is_ignored(path.relative_to(context)))


def read(path: Path) -> Dockerfile:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: can't be read as a Dockerfile ({getattr(error, 'strerror', error)})") from error
    instructions = tuple(_instructions(text.split("\n")))
    if not any(one.name == "FROM" for one in instructions):
        raise InputError(f"{path}: has no FROM: it is not a Dockerfile")
    return Dockerfile(path, instructions)


def _instructions(lines: list[str]) -> list[Instruction]:
    found, number = [], 0
    while number < len(lines):
        first = number
        if not lines[number].strip() or lines[number].lstrip().startswith("#"):
            number += 1
            continue
        text = lines[number]
        while text.endswith("\\") and number + 1 < len(lines):
            number += 1
            text = text[:-1] + ("" if lines[number].lstrip().startswith("#") else lines[number])
            if lines[number].lstrip().startswith("#"):
                text += "\\"
        number += 1
        for end in _HEREDOC.findall(text):
            while number < len(lines):
                number += 1
                text += "\n" + lines[number - 1]
                if lines[number - 1].strip() == end:
                    break
        name, _, rest = text.strip().partition(" ")
        found.append(Instruction(name.upper(), rest.strip(), first + 1))
    return found


def expand(text: str, values: Mapping[str, str]) -> str:
    return _VARIABLE.sub(lambda match: values.get(match[1] or match[2], match[0]), text)


def arguments(file: Dockerfile, pins: dict[str, str], given: dict[str, str]) -> dict[str, str]:
    """The value of every build argument: the user's, else the pinned version, else the file's default."""
    declared = file.arguments
    for name in given:
        if name not in declared:
            raise InputError(f"image.build.args.{name}: {file.path} has no ARG {name}; it has {', '.join(declared)}")
    values = {}
    for name, default in declared.items():
        value = given.get(name, pins.get(name, default))
        if value is None and name not in GIVEN_BY_THE_BUILDER:
            raise InputError(f"{file.path}: ARG {name} has no value: set image.build.args.{name}")
        if value is not None:
            values[name] = value
    return values


def inputs(file: Dockerfile, context: Path, values: dict[str, str]) -> dict[str, object]:
    """Everything that defines the built image."""
    copied = {str(path.relative_to(context)): files.file_digest(path) for path in file.copied(context, values)}
    return {"dockerfile": files.file_digest(file.path), "files": copied, "args": values}


def ignored(context: Path) -> Callable[[Path], bool]:
    """A function that says whether .dockerignore excludes a file of the context (a relative path).

    The last matching line decides.
    """
    try:
        lines = (context / IGNORE_FILE).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return lambda path: False
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{context / IGNORE_FILE}: can't be read ({getattr(error, 'strerror', error)})") from error
    rules = [_ignore_rule(line.strip()) for line in lines if line.strip() and not line.startswith("#")]

    def is_ignored(path: Path) -> bool:
        return next((out for pattern, out in reversed(rules) if pattern.match(path.as_posix())), False)

    return is_ignored


def _ignore_rule(line: str) -> tuple[re.Pattern[str], bool]:
    """The pattern of a line, which for a folder includes its content, and whether it excludes; `!` includes again."""
    pattern = line.removeprefix("!").strip().strip("/").removeprefix("./")
    parts = re.split(r"(\*\*/|\*\*|\*|\?|\[[^\]]+\])", pattern)
    made = [_PATTERNS.get(part) or (part if part.startswith("[") else re.escape(part)) for part in parts]
    whole = ".*" if pattern == "." else f"{''.join(made)}(?:/.*)?"
    return re.compile(f"^{whole}$", re.DOTALL), not line.startswith("!")
