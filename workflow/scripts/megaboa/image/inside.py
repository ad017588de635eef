"""A script of ours in the image that ranks run in: conversions need the same kernels as training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megaboa.image.container import Container

# Within the job's own allocation, beside the step that waits for it.
STEP = ("--overlap", "--nodes=1", "--ntasks=1")


def command(wanted: dict[str, Any], image: str, words: Sequence[str]) -> list[str]:
    """argv that runs the image's Python with these words; its environment must hold `wanted["variables"]`."""
    container = Container(wanted["runtime"], image, wanted["mounts"], wanted["env"], wanted["workdir"])
    inner = container.around([wanted["python"], *words], wanted["variables"])
    return [wanted["srun"], *STEP, *wanted["srun_args"], *inner] if wanted["runtime"] == "pyxis" else inner
