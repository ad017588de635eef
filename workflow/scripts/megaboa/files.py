"""Small files, written atomically. Standard library only."""

from __future__ import annotations

import ast
import atexit
import contextlib
import hashlib
import json
import os
import shutil
import stat
import tempfile
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

from megaboa.errors import InputError

SCRIPTS = {".py", ".sh", ".yaml", ".yml", ".json", ".toml"}  # suffixes of files, as opposed to installed programs
SHARED = stat.S_ISGID | stat.S_IWGRP  # mode of a folder that a group shares: new files get its group


def canonical(value: Any) -> str:
    """JSON that is the same text for the same value: sorted keys, one line feed at the end."""
    return json.dumps(value, sort_keys=True, indent=1, ensure_ascii=False) + "\n"


def digest(value: Any) -> str:
    """SHA-256 of a value's canonical JSON."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()


def file_digest(path: str | Path) -> str:
    with Path(path).open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def folder_digests(folder: str | Path) -> dict[str, str]:
    """SHA-256 of every file below a folder, by its relative path."""
    root = Path(folder)
    return {str(p.relative_to(root)): file_digest(p) for p in sorted(root.rglob("*")) if p.is_file()}


class DamagedError(InputError, ValueError):
    """A file that should hold JSON, and doesn't."""


def read_json(path: str | Path) -> Any:
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise DamagedError(
            f"{path} is not valid JSON ({error}): restore it, or remove it if it is below results/, and call again"
        ) from error


def share(path: str | Path) -> None:
    """Give a new file or folder to the group, with its owner's rights, if a group shares the folder that it is in.

    Whatever the umask, as git does with `core.sharedRepository`: one user's umask would lock out the others. A folder
    that is shared so shares what is made in it. Elsewhere, and to other groups, no right is given.
    """
    path = Path(path)
    with contextlib.suppress(OSError):  # somebody else's, or gone
        folder, own = path.parent.stat(), path.lstat()
        if folder.st_mode & SHARED != SHARED or own.st_gid != folder.st_gid or stat.S_ISLNK(own.st_mode):
            return
        mode = stat.S_IMODE(own.st_mode)
        if (wanted := mode | (mode & stat.S_IRWXU) >> 3) != mode:
            path.chmod(wanted)


def share_all(folder: str | Path) -> None:
    """`share` a folder and everything in it, for what others than this module have written: ranks, libraries."""
    folder = Path(folder)
    share(folder)
    try:
        shared = folder.stat().st_mode & SHARED == SHARED
    except OSError:
        return
    # Folders before what is in them, because only then are they shared themselves.
    for root, folders, names in os.walk(folder) if shared else ():
        for name in (*folders, *names):
            share(Path(root, name))


def make_folder(path: str | Path) -> None:
    """Make a folder, and those above it, unless it is there; `share` those that are new."""
    path = Path(path)
    try:
        path.mkdir()
    except FileNotFoundError:
        if path.parent == path:
            raise
        make_folder(path.parent)
        path.mkdir(exist_ok=True)
    except OSError:  # it may be there, and the file system read-only
        if not path.is_dir():
            raise
        return
    share(path)


def temporary_folder(prefix: str) -> Path:
    """A folder that is removed when the process ends."""
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def touch(path: str | Path) -> None:
    """Make an empty file unless there is one, whoever owns it."""
    path = Path(path)
    if not path.exists():
        path.touch()
        share(path)


def write_bytes(path: str | Path, data: bytes, durable: bool = True) -> None:
    """Write a whole file or nothing: a temporary file next to it, flushed to disk, then renamed.

    A file that is replaced keeps its mode and group. `durable=False` doesn't wait for the disk: for files whose content
    is compared and written again anyway.
    """
    path = Path(path)
    make_folder(path.parent)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        with temporary.open("wb") as stream:
            stream.write(data)
            if durable:
                flush(stream)
        _keep_rights(path, temporary)
        share(temporary)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _keep_rights(before: Path, now: Path) -> None:
    """Give a file that replaces another one its group and mode, if this user may give it that group."""
    with contextlib.suppress(OSError):
        old, new = before.lstat(), now.lstat()
        if stat.S_ISREG(old.st_mode):
            if old.st_gid != new.st_gid:
                os.chown(now, -1, old.st_gid)
            now.chmod(stat.S_IMODE(old.st_mode) & 0o777)


def flush(stream: IO[bytes]) -> None:
    """Flush a stream to disk and wait for it."""
    stream.flush()
    os.fsync(stream.fileno())


def write_text(path: str | Path, text: str) -> None:
    write_bytes(path, text.encode())


def write_json(path: str | Path, value: Any) -> None:
    write_text(path, canonical(value))


def write_if_changed(path: str | Path, text: str, durable: bool = False) -> bool:
    """Write a file unless it has this text already, which preserves its time stamp; return whether it was written."""
    data = text.encode()
    try:
        if Path(path).read_bytes() == data:
            return False
    except FileNotFoundError:
        pass
    write_bytes(path, data, durable)
    return True


def is_ours_alone(folder: Path) -> bool:
    """Whether a folder, made here if it is missing, belongs to this user alone.

    In a directory that users share, somebody else may have created it first.
    """
    try:
        make_folder(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.stat().st_uid != os.getuid() or folder.is_symlink():
            return False
        if folder.stat().st_mode & 0o022:
            folder.chmod(0o700)
    except OSError:
        return False
    return True


def link(target: str | Path, path: str | Path) -> None:
    """Point a symbolic link at `target`, atomically replacing an older link, unless that leads there.

    A relative link is resolved from the folder it is really in, so the path is taken between resolved folders.
    """
    path = Path(path)
    make_folder(path.parent)
    target = Path(target)
    way = os.path.relpath(target.parent.resolve() / target.name, path.parent.resolve())
    if path.is_symlink() and str(path.readlink()) == way:
        return  # what reads through it compares its time
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(way)
    temporary.replace(path)


def append_line(path: str | Path, text: str, durable: bool = True) -> None:
    """Append one line and flush it to disk, so that it is safe once this returns.

    If the last line is torn (its writer was killed, the disk was full), a line feed is written first, so that the torn
    line spoils no other. `durable=False` doesn't wait for the disk: for lines that nothing relies on.
    """
    handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        size = os.fstat(handle).st_size
        if not size:
            share(path)
        torn = size > 0 and os.pread(handle, 1, size - 1) != b"\n"
        write_all(handle, ("\n" if torn else "") + text + "\n")
        if durable:
            os.fsync(handle)
    finally:
        os.close(handle)


def write_all(handle: int, text: str) -> None:
    """Write all of a text. A single os.write may write only a part and return its length; if the disk is full, the next
    one raises the error."""
    rest = text.encode()
    while rest:
        rest = rest[os.write(handle, rest) :]


def read_jsonl(path: str | Path) -> list[Any]:
    """The lines of a JSON-lines file, without torn ones (their writer was killed)."""
    path = Path(path)
    if not path.exists():
        return []
    return _sound_lines(path.read_text(encoding="utf-8", errors="replace").split("\n"))


def read_jsonl_tail(path: str | Path, size: int) -> list[Any]:
    """The complete lines in the last `size` bytes of a JSON-lines file, without reading the rest of it."""
    path = Path(path)
    if not path.exists():
        return []
    with path.open("rb") as stream:
        start = max(stream.seek(0, os.SEEK_END) - size, 0)
        # One byte more, to see whether the tail starts at the start of a line.
        stream.seek(max(start - 1, 0))
        text = stream.read()
    return _sound_lines(text.split(b"\n")[1 if start else 0 : -1])


def _sound_lines(lines: Iterable[str | bytes]) -> list[Any]:
    found = []
    for line in lines:
        with contextlib.suppress(json.JSONDecodeError):  # torn by a full disk or a kill
            found.append(json.loads(line))
    return found


def inside(path: Path, *folders: Path) -> str | None:
    """The path relative to the first of these folders that it is in; None if it is hidden (`.venv`) or elsewhere."""
    place = path.resolve()
    for folder in (folder.resolve() for folder in folders):
        if place.is_relative_to(folder):
            parts = place.relative_to(folder).parts
            return "/".join(parts) if parts and not any(part.startswith(".") for part in parts) else None
    return None


def is_python(name: str) -> bool:
    """Whether a recipe or profiler is a file of the user's, not the name of a known one."""
    return name.endswith(".py")


def python_problem(path: str) -> str | None:
    """What is wrong with a file of Python code, as far as it shows without executing it; None if nothing is."""
    file = Path(path).expanduser()
    if not file.is_file():
        return f"there is no file {path!r}: check the path"
    try:
        ast.parse(file.read_bytes(), path)
    except (SyntaxError, ValueError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        return f"{path}{line}: is not valid Python ({getattr(error, 'msg', error)})"
    except OSError as error:
        return f"{path}: can't be read ({error.strerror})"
    return None
