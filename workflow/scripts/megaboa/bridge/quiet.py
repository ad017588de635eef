"""Keep what the libraries print to themselves unless something goes wrong. Standard library only."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Hold back standard output and error of Python code; show all of it where an exception ends the block."""
    held = io.StringIO()
    try:
        with contextlib.redirect_stdout(held), contextlib.redirect_stderr(held):
            yield
    except BaseException:
        sys.stderr.write(held.getvalue())
        raise
