"""What a .dockerignore keeps out of a build: the last of its lines that fits decides."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from megaboa.errors import InputError

FILE = ".dockerignore"
_PARTS = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}


def read(context: Path) -> Callable[[Path], bool]:
    """Whether a file of the context (a path relative to it) is kept out."""
    try:
        lines = (context / FILE).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return lambda path: False
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{context / FILE}: can't be read ({getattr(error, 'strerror', error)})") from error
    rules = [_rule(line.strip()) for line in lines if line.strip() and not line.startswith("#")]

    def is_ignored(path: Path) -> bool:
        return next((out for pattern, out in reversed(rules) if pattern.match(path.as_posix())), False)

    return is_ignored


def _rule(line: str) -> tuple[re.Pattern[str], bool]:
    """What names a folder means all that is in it; `!` takes back in."""
    pattern = line.removeprefix("!").strip().strip("/").removeprefix("./")
    parts = re.split(r"(\*\*/|\*\*|\*|\?|\[[^\]]+\])", pattern)
    made = [_PARTS.get(part) or (part if part.startswith("[") else re.escape(part)) for part in parts]
    whole = ".*" if pattern == "." else f"{''.join(made)}(?:/.*)?"
    return re.compile(f"^{whole}$", re.DOTALL), not line.startswith("!")
