"""From an image in an engine's storage to one file that a runtime starts: .sqsh or .sif."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from megaboa import files
from megaboa.errors import InputError
from megaboa.image import engines, tools

# enroot starts a container through this file, which its own import writes too.
RC = '#!/bin/sh\n[ "$#" -gt 0 ] && exec "$@"\nexec /bin/sh\n'
# Other users' files of a rootless engine are readable in its own namespace only.
_SQUASH_BUILDAH = 'root=$(buildah mount "$1") && shift && exec mksquashfs "$root" "$@"'


def to_file(engine: str, image: str, target: Path) -> None:
    """Write the image to `target`; what kind of file follows from its name."""
    if target.suffix == ".sif":
        _to_sif(engine, image, target)
    else:
        _to_sqsh(engine, image, target)
    with target.open("rb+") as stream:
        os.fsync(stream.fileno())


def _to_sif(engine: str, image: str, target: Path) -> None:
    tools.require("apptainer", "install it, or set image.runtime to pyxis")
    archive = target.with_suffix(".tar")
    tools.call(engines.archive_command(engine, image, archive), "saving the image")
    tools.call(sif_command(engines.archive_source(engine, archive), target), "turning the image into .sif", image)
    archive.unlink()


def sif_command(source: str, target: Path) -> list[str]:
    return ["apptainer", "build", "--force", str(target), source]


def _to_sqsh(engine: str, image: str, target: Path) -> None:
    source = engines.enroot_source(engine, image)
    if source and shutil.which("enroot"):
        tools.call(["enroot", "import", "--output", str(target), source], "turning the image into .sqsh", image)
        return
    tools.require("mksquashfs", "install squashfs-tools, or enroot")
    with _container(engine, image, target) as container:
        if engine == "buildah":
            command = ["sh", "-c", _SQUASH_BUILDAH, "sh", container, str(target), *engines.squash_options()]
            prefix = [] if os.geteuid() == 0 else ["buildah", "unshare"]
            tools.call([*prefix, *command], "turning the image into .sqsh")
        else:
            _squash_stream([engine, "export", container], target)


def _squash_stream(command: list[str], target: Path) -> None:
    """The root file system as a tar stream, never unpacked."""
    export = tools.start(command)
    try:
        squash = ["mksquashfs", "-", str(target), "-tar", *engines.squash_options()]
        tools.call(squash, "turning the image into .sqsh", feed=export)
        if export.wait():
            raise InputError(f"`{' '.join(command)}` failed: the image could not be read; its last lines say why")
    finally:
        export.kill()
        export.wait()


@contextlib.contextmanager
def _container(engine: str, image: str, target: Path) -> Iterator[str]:
    """A container of the image that is never started, with the files that enroot looks for."""
    name = f"megaboa-{files.digest(str(target.absolute()))[:12]}"
    remove = engines.remove_command(engine, name)
    subprocess.run(remove, capture_output=True)  # what a killed build has left
    tools.output(engines.create_command(engine, image, name))
    try:
        variables = engines.variables(engine, tools.output(engines.inspect_command(engine, image)))
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            etc = Path(folder, "etc")
            etc.mkdir()
            (etc / "environment").write_text(environment_file(variables))
            (etc / "rc").write_text(RC)
            (etc / "rc").chmod(0o755)
            tools.output(engines.copy_command(engine, name, Path(folder)))
        yield name
    finally:
        subprocess.run(remove, capture_output=True)


def environment_file(variables: list[str]) -> str:
    """The image's variables, a line each, as enroot reads them."""
    return "".join(f"{variable}\n" for variable in variables if "\n" not in variable)
