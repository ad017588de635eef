"""Programs that build images: which one works here, and its commands.

Also the conversion from an engine's storage to one file that a runtime can start: .sqsh or .sif.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from megaboa import files
from megaboa.errors import InputError
from megaboa.image import tools

ENGINES = ("docker", "podman", "buildah")  # in order of preference
# Commands that only succeed if the engine works: Docker's client is often installed without its server.
_ASKED = {"docker": ["docker", "info"], "podman": ["podman", "info"], "buildah": ["buildah", "info"]}
ASK_SECONDS = 60
# enroot starts containers through this file, which `enroot import` also writes.
RC = '#!/bin/sh\n[ "$#" -gt 0 ] && exec "$@"\nexec /bin/sh\n'
# In a rootless engine, files of other users are only readable in its own namespace.
_SQUASH_BUILDAH = 'root=$(buildah mount "$1") && shift && exec mksquashfs "$root" "$@"'


def find(asked: str = "auto", purpose: str = "built") -> str:
    """An engine that can build or fetch images here; raises InputError if there is none."""
    found = {name: _works(name) for name in (ENGINES if asked == "auto" else (asked,))}
    if works := next((name for name, problem in found.items() if problem is None), None):
        return works
    listed = "; ".join(f"{name}: {problem}" for name, problem in found.items())
    remedy = "install one of them" if asked == "auto" else "install it, or set image.build.engine to auto"
    remedy = "install one of them, or enroot" if purpose == "fetched" else remedy
    raise InputError(f"no image can be {purpose} here ({listed}): {remedy}, or give a finished image (image.path)")


def _works(name: str) -> str | None:
    if shutil.which(name) is None:
        return "not installed"
    try:
        done = subprocess.run(_ASKED[name], capture_output=True, text=True, timeout=ASK_SECONDS)
    except subprocess.TimeoutExpired:
        return f"no answer in {ASK_SECONDS} s"
    said = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
    return None if done.returncode == 0 else (said[-1].strip() if said else f"exit code {done.returncode}")


def build_command(
    engine: str, file: Path, context: Path, args: Mapping[str, str], labels: Mapping[str, str], tag: str
) -> list[str]:
    return [
        *(engine, "build", "--file", str(file), "--tag", tag),
        *(["--layers"] if engine == "buildah" else []),  # the others cache finished steps by default
        *(word for name, value in args.items() for word in ("--build-arg", f"{name}={value}")),
        *(word for name, value in labels.items() for word in ("--label", f"{name}={value}")),
        str(context),
    ]


def pull_command(engine: str, image: str) -> list[str]:
    return [engine, "pull", image]


def tag_command(engine: str, image: str, tag: str) -> list[str]:
    return [engine, "tag", image, tag]


def inspect_command(engine: str, image: str) -> list[str]:
    return [engine, "inspect", "--type", "image", image]


def variables(engine: str, said: str) -> list[str]:
    """The image's variables as `NAME=value`, from the output of `inspect_command`."""
    found = json.loads(said)
    config = found["OCIv1"]["config"] if engine == "buildah" else found[0]["Config"]
    return config.get("Env") or []


def create_command(engine: str, image: str, container: str) -> list[str]:
    """The command that creates a container, which is never started, for its root file system."""
    if engine == "buildah":
        return ["buildah", "from", "--pull-never", "--name", container, image]
    return [engine, "create", "--name", container, image, "true"]


def copy_command(engine: str, container: str, tree: Path) -> list[str]:
    """The command that copies a folder's content over the root file system."""
    if engine == "buildah":
        return ["buildah", "copy", "--quiet", container, str(tree), "/"]
    return [engine, "cp", f"{tree}/.", f"{container}:/"]


def remove_command(engine: str, container: str) -> list[str]:
    return [engine, "rm", container] if engine == "buildah" else [engine, "rm", "--force", container]


def archive_command(engine: str, image: str, target: Path) -> list[str]:
    """The command that saves the image to a file that apptainer can read, as named by `archive_source`."""
    if engine == "buildah":
        return ["buildah", "push", image, f"oci-archive:{target}"]
    if engine == "podman":
        return ["podman", "save", "--format", "oci-archive", "--output", str(target), image]
    return ["docker", "save", "--output", str(target), image]


def archive_source(engine: str, archive: Path) -> str:
    return f"docker-archive:{archive}" if engine == "docker" else f"oci-archive:{archive}"


def squash_options() -> Sequence[str]:
    """mksquashfs options for fast writing and reading; kernels can mount zstd since 4.14.

    The content of /dev is left out: only root can unpack device nodes, and every runtime mounts the host's.
    """
    return (
        *("-noappend", "-no-progress", "-quiet", "-comp", "zstd", "-Xcompression-level", "3"),
        *("-wildcards", "-e", "dev/*"),  # must be last: everything after -e is excluded
    )


def to_file(engine: str, image: str, target: Path) -> None:
    """Write an image from the engine's storage to `target`, whose suffix determines the format."""
    if target.suffix == ".sif":
        _to_sif(engine, image, target)
    else:
        _to_sqsh(engine, image, target)
    with target.open("rb+") as stream:
        os.fsync(stream.fileno())


def _to_sif(engine: str, image: str, target: Path) -> None:
    tools.require("apptainer", "install it, or set image.runtime to pyxis")
    archive = target.with_suffix(".tar")
    tools.call(archive_command(engine, image, archive), "saving the image")
    tools.call(sif_command(archive_source(engine, archive), target), "turning the image into .sif", image)
    archive.unlink()


def sif_command(source: str, target: Path) -> list[str]:
    return ["apptainer", "build", "--force", str(target), source]


def _to_sqsh(engine: str, image: str, target: Path) -> None:
    tools.require("mksquashfs", "install squashfs-tools")
    with _container(engine, image, target) as container:
        if engine == "buildah":
            command = ["sh", "-c", _SQUASH_BUILDAH, "sh", container, str(target), *squash_options()]
            prefix = [] if os.geteuid() == 0 else ["buildah", "unshare"]
            tools.call([*prefix, *command], "turning the image into .sqsh")
        else:
            _squash_stream([engine, "export", container], target)


def _squash_stream(command: list[str], target: Path) -> None:
    """Make a .sqsh from a tar stream of the root file system, which is never unpacked."""
    export = tools.start(command)
    try:
        squash = ["mksquashfs", "-", str(target), "-tar", *squash_options()]
        tools.call(squash, "turning the image into .sqsh", feed=export)
        if export.wait():
            raise InputError(f"`{' '.join(command)}` failed: the image could not be read; its last lines say why")
    finally:
        export.kill()
        export.wait()


@contextlib.contextmanager
def _container(engine: str, image: str, target: Path) -> Iterator[str]:
    """A container that is never started, with the files that enroot expects."""
    name = f"megaboa-{files.digest(str(target.absolute()))[:12]}"
    remove = remove_command(engine, name)
    subprocess.run(remove, capture_output=True)  # left by a killed build
    tools.output(create_command(engine, image, name))
    try:
        found = variables(engine, tools.output(inspect_command(engine, image)))
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            etc = Path(folder, "etc")
            etc.mkdir()
            (etc / "environment").write_text(environment_file(found))
            (etc / "rc").write_text(RC)
            (etc / "rc").chmod(0o755)
            tools.output(copy_command(engine, name, Path(folder)))
        yield name
    finally:
        subprocess.run(remove, capture_output=True)


def environment_file(variables: list[str]) -> str:
    """The image's variables, one per line, in enroot's format."""
    return "".join(f"{variable}\n" for variable in variables if "\n" not in variable)
