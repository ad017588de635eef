"""Zip files: reproducible bytes for the same content, and safe unpacking."""

from __future__ import annotations

import contextlib
import hashlib
import io
import lzma
import stat
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath

from megaboa.errors import InputError

_DATE = (1980, 1, 1, 0, 0, 0)
_MODE = 0o100644 << 16
_PIECE = 1 << 20
MOST_BYTES, MOST_ENTRIES = 4_000_000_000, 100_000  # of an unpacked bundle; bundles contain no checkpoints


def pack(files: Mapping[str, bytes]) -> bytes:
    """Pack files sorted by name, without dates, owners and modes, so that equal content makes an equal archive."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name in sorted(files):
            entry = zipfile.ZipInfo(name, _DATE)
            entry.compress_type, entry.external_attr, entry.create_system = zipfile.ZIP_DEFLATED, _MODE, 3
            archive.writestr(entry, files[name])
    return buffer.getvalue()


class Archive(Mapping[str, bytes]):
    """The files of a zip file, each read on demand. Raises InputError if the archive is damaged.

    Files that would leave the folder or fill the disk are refused by the list of names and sizes, before anything is
    read; `zipfile` never returns more bytes of a file than listed.
    """

    def __init__(self, path: Path):
        self._path = path
        with _whole(path):
            self._zip = zipfile.ZipFile(path)
        if problem := _problem(self._zip.infolist()):
            raise InputError(f"{path}: {problem}: not used")
        self._entries = {entry.filename: entry for entry in self._zip.infolist() if not entry.is_dir()}

    def __getitem__(self, name: str) -> bytes:
        return b"".join(self._pieces(self._entries[name]))

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def digest(self, name: str) -> str:
        sha = hashlib.sha256()
        for piece in self._pieces(self._entries[name]):
            sha.update(piece)
        return sha.hexdigest()

    def unpack(self, names: Iterable[str], folder: Path) -> None:
        for name in names:
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_name(f".{path.name}.part")
            with partial.open("wb") as stream:
                stream.writelines(self._pieces(self._entries[name]))
            partial.replace(path)

    def unpack_missing(self, names: Iterable[str], folder: Path) -> None:
        """Unpack the files that the folder doesn't have, so that others keep their time stamps."""
        self.unpack((name for name in names if not (folder / name).exists()), folder)

    def _pieces(self, entry: zipfile.ZipInfo) -> Iterator[bytes]:
        with _whole(self._path), self._zip.open(entry) as stream:
            while piece := stream.read(_PIECE):
                yield piece


@contextlib.contextmanager
def _whole(path: Path) -> Iterator[None]:
    """Report the errors of a damaged archive as one sentence."""
    try:
        yield
    except FileNotFoundError:
        raise InputError(f"{path}: there is no such file") from None
    except IsADirectoryError:
        raise InputError(f"{path}: is a folder: name the zip file that `snakemake bundle` wrote") from None
    except (zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, OSError, RuntimeError, ValueError) as error:
        raise InputError(f"{path}: is a corrupt or truncated zip file ({error}): copy or download it again") from None


def _problem(entries: Sequence[zipfile.ZipInfo]) -> str | None:
    """Why an archive with these entries is not unpacked; None if it is."""
    size = sum(entry.file_size for entry in entries)
    if len(entries) > MOST_ENTRIES or size > MOST_BYTES:
        return (
            f"holds {len(entries)} files of {size / 1e9:.1f} GB, more than {MOST_ENTRIES} or {MOST_BYTES / 1e9:.0f} GB"
        )
    names: set[str] = set()
    for entry in entries:
        name = entry.filename.removesuffix("/")
        kind = stat.S_IFMT(entry.external_attr >> 16)
        if "\\" in name or {"", ".", ".."} & set(name.split("/")):
            return f"holds the file {entry.filename!r}, which would be written outside of its folder"
        if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
            return f"holds {name!r}, which is a link or another special file"
        if entry.flag_bits & 1:
            return f"holds {name!r} encrypted; ask for a bundle without a password"
        if name in names:
            return f"holds {name!r} twice"
        names.add(name)
    files = {entry.filename for entry in entries if not entry.is_dir()}
    above = (str(parent) for name in names for parent in PurePosixPath(name).parents)
    if both := next((name for name in above if name in files), None):
        return f"holds {both!r} as a file and as a folder"
    return None
