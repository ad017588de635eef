"""Which checkpoints of a run may be trusted.

Bridge's own tracker files are written while the last parts of a checkpoint are still missing, and not in one step.
So rank 0 leaves a marker in a checkpoint's folder when the whole save is over (`mark_complete`), and only folders with
a marker count. The supervisor adds checksums while training goes on, and compares them before it resumes: a checkpoint
that was damaged since is set aside (`distrust`), and the one before it is taken.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from megaboa.files import file_digest, read_json, write_json

MARKER = "complete.json"
DIGESTS = "digests.json"
DIGEST_SECONDS = 2.0
READERS = 4  # files read at once; a parallel file system is faster so, and a laptop not slower
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
        removed = path.with_name(f"removed_{path.name}")
        shutil.rmtree(removed, ignore_errors=True)
        path.rename(removed)  # at once; NFS may refuse to empty a folder in which a dead rank has open files
        shutil.rmtree(removed, ignore_errors=True)
    return unfinished


def add_digests(checkpoints: Path, iteration: int) -> None:
    """Write down the checksums of a complete checkpoint; they are its content from now on."""
    path = folder(checkpoints, iteration)
    if not (path / DIGESTS).exists():
        write_json(path / DIGESTS, _digests(path, _payload(path)))


def has_digests(checkpoints: Path, iteration: int) -> bool:
    return (folder(checkpoints, iteration) / DIGESTS).exists()


def damage(checkpoints: Path, iteration: int) -> str | None:
    """What is wrong with a checkpoint, in a few words; None where it is as it was, or its checksums aren't known."""
    path = folder(checkpoints, iteration)
    try:
        known = read_json(path / DIGESTS)
    except (FileNotFoundError, ValueError):
        return None
    missing = [name for name in known if not (path / name).exists()]
    if missing:
        return f"{path / missing[0]} is missing"
    changed = [name for name, digest in _digests(path, list(known)).items() if digest != known[name]]
    return f"{path / changed[0]} has changed since it was written" if changed else None


def distrust(checkpoints: Path, iteration: int) -> Path:
    """Set a damaged checkpoint aside, for people to look at; it counts no longer."""
    path = folder(checkpoints, iteration)
    aside = path.with_name(f"damaged_{path.name}")
    shutil.rmtree(aside, ignore_errors=True)
    return path.rename(aside)


def digester(checkpoints: Path) -> Callable[[], None]:
    """To be called often: writes the checksums of new checkpoints, one at a time, while the ranks go on."""
    looked = time.monotonic()
    worker: threading.Thread | None = None

    def add(iteration: int) -> None:
        with contextlib.suppress(OSError):  # an older checkpoint may be removed meanwhile
            add_digests(checkpoints, iteration)

    def look() -> None:
        nonlocal worker, looked
        if time.monotonic() - looked < DIGEST_SECONDS or (worker and worker.is_alive()):
            return
        looked = time.monotonic()
        if newest := latest(checkpoints):
            worker = threading.Thread(target=add, args=(newest,), daemon=True)
            worker.start()

    return look


def _payload(path: Path) -> list[str]:
    return sorted(
        str(file.relative_to(path)) for file in path.rglob("*") if file.is_file() and file.name not in (MARKER, DIGESTS)
    )


def _digests(path: Path, names: list[str]) -> dict[str, str]:
    with ThreadPoolExecutor(READERS) as pool:
        return dict(zip(names, pool.map(lambda name: file_digest(path / name), names), strict=True))


def _folders(checkpoints: Path) -> list[tuple[int, Path]]:
    if not checkpoints.is_dir():
        return []
    found = [(_FOLDER.match(path.name), path) for path in checkpoints.iterdir()]
    return [(int(match[1]), path) for match, path in found if match]
