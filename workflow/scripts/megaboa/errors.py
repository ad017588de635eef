"""Errors that a user can fix: commands print their one sentence without a traceback. Standard library only."""

from __future__ import annotations

import contextlib
import errno
import grp
import os
import pwd
import re
import shlex
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

NO_ROOM = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the quota is used up",
    errno.EFBIG: "files may not be that large here (`ulimit -f`)",
}
_PAYLOAD = re.compile("[0-9a-f]{12}")  # the last part of a payload's path in a store (`store.folder`)


class InputError(Exception):
    """What is wrong, where, and what to do about it, in one sentence."""


@contextlib.contextmanager
def naming(key: str) -> Iterator[None]:
    """Put the experiment's key before the sentence of an `InputError` from code that doesn't know it."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{key}: {error}") from error


@contextlib.contextmanager
def disk_full(where: object, remedy: str) -> Iterator[None]:
    """Turn the system's refusal to write more into an `InputError`."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        if (refused := no_room(error)) is None:
            raise
        raise InputError(f"{_nothing_kept(where, refused)}. {remedy}") from error


def _nothing_kept(where: object, refused: int) -> str:
    return f"{where}: {NO_ROOM[refused]}; no partial file was kept"


def no_room(error: BaseException) -> int | None:
    """The errno of a full disk or quota, if that caused an exception; torch's own exceptions don't mention it."""
    return next((seen.errno for seen in led_to(error) if isinstance(seen, OSError) and seen.errno in NO_ROOM), None)


def led_to(error: BaseException) -> Iterator[BaseException]:
    """An exception and its chain of causes, because libraries wrap the original error in one of their own."""
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or seen.__context__


@contextlib.contextmanager
def one_sentence(out: str | Path | None = None) -> Iterator[None]:
    """End the process with the sentence of an `InputError`, of a file that this user may not use, or of a full disk.

    `out`: the file that is made.

    Other exceptions keep their traceback.
    """
    try:
        yield
    except InputError as error:
        sys.exit(f"error: {error}")
    except PermissionError as error:
        sys.exit(f"error: {forbidden(error)}")
    except Exception as error:
        if (refused := no_room(error)) is None:
            raise
        said = _nothing_kept(f"making {out}", refused) if out else NO_ROOM[refused]
        sys.exit(f"error: {said}. Free some space, and call again")


def forbidden(error: PermissionError) -> str:
    """The file that this user may not use, or its folder, if it could not be made; of a process only what is said."""
    if error.filename is None:
        return str(error)
    place = existing(Path(os.fsdecode(error.filename)))
    if error.errno == errno.EPERM:
        return f"{place}: {error.strerror}{_for_owners(place)}"
    return f"{place}: {error.strerror}: give this user the right to it, and call again{remedy(place)}"


def existing(path: Path) -> Path:
    """A path, or the innermost folder above it that is there; absolute."""
    path = path.absolute()
    return next((there for there in (path, *path.parents) if os.path.lexists(there)), path)


def remedy(place: Path) -> str:
    """Whose a file or folder is, and the command with which its owner lets a group use it; empty if unknown.

    In a payload, such as a run, the command is about all of it: one is enough. Elsewhere it opens this place alone.
    """
    try:
        found = place.stat()
    except OSError:
        return ""
    owner, whose = _name(pwd.getpwuid, found.st_uid), _whose(found)
    if found.st_uid == os.geteuid():
        return f"{whose}: {_chmod('u+rwX', place)}"
    if found.st_gid in (os.getegid(), *os.getgroups()):
        return f"{whose}: {owner} can call {_chmod('g+rwX', place)}"
    return f"{whose}, in which this user isn't"


def _for_owners(place: Path) -> str:
    """Why a user may not do what only owners may, such as remove files where the sticky bit is set; the remedy."""
    try:
        found, folders = place.stat(), {one: one.stat() for one in (place, place.parent)}
    except OSError:
        return ""
    if found.st_uid == os.geteuid():
        return ": it is this user's, so its attributes (`lsattr`) or its file system refuse this"
    for folder, its in folders.items():
        if its.st_mode & stat.S_ISVTX and its.st_uid != os.geteuid():
            said = f": {folder} has the sticky bit, so only owners remove or replace files there"
            if its.st_mode & stat.S_IWOTH:  # such as /tmp, which needs the bit
                return f"{said}: ask user {_name(pwd.getpwuid, found.st_uid)}"
            return f"{said}: {_name(pwd.getpwuid, its.st_uid)} can call {_chmod('-t', folder)}"
    return f": only its owner may do this{_whose(found)}"


def _whose(found: os.stat_result) -> str:
    owner, group = _name(pwd.getpwuid, found.st_uid), _name(grp.getgrgid, found.st_gid)
    return f". It belongs to user {owner} and group {group}, with mode {stat.filemode(found.st_mode)}"


def _chmod(mode: str, place: Path) -> str:
    within = place.resolve()
    payload = next((one for one in (within, *within.parents) if _is_payload(one)), None)
    return f"chmod {'-R ' if payload else ''}{mode} {shlex.quote(str(payload or within))}"


def _is_payload(path: Path) -> bool:
    """Whether a folder is a payload of a store: one of a run has its identity, the others a lock next to them."""
    marks = (path / "identity.json", path.parent / f".{path.name}.lock")  # `RunStore.identity`, `store.building`
    return bool(_PAYLOAD.fullmatch(path.name)) and any(map(os.path.lexists, marks))


def _name(look_up: Callable[[int], Sequence[Any]], number: int) -> str:
    """The name of a user or a group; its number where it has none, as in a container."""
    try:
        return look_up(number)[0]
    except KeyError:
        return str(number)
