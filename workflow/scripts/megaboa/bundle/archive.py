"""Zip files: the same bytes for the same content, and nothing outside of the folder that they are unpacked to."""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from megaboa.data.errors import InputError
from megaboa.files import write_bytes

_DATE = (1980, 1, 1, 0, 0, 0)
_MODE = 0o100644 << 16


def pack(files: Mapping[str, bytes]) -> bytes:
    """Sorted by name, without dates, owners and modes: equal content is an equal archive."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name in sorted(files):
            entry = zipfile.ZipInfo(name, _DATE)
            entry.compress_type, entry.external_attr, entry.create_system = zipfile.ZIP_DEFLATED, _MODE, 3
            archive.writestr(entry, files[name])
    return buffer.getvalue()


def unpack(path: Path) -> dict[str, bytes]:
    """The files of an archive; raises InputError for one that is damaged, or would leave its folder."""
    try:
        with zipfile.ZipFile(path) as archive:
            files = {entry.filename: archive.read(entry) for entry in archive.infolist() if not entry.is_dir()}
    except (FileNotFoundError, IsADirectoryError):
        raise InputError(f"{path}: there is no such file") from None
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, NotImplementedError) as error:
        raise InputError(f"{path}: is no whole zip file ({error}): copy or download it again") from None
    for name in files:
        if name.startswith("/") or "\\" in name or ".." in PurePosixPath(name).parts:
            raise InputError(f"{path}: holds the file {name!r}, which would be written outside of its folder: not used")
    return files


def write(files: Mapping[str, bytes], folder: Path) -> None:
    for name, content in files.items():
        write_bytes(folder / name, content, durable=False)
