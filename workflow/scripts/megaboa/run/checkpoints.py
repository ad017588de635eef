"""Which checkpoints of a run can be trusted, and which are kept.

Bridge writes its own tracker files before the last parts of a checkpoint are there, and not atomically. So rank 0
writes a marker with the files' sizes into a checkpoint's folder after the whole save (`mark_complete`), and only
folders with a marker count. The supervisor adds checksums while training continues, and compares sizes and checksums
before it resumes: a checkpoint that was damaged in the meantime is set aside (`distrust`), and the previous one is
used. Files with wrong checksums are read a second time, because the host's memory may be bad. The supervisor also
removes old checkpoints (`retire`): it first renames them, atomically, and then deletes them.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from megaboa.errors import InputError
from megaboa.files import DamagedError, file_digest, read_json, share, share_all, write_json
from megaboa.records import LM_LOSS, CheckpointMark, Evaluated, Tree, read, read_steps, write
from megaboa.store_paths import RunStore

MARKER = "complete.json"
DIGESTS = "digests.json"
REMOVED = "removed_"  # prefix of folders that are being removed
LOOK_SECONDS = 2.0
READERS = 4  # files read at once: faster on a parallel file system, and not slower on a laptop
LAST_WRITTEN = "run_config.yaml"
_FOLDER = re.compile(r"^iter_(\d{7,})$")


def folder(checkpoints: Path, iteration: int) -> Path:
    return checkpoints / f"iter_{iteration:07d}"


def mark_complete(checkpoints: Path) -> None:
    """Mark every checkpoint whose save is complete.

    The folders decide which ones these are, because a background save ends some steps after the step that it saves.
    Bridge writes its configuration last, when all tensors are on disk.
    """
    # The oldest first: an unmarked folder that is older than a marked one would be taken for a save that was cut off.
    for iteration, path in sorted(_folders(checkpoints)):
        if (path / LAST_WRITTEN).exists() and not _counts(path):
            share(checkpoints)  # Bridge has made these, with the umask of whoever trains
            share_all(path)
            write(path / MARKER, CheckpointMark(iteration=iteration, files=_sizes(path), time=time.time()))


def complete_iterations(checkpoints: Path) -> list[int]:
    return sorted(number for number, path in _folders(checkpoints) if _counts(path))


def has_shards(config: Tree) -> bool:
    """Whether each rank saved its own shard of the optimizer, by the configuration in the checkpoint."""
    saved = config.get("checkpoint") or {}
    return saved.get("dist_ckpt_optim_fully_reshardable") is False and saved.get("ckpt_format") != "fsdp_dtensor"


def latest(checkpoints: Path) -> int:
    """The newest complete checkpoint's iteration; 0 if there is none."""
    return max(complete_iterations(checkpoints), default=0)


def sizes(checkpoints: Path) -> dict[int, int]:
    """Size in bytes of every complete checkpoint at the time of its save, by iteration."""
    complete = sorted((number, path) for number, path in _folders(checkpoints) if _counts(path))
    return {number: _bytes(path, (path / MARKER).stat().st_mtime_ns) for number, path in complete}


def completed_at(checkpoints: Path) -> dict[int, float]:
    """When each complete checkpoint was completed, in unix seconds, if its marker says so."""
    complete = [(number, path) for number, path in _folders(checkpoints) if _counts(path)]
    said = {number: _completed(path, (path / MARKER).stat().st_mtime_ns) for number, path in complete}
    return {number: moment for number, moment in said.items() if moment is not None}


def hide_unfinished(checkpoints: Path) -> list[Path]:
    """Rename the leftovers of interrupted saves, because Bridge would write into the same folders.

    `delete_retired` deletes their files.
    """
    unfinished = [path for _, path in _folders(checkpoints) if not _counts(path)]
    for path in unfinished:
        _put_out_of_sight(path)
    return unfinished


def kept(iterations: Sequence[int], keep_last: int | None, keep_every: int | None) -> list[int]:
    """The checkpoints to keep: the newest `keep_last`, and those at multiples of `keep_every`."""
    newest = sorted(iterations)[-keep_last:] if keep_last else sorted(iterations)
    return sorted({*newest, *(number for number in iterations if keep_every and number % keep_every == 0)})


def retire(checkpoints: Path, keep_last: int | None, keep_every: int | None, verified: bool = True) -> list[int]:
    """Hide old checkpoints if a newer one is good; return their iterations.

    `verified`: a checkpoint is only good if its checksums are known. Hiding is a single rename, so a kill leaves either
    a whole checkpoint or a folder that doesn't look like one. `delete_retired` deletes the files.
    """
    complete = complete_iterations(checkpoints)
    spare = {*complete} - {*kept(complete, keep_last, keep_every)}
    read = [number for number in complete if has_digests(checkpoints, number) or not verified] if spare else []
    good = read[-1] if read and not damage(checkpoints, read[-1], full=False) else 0
    gone = sorted(number for number in spare if number < good)
    for iteration in gone:
        _put_out_of_sight(folder(checkpoints, iteration))
    return gone


def delete_retired(checkpoints: Path) -> None:
    for path in checkpoints.glob(f"{REMOVED}iter_*"):
        shutil.rmtree(path, ignore_errors=True)


def read_here(path: Path, names: list[str]) -> dict[str, str]:
    """Checksums of these files of a checkpoint, by name."""
    return _of_each(path, names, file_digest)


def read_again(path: Path, names: list[str]) -> dict[str, str]:
    """Checksums as by `read_here`, but without this host's page cache, as far as the file system allows that."""
    forget(path, names)
    return read_here(path, names)


def forget(path: Path, names: list[str]) -> None:
    """Drop these files from the host's page cache."""
    for name in names:
        with (path / name).open("rb") as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


Reader = Callable[[Path, list[str]], dict[str, str]]


def digests_of_share(path: Path, reader: int, readers: int) -> dict[str, str]:
    """Checksums of the files of one of several readers; the files are divided so that all read about as many bytes."""
    largest_first = sorted(_payload(path), key=lambda name: (-(path / name).stat().st_size, name))
    return read_here(path, largest_first[reader::readers])


def add_digests(checkpoints: Path, iteration: int, read: Reader = read_here) -> None:
    """Record the checksums of a complete checkpoint, which define its content from now on."""
    path = folder(checkpoints, iteration)
    if _counts(path) and not (path / DIGESTS).exists():
        write_json(path / DIGESTS, read(path, _payload(path)))


def has_digests(checkpoints: Path, iteration: int) -> bool:
    return (folder(checkpoints, iteration) / DIGESTS).exists()


def damage(
    checkpoints: Path, iteration: int, full: bool = True, read: Reader = read_here, again: Reader = read_again
) -> str | None:
    """A description of a checkpoint's damage; None if it is unchanged, or nothing is known of its files.

    Sizes are always compared. Checksums are only compared if `full`, which reads the whole checkpoint, and once more
    (`again`) the files that differ. They are also compared if the marker with the sizes can't be read.
    """
    path = folder(checkpoints, iteration)
    if _is_damaged(path / MARKER):
        if not has_digests(checkpoints, iteration):
            return f"{path / MARKER} can't be read, so nothing is known of its files"
        full = True
    for name, size in _known_sizes(path).items():
        if not (path / name).exists():
            return f"{path / name} is missing"
        if (found := (path / name).stat().st_size) != size:
            return f"{path / name} has changed since it was written: it has {found} bytes, and had {size}"
    known = _known_digests(path) if full else {}
    if full and not known and has_digests(checkpoints, iteration):
        return f"{path / DIGESTS} can't be read"
    missing = [name for name in known if not (path / name).exists()]
    if missing:
        return f"{path / missing[0]} is missing"
    changed = list(known)
    for look in (read, again):
        changed = [name for name, digest in look(path, changed).items() if digest != known[name]] if changed else []
    return f"{path / changed[0]} has changed since it was written" if changed else None


def unreadable(checkpoints: Path, iteration: int) -> str | None:
    """The first file of a checkpoint that this user may not read. Its content may be as it was."""
    path = folder(checkpoints, iteration)
    forbidden = _of_each(path, sorted(_known_sizes(path)), _is_forbidden)
    return next((str(path / name) for name, is_so in forbidden.items() if is_so), None)


def _is_forbidden(path: Path) -> bool:
    try:
        with contextlib.suppress(FileNotFoundError):  # which is damage
            path.open("rb").close()
    except PermissionError:
        return True
    return False


def distrust(checkpoints: Path, iteration: int) -> Path:
    """Set a damaged checkpoint aside for inspection; it no longer counts. Returns its new path."""
    path = folder(checkpoints, iteration)
    first = path.with_name(f"damaged_{path.name}")
    return path.rename(_free(itertools.chain([first], (Path(f"{first}-{number}") for number in itertools.count(2)))))


def trust_again(checkpoints: Path, iteration: int, aside: str) -> None:
    """Put back a checkpoint that was set aside without being at fault."""
    (checkpoints / aside).rename(folder(checkpoints, iteration))


def keeper(
    checkpoints: Path, verify: bool, keep_last: int | None = None, keep_every: int | None = None
) -> Callable[[], None]:
    """A function, to be called often, that adds the checksums of new checkpoints and then removes old ones.

    A thread does the slow work while the ranks continue.
    """
    looked = time.monotonic()
    worker: threading.Thread | None = None

    def work(iteration: int) -> None:
        delete_retired(checkpoints)
        with contextlib.suppress(OSError):  # it may be removed meanwhile
            if iteration:
                add_digests(checkpoints, iteration)

    def look() -> None:
        nonlocal looked, worker
        if time.monotonic() - looked < LOOK_SECONDS or (worker and worker.is_alive()):
            return
        looked = time.monotonic()
        for _, path in _folders(checkpoints):
            if not _counts(path):  # `mark_complete` has shared the others
                share(path)  # one whose save is cut off is looked into by whoever resumes
        gone = retire(checkpoints, keep_last, keep_every, verify)
        unread = _newest_unread(checkpoints) if verify else 0
        if gone or unread:
            worker = threading.Thread(target=work, args=(unread,), daemon=True)
            worker.start()

    return look


def add_all_digests(checkpoints: Path, read: Reader = read_here) -> None:
    """Record all missing checksums, also of checkpoints that came too fast for `keeper`: any may be exported."""
    while iteration := _newest_unread(checkpoints):
        add_digests(checkpoints, iteration, read)


def evaluations(store: RunStore) -> dict[int, Evaluated]:
    """Each step's last evaluation."""
    events = [event for attempt in store.attempts for event in read_steps(attempt.steps)]
    found = [event for event in events if isinstance(event, Evaluated) and LM_LOSS in event.losses]
    return {event.step: event for event in found}


def require_sound(run: str, store: RunStore, iteration: int) -> None:
    """Refuse a checkpoint whose files have changed since they were written."""
    if problem := damage(store.checkpoints, iteration):
        others = [kept for kept in complete_iterations(store.checkpoints) if kept != iteration]
        remedy = f"export another one (export.checkpoint: {others[-1]})" if others else "train the run again"
        raise InputError(f"run {run}: checkpoint {iteration} is damaged: {problem}; nothing is exported: {remedy}")


def _newest_unread(checkpoints: Path) -> int:
    unread = (number for number in complete_iterations(checkpoints) if not has_digests(checkpoints, number))
    return max(unread, default=0)


def _payload(path: Path) -> list[str]:
    return sorted(
        str(file.relative_to(path)) for file in path.rglob("*") if file.is_file() and file.name not in (MARKER, DIGESTS)
    )


def _sizes(path: Path) -> dict[str, int]:
    return _of_each(path, _payload(path), _size)


def _size(path: Path) -> int:
    """Size of a file. It is opened, because NFS then asks the server; another rank may have just written the file."""
    with path.open("rb") as stream:
        return os.fstat(stream.fileno()).st_size


@functools.lru_cache(maxsize=100_000)
def _bytes(path: Path, marked: int) -> int:
    return sum((_known_sizes(path) or _sizes(path)).values())


@functools.lru_cache(maxsize=100_000)
def _completed(path: Path, marked: int) -> float | None:
    return _mark(path).time


def _known_sizes(path: Path) -> dict[str, int]:
    return _mark(path).files


def _mark(path: Path) -> CheckpointMark:
    """A checkpoint's marker; an empty one if it can't be read, so that no sizes are known."""
    try:
        return read(CheckpointMark, path / MARKER)
    except (FileNotFoundError, ValueError):
        return CheckpointMark()


def _is_damaged(path: Path) -> bool:
    try:
        read_json(path)
    except DamagedError:
        return True
    except FileNotFoundError:
        pass
    return False


def _known_digests(path: Path) -> dict[str, str]:
    try:
        return read_json(path / DIGESTS)
    except (FileNotFoundError, ValueError):
        return {}


def _counts(path: Path) -> bool:
    return (path / MARKER).exists()


def _put_out_of_sight(path: Path) -> None:
    """Rename a folder so that it no longer looks like a checkpoint.

    This doesn't wait for files of an earlier one with the same name to be deleted: it may be large, and NFS may refuse
    to empty a folder in which a dead rank has open files.
    """
    path.rename(_free(path.with_name(f"{REMOVED}{path.name}" + "-again" * times) for times in itertools.count()))


def _free(names: Iterable[Path]) -> Path:
    return next(name for name in names if not name.exists())


def _of_each[Fact](path: Path, names: list[str], look: Callable[[Path], Fact]) -> dict[str, Fact]:
    with ThreadPoolExecutor(READERS) as pool:
        return dict(zip(names, pool.map(lambda name: look(path / name), names), strict=True))


def _folders(checkpoints: Path) -> list[tuple[int, Path]]:
    if not checkpoints.is_dir():
        return []
    found = [(_FOLDER.match(path.name), path) for path in checkpoints.iterdir()]
    return [(int(match[1]), path) for match, path in found if match]
