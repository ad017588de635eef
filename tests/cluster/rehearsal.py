"""What the tests on hosts with GPUs use: GPUs, or with MEGABOA_REHEARSAL=1 processors in their place."""

from __future__ import annotations

import os
from pathlib import Path

from gpu_count import gpus

REHEARSAL = os.environ.get("MEGABOA_REHEARSAL") == "1"


def usable(most: int) -> int:
    """How many GPUs a test takes; a rehearsal plays two."""
    return 2 if REHEARSAL else min(gpus(), most)


def devices(count: int) -> list[Path]:
    return [] if REHEARSAL else [Path(f"/dev/nvidia{number}") for number in range(count)]
