"""What the files of a corpus are called. Standard library only: the plan wants to know, too."""

from __future__ import annotations

import re
from collections.abc import Sequence


def file_stem(name: str, keys: Sequence[str], key: str) -> str:
    """How the files of a text key are called: with several keys as Megatron's own tool does it."""
    return name if len(keys) == 1 else f"{name}_{re.sub(r'[^A-Za-z0-9]+', '_', key)}"


def file_stems(name: str, text_key: str | Sequence[str]) -> list[str]:
    keys = [text_key] if isinstance(text_key, str) else text_key
    return [file_stem(name, keys, key) for key in keys]
