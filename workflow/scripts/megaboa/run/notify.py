"""Telling the user that a run has ended, by a command of theirs."""

from __future__ import annotations

import os
import subprocess

SECONDS = 60
LONGEST = 4000  # characters of one fact: an environment is not for logs


def notify(command: str | None, **facts: object) -> str | None:
    """Call it with MEGABOA_RUN, MEGABOA_STATE and so on in its environment; what went wrong comes back as text."""
    if not command:
        return None
    environment = {f"MEGABOA_{name.upper()}": str(value)[:LONGEST] for name, value in facts.items()}
    try:
        done = subprocess.run(
            command,
            shell=True,
            env={**os.environ, **environment},
            timeout=SECONDS,
            capture_output=True,
            text=True,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"recovery.notify took more than {SECONDS} s and was ended: {command}"
    except OSError as error:
        return f"recovery.notify failed: {command}: {error}"
    return f"recovery.notify failed: {command}: {done.stderr.strip()}" if done.returncode else None
