"""Suppresses the libraries' output unless something goes wrong. Standard library only."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
from collections.abc import Iterator

from megaboa.errors import InputError


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Hold back output, errors and logging of Python code, and show all of it if an exception ends the block.

    For a user's mistake, or a full disk, which have a sentence of their own, it isn't shown.
    """
    held = io.StringIO()
    try:
        with contextlib.redirect_stdout(held), contextlib.redirect_stderr(held), _logging_to(held):
            yield
    except InputError:
        raise
    except BaseException:
        sys.stderr.write(held.getvalue())
        raise


@contextlib.contextmanager
def _logging_to(stream: io.StringIO) -> Iterator[None]:
    """Redirect logging. Handlers keep the stream that they were created with, so redirecting stderr isn't enough."""
    handlers = [handler for handler in logging.root.handlers if isinstance(handler, logging.StreamHandler)]
    before = [(handler, handler.setStream(stream)) for handler in handlers]
    try:
        yield
    finally:
        for handler, old in before:
            handler.setStream(old or sys.stderr)
