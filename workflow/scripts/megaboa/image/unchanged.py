"""Is the image file still the one that its manifest tells of? Asked before anything is started in it."""

from __future__ import annotations

from pathlib import Path

from megaboa import files
from megaboa.records import Image

AGAIN = "call `snakemake --forcerun image`"


def as_recorded(manifest: Image) -> bool:
    """By size and time stamp alone; manifests of older versions have no time stamp."""
    try:
        found = Path(manifest.path).stat()
    except OSError:
        return False
    return (found.st_size, found.st_mtime_ns) == (manifest.bytes, manifest.mtime_ns or found.st_mtime_ns)


def problem(manifest: Image) -> str | None:
    """One sentence where it is gone, or another one. A new time stamp alone is none: then the content decides."""
    path = Path(manifest.path)
    try:
        size = path.stat().st_size
        if size != manifest.bytes:
            what = f"has {size} bytes, and its manifest says {manifest.bytes}"
        elif as_recorded(manifest) or files.file_digest(path) == manifest.sha256:
            return None
        else:
            what = "has other content than when it was tested"
    except OSError as error:
        return f"the image {path} can't be read ({error.strerror}). Make it again: {AGAIN}."
    return f"the image {path} {what}. Another image is another run: {AGAIN}."
