"""Sources of a corpus: files of JSON lines, text and tables, datasets from the hub, or Python's own source files.

A corpus's files are in the order of its sources, and within a source sorted by path, so that the same files give the
same corpus everywhere. The names of the corpus's own files are also defined here. Standard library only, because the
plan looks for files and needs their names.
"""

from __future__ import annotations

import glob
import os
import re
import sysconfig
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from megaboa.data import pairs
from megaboa.errors import InputError
from megaboa.files import digest, file_digest, read_json, write_json
from megaboa.records import CorpusSpec, SourceFile, TextSpec

STDLIB = "python-stdlib"
HUB = "hf:"
# Kind of file by suffix, without .gz or .zst.
KINDS = {
    ".jsonl": "jsonl",
    ".json": "jsonl",
    ".ndjson": "jsonl",
    ".txt": "text",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
PACKED = {".gz": "gz", ".zst": "zst"}
TABLES = ("parquet", "arrow")
SUFFIXES = (*KINDS, *(kind + packed for kind in (".jsonl", ".txt") for packed in PACKED))
# Folders of the standard library with installed packages, test data, or build leftovers.
NOT_STDLIB = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "lib2to3"}
REMEMBERED_BYTES = 64 << 20  # for smaller files, reading again is faster than caching the checksum


def file_of(path: Path, kind: str, packed: str | None = None) -> SourceFile:
    status = path.stat()
    return SourceFile(path=str(path), kind=kind, packed=packed, size=status.st_size, changed=status.st_mtime_ns)


def as_list(source: str | list[str]) -> list[str]:
    return [source] if isinstance(source, str) else list(source)


def hub_id(source: str) -> str | None:
    """`owner/name` of a dataset on the hub; None if the source isn't one."""
    return source.removeprefix(HUB) if source.startswith(HUB) else None


def placed(source: str) -> str:
    """A source as it is compared: of a local path or glob the absolute one."""
    path = os.path.normpath(os.path.expanduser(source))  # noqa: PTH111 (may be a pattern)
    return path if path == STDLIB or hub_id(path) else os.path.abspath(path)  # noqa: PTH100


def paths(source: str | list[str]) -> list[str]:
    """The files whose change makes a corpus outdated; none for sources without files."""
    local = [one for one in as_list(source) if one != STDLIB and not hub_id(one)]
    return [file.path for one in local for file in files_of(one, split=None)]


def files(spec: TextSpec) -> list[SourceFile]:
    """All files of a corpus, in the order of their documents, without checksums."""
    if isinstance(spec, CorpusSpec) and spec.pairs:
        return pairs.files(spec.pairs)
    found = []
    for source in as_list(spec.source):
        if name := hub_id(source):
            from megaboa.data import stream

            found += stream.files(name, spec.subset, spec.split, spec.revision)
        else:
            found += files_of(source, spec.split)
    for file in found:
        if file.size == 0 and (file.packed or file.kind in TABLES):
            raise InputError(f"{file.path}: empty, so not a valid {file.packed or file.kind} file: copy it again")
    return found


def files_of(source: str, split: str | None) -> list[SourceFile]:
    if source == STDLIB:
        return [file_of(path, "source") for path in _stdlib_files()]
    if Path(source).is_dir():
        return [file_of(path, "arrow") for path in saved_dataset(Path(source), split)]
    # Path.glob doesn't support absolute patterns.
    named = [source] if Path(source).is_file() else glob.iglob(source, recursive=True)  # noqa: PTH207
    found, folders = [], set()
    for path in sorted(set(map(Path, named))):
        if folders.isdisjoint(path.parents):  # otherwise it belongs to a folder that was taken as a whole
            if path.is_file():
                found.append(file_of(path, *kind_of(path)))
            elif is_saved(path):
                folders.add(path)
                found += [file_of(part, "arrow") for part in saved_dataset(path, split)]
    if not found:
        raise InputError(
            f"corpus source {source!r}: no such file; give a file, a glob, a folder that `save_to_disk` wrote, "
            f"`{HUB}owner/name`, or {STDLIB!r}{_if_pair(source)}"
        )
    return found


def kind_of(path: Path) -> tuple[str, str | None]:
    packed = PACKED.get(path.suffix)
    suffix = path.with_suffix("").suffix if packed else path.suffix
    kind = KINDS.get(suffix)
    if kind is None or (packed and kind in TABLES):
        known = f"known are {', '.join(SUFFIXES)}"
        raise InputError(f"corpus source {path}: unknown kind of file; {known}{_if_pair(str(path))}")
    return kind, packed


def _if_pair(source: str) -> str:
    prefix = pairs.without_ending(source)
    return f"; tokens in Megatron's format are named by `megatron: {prefix}`" if pairs.is_pair(source) else ""


def is_saved(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("state.json", "dataset_dict.json"))


def saved_dataset(folder: Path, split: str | None) -> list[Path]:
    """The Arrow files of a folder that `datasets` wrote by `save_to_disk`."""
    if (parts := folder / "dataset_dict.json").is_file():
        splits = read_json(parts)["splits"]
        if split is None:  # asked by the plan: everything that might be read
            return [path for name in splits for path in saved_dataset(folder / name, None)]
        if split not in splits:
            raise InputError(f"corpus source {folder}: has no split {split!r}; set `split` to one of {splits}")
        folder = folder / split
    if not (state := folder / "state.json").is_file():
        raise InputError(f"corpus source {folder}: a folder without state.json; give a glob of the files in it")
    content = read_json(state)
    if content.get("_indices_files"):
        raise InputError(
            f"corpus source {folder}: its rows are picked by an indices file; call flatten_indices() and save it again"
        )
    return [folder / file["filename"] for file in content["_data_files"]]


def listing(found: list[SourceFile], cache: Path, threads: int = 1) -> list[SourceFile]:
    """The files with their SHA-256. Files that haven't changed since they were last read aren't read again."""
    with ThreadPoolExecutor(threads) as pool:
        sums = list(pool.map(lambda file: file.sha256 or _remembered_digest(file, cache), found))
    return [replace(file, sha256=sha256) for file, sha256 in zip(found, sums, strict=True)]


def fingerprint(listed: Iterable[SourceFile]) -> list[str]:
    """Digests of the files' content, regardless of paths."""
    return [f"{file.kind} {file.sha256}" for file in listed]


def _remembered_digest(file: SourceFile, cache: Path) -> str:
    if file.size < REMEMBERED_BYTES:
        return file_digest(file.path)
    known = cache / f"{digest(os.path.realpath(file.path))[:24]}.json"
    stamp = {"size": file.size, "changed": file.changed}
    try:
        content = read_json(known)
        if content["stamp"] == stamp:
            return content["sha256"]
    except (OSError, ValueError, KeyError):
        pass
    sha256 = file_digest(file.path)
    write_json(known, {"path": os.path.realpath(file.path), "stamp": stamp, "sha256": sha256})
    return sha256


def _stdlib_files() -> list[Path]:
    """Python's own modules, without tests and installed packages."""
    found = []
    for folder, subfolders, names in os.walk(sysconfig.get_path("stdlib")):
        subfolders[:] = [name for name in subfolders if name not in NOT_STDLIB and not name.startswith("config-")]
        found += [f"{folder}/{name}" for name in names if name.endswith(".py")]
    # Sorted as text, because comparing 600 paths as Path objects takes a tenth of a second.
    return list(map(Path, sorted(found)))


def file_stem(name: str, keys: Sequence[str], key: str) -> str:
    """Name of a text key's files, without suffix; with several keys as in Megatron's own tool."""
    return name if len(keys) == 1 else f"{name}_{re.sub(r'[^A-Za-z0-9]+', '_', key)}"


def file_stems(name: str, text_key: str | Sequence[str]) -> list[str]:
    keys = [text_key] if isinstance(text_key, str) else text_key
    return [file_stem(name, keys, key) for key in keys]
