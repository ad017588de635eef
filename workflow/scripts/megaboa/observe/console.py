"""Where commands print their tables."""

from __future__ import annotations

from rich.console import Console

UNLIMITED = 100_000  # columns


def console() -> Console:
    """Standard output, as wide as its terminal. In a file or a pipe, tables are neither cut nor wrapped."""
    found = Console()
    return found if found.is_terminal else Console(width=UNLIMITED)
