"""Detects environment variables that hold secrets. Standard library only."""

from __future__ import annotations

import re
from collections.abc import Mapping

_WORDS = "token|key|password|passwd|passphrase|pass|pat|secret|credential"
_NAMES = (
    re.compile(rf"(^|_)({_WORDS})s?\d*(_|$)", re.IGNORECASE),
    re.compile(rf"[a-z]({'|'.join(word.title() for word in _WORDS.split('|'))})s?\d*([A-Z_]|$)"),  # apiKey
    re.compile(r"password|passwd|apikey|connection_string", re.IGNORECASE),  # PGPASSWORD
)
_CREDENTIALS = re.compile(r"https?://[^/\s@]+@|\w://[^/\s:@]*:[^/\s@]+@")  # a password, or a token without a user
SHORTEST = 8  # shorter values would match in unrelated files


def is_secret_name(name: str) -> bool:
    """Whether a variable with this name holds a secret: `WANDB_API_KEY`, `HF_TOKEN`; not `TOKENIZERS_PARALLELISM`."""
    return any(pattern.search(name) for pattern in _NAMES)


def has_credentials(value: str) -> bool:
    """Whether a value is an address with credentials: `postgres://me:secret@host`, `https://token@git.example.com`."""
    return bool(_CREDENTIALS.search(value))


def secrets_in(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that hold secrets long enough to be searched for in files."""
    return {
        name: value
        for name, value in environment.items()
        if len(value) >= SHORTEST and (is_secret_name(name) or has_credentials(value))
    }
