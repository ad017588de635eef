"""Which environment variables hold secrets. Standard library only."""

from __future__ import annotations

import re
from collections.abc import Mapping

_WORDS = "token|key|password|passwd|secret|credential"
_NAMES = (
    re.compile(rf"(^|_)({_WORDS})s?(_|$)", re.IGNORECASE),
    re.compile(rf"[a-z]({'|'.join(word.title() for word in _WORDS.split('|'))})s?([A-Z_]|$)"),  # apiKey
)
SHORTEST = 8  # a shorter value would be found in files that have nothing to do with it


def is_secret_name(name: str) -> bool:
    """`HF_TOKEN`, `WANDB_API_KEY`, `AWS_SECRET_ACCESS_KEY`, ...; not `TOKENIZERS_PARALLELISM`, `KEYBOARD`."""
    return any(pattern.search(name) for pattern in _NAMES)


def secrets_in(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that hold secrets, and long enough ones that a search for them means something."""
    return {name: value for name, value in environment.items() if is_secret_name(name) and len(value) >= SHORTEST}
