"""Mistakes that a user can mend: scripts show their one sentence and no traceback. Standard library only."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator


class InputError(Exception):
    """What is wrong, where, and what to do about it, in one sentence."""


@contextlib.contextmanager
def one_sentence() -> Iterator[None]:
    """End the process with the sentence of an `InputError`; other exceptions keep their traceback."""
    try:
        yield
    except InputError as error:
        sys.exit(f"error: {error}")
