"""Documents from text files: JSON lines, plain text, or the sources of Python's own standard library.

The order of documents is the order of the sorted paths, so that the same files give the same corpus anywhere.
Standard library only.
"""

from __future__ import annotations

import glob
import gzip
import itertools
import json
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from megaboa.data.errors import InputError
from megaboa.files import file_digest

STDLIB = "python-stdlib"
SUFFIXES = (".jsonl", ".jsonl.gz", ".txt")
# Folders of the standard library that hold other people's packages, data files of tests, or build leftovers.
NOT_STDLIB = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "lib2to3"}


def files(source: str) -> list[Path]:
    """The files of a source, in the order in which their documents come."""
    if source == STDLIB:
        return _stdlib_files()
    # Path.glob takes no absolute patterns.
    named = [source] if Path(source).is_file() else glob.iglob(source, recursive=True)  # noqa: PTH207
    found = sorted(path for path in map(Path, named) if path.is_file())
    if not found:
        raise InputError(f"corpus source {source!r}: no such file; give a file, a glob, or {STDLIB!r}")
    for path in found:
        if not path.name.endswith(SUFFIXES):
            raise InputError(f"corpus source {path}: unknown kind of file; known are {', '.join(SUFFIXES)}")
    return found


def documents(source: str, text_key: str = "text", limit: int | None = None) -> Iterator[str]:
    """The first `limit` documents of a source (all of them without a limit); blank ones are passed over.

    A .jsonl file holds one document per line, under `text_key`; any other file is one document.
    """
    texts = itertools.chain.from_iterable(
        _texts(path, text_key, skip_binary=source == STDLIB) for path in files(source)
    )
    empty = True
    for text in itertools.islice((text for text in texts if text.strip()), limit):
        empty = False
        yield text
    if empty:
        raise InputError(f"corpus source {source!r}: there is no text in it")


def fingerprint(source: str) -> list[str]:
    """SHA-256 of every file of a source, in order: what its text is, wherever the files lie."""
    return [file_digest(path) for path in files(source)]


def _texts(path: Path, text_key: str, skip_binary: bool) -> Iterator[str]:
    if path.name.endswith((".jsonl", ".jsonl.gz")):
        yield from _json_texts(path, text_key)
        return
    try:
        yield path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        if not skip_binary:
            raise InputError(f"{path}: not UTF-8 text (byte {error.start}); convert it first") from error


def _json_texts(path: Path, text_key: str) -> Iterator[str]:
    with _open(path) as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield _json_text(line, text_key, f"{path}:{number}")


def _json_text(line: bytes, text_key: str, where: str) -> str:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise InputError(f"{where}: not a line of JSON ({error}); mend or remove the line") from error
    if not isinstance(record, dict):
        raise InputError(
            f"{where}: a JSON {type(record).__name__}, where an object with the key {text_key!r} is needed"
        )
    if text_key not in record:
        raise InputError(f"{where}: no key {text_key!r}; set the corpus's `text_key` to one of {sorted(record)}")
    if not isinstance(record[text_key], str):
        kind = type(record[text_key]).__name__
        raise InputError(f"{where}: {text_key!r} holds {kind}, not a string; set `text_key` to the field with the text")
    return record[text_key]


def _open(path: Path) -> IO[bytes]:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")


def _stdlib_files() -> list[Path]:
    """Python's own modules, packages' tests and installed packages left out."""
    root = Path(sysconfig.get_path("stdlib"))
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in NOT_STDLIB and not name.startswith("config-")]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())
