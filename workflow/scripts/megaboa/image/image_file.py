"""Checks of image files: valid, complete and for this machine, before anything is submitted; and still the one that its
manifest describes, before anything is started in it."""

from __future__ import annotations

import os
import platform
import shutil
import struct
import subprocess
from pathlib import Path

from megaboa import files
from megaboa.records import Image

AGAIN = "call `snakemake --forcerun image`"
_SQUASHFS = b"hsqs"
_SIF = b"SIF_MAGIC"
_MACHINES = {3: "i386", 62: "x86_64", 183: "aarch64", 243: "riscv64", 21: "ppc64le"}  # e_machine of ELF
_EVERYWHERE = ("usr/bin/env", "bin/env", "usr/bin/bash", "bin/bash", "bin/busybox")


def problem(path: Path) -> str | None:
    """Why a file can't be run as an image, in one sentence; None if it can."""
    try:
        with path.open("rb") as stream:
            head = stream.read(96)
            size = os.fstat(stream.fileno()).st_size
    except FileNotFoundError:
        return f"there is no image {str(path)!r}: check the path, or let the workflow build one (image.build)"
    except IsADirectoryError:
        return f"{str(path)!r} is a folder, not an image file"
    except OSError as error:
        return f"the image {str(path)!r} can't be read ({error.strerror}): check its permissions"
    if path.suffix == ".sif":
        return None if _SIF in head else f"{str(path)!r} is not a .sif image: its header is different"
    if not head.startswith(_SQUASHFS):
        return f"{str(path)!r} is not a .sqsh image: its header is not that of a squashfs"
    (used,) = struct.unpack_from("<Q", head, 40)  # in the superblock: size of the file system in bytes
    if used > size:
        return f"the image {str(path)!r} is truncated: it has {size:,} of {used:,} bytes; copy or build it again"
    return None


def architecture(path: Path) -> str | None:
    """The architecture of the programs in a .sqsh; None if it is unknown (no unsquashfs, or another format)."""
    if path.suffix != ".sqsh" or not shutil.which("unsquashfs"):
        return None
    for name in _EVERYWHERE:
        done = subprocess.run(["unsquashfs", "-cat", str(path), name], capture_output=True)
        if done.returncode == 0 and done.stdout.startswith(b"\x7fELF"):
            return machine_of(done.stdout[:20])
    return None


def machine_of(elf: bytes) -> str:
    order = "<" if elf[5] == 1 else ">"
    (number,) = struct.unpack_from(f"{order}H", elf, 18)
    return _MACHINES.get(number, f"machine {number}")


def wrong_architecture(path: Path, given: str | None = None) -> str | None:
    """A sentence if the image isn't for the given architecture, or else this machine's; None if it is, or that is
    unknown."""
    wanted, found = given or platform.machine(), architecture(path)
    if found is None or found == wanted:
        return None
    remedy = f"build or fetch it for {wanted}, or set image.architecture to {found}"
    who = "image.architecture" if given else "this machine"
    return f"the image {str(path)!r} is for {found}, and {who} is {wanted}: {remedy}"


def as_recorded(manifest: Image) -> bool:
    """Whether size and time stamp are as recorded; manifests of older versions have no time stamp."""
    try:
        found = Path(manifest.path).stat()
    except OSError:
        return False
    return (found.st_size, found.st_mtime_ns) == (manifest.bytes, manifest.mtime_ns or found.st_mtime_ns)


def changed(manifest: Image) -> str | None:
    """A sentence if the file is gone or has changed; None otherwise. If only the time stamp differs, the content
    decides."""
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
