"""Which rank a line is of, where something labels the lines of several ranks."""

from __future__ import annotations

import re

# A time, then torchrun's labels, srun --label's, and NeMo-Run's `task/0`, one or several of them.
_TIME = rb"\s*(?:\[\d{4}-[^\]]*\] )?"
_ONE = rb"(?:\[(?:rank|default)(\d+)\]:?|(\d+):(?=\s)|[^\s|\[/]+/(\d+)(?= ))"
_LABEL = re.compile(_TIME + _ONE + rb"(?:\s*" + _ONE + rb")?")


def label_of(line: bytes) -> tuple[bytes, str | None]:
    """The label at a line's beginning, and the rank that it names; `1/0` where a node's name and a rank's do."""
    found = _LABEL.match(line)
    if not found:
        return b"", None
    return found[0], b"/".join(filter(None, found.groups())).decode()


def rank_of(line: bytes) -> str | None:
    return label_of(line)[1]
