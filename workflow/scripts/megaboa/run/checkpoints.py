"""Which checkpoints of a run may be trusted.

Bridge's own tracker files are written while the last parts of a checkpoint are still missing, and not in one step.
So rank 0 leaves a marker in a checkpoint's folder when the whole save is over (`mark_complete`), and only folders with
a marker count.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from megaboa.files import write_json

MARKER = "complete.json"
LAST_WRITTEN = "run_config.yaml"
_FOLDER = re.compile(r"^iter_(\d{7,})$")


def folder(checkpoints: Path, iteration: int) -> Path:
    return checkpoints / f"iter_{iteration:07d}"


def mark_complete(checkpoints: Path) -> None:
    """Mark every checkpoint whose save is over.

    Which one that is the folders tell: a save in the background ends steps after the one that it belongs to. Bridge
    writes its configuration when all tensors are on disk.
    """
    for iteration, path in _folders(checkpoints):
        if (path / LAST_WRITTEN).exists() and not (path / MARKER).exists():
            write_json(path / MARKER, {"iteration": iteration})


def complete_iterations(checkpoints: Path) -> list[int]:
    return sorted(number for number, path in _folders(checkpoints) if (path / MARKER).exists())


def latest(checkpoints: Path) -> int:
    """The newest complete checkpoint's iteration; 0 where there is none."""
    return max(complete_iterations(checkpoints), default=0)


def remove_unfinished(checkpoints: Path) -> list[Path]:
    """Throw away what an interrupted save left behind: Bridge would write into the same folder again."""
    unfinished = [path for _, path in _folders(checkpoints) if not (path / MARKER).exists()]
    for path in unfinished:
        shutil.rmtree(path)
    return unfinished


def _folders(checkpoints: Path) -> list[tuple[int, Path]]:
    if not checkpoints.is_dir():
        return []
    found = [(_FOLDER.match(path.name), path) for path in checkpoints.iterdir()]
    return [(int(match[1]), path) for match, path in found if match]
