"""What is wrong with the files and folders that `image` names: found before anything is submitted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megaboa.errors import InputError
from megaboa.image import dockerfile, image_file, references
from megaboa.image.pins import build_arguments

TreePath = tuple[str | int, ...]


def problems(image: Any) -> Iterator[tuple[TreePath, str]]:
    """Each with its place; what has the wrong type or form is a mistake of its own."""
    runtime = image.get("runtime") if isinstance(image, dict) else None
    if not isinstance(runtime, str) or runtime not in references.SUFFIXES:
        return
    path, build = image.get("path"), image.get("build")
    if isinstance(path, str) and (message := references.image_problem(path, runtime)):
        yield ("image", "path"), message
    elif isinstance(path, str) and references.is_file(path):
        file = Path(path).expanduser()
        if message := image_file.problem(file) or image_file.wrong_architecture(file, image.get("architecture")):
            yield ("image", "path"), message
    if isinstance(build, dict):
        yield from _build_problems(build)
    for number, mount in enumerate(image["mounts"] if isinstance(image.get("mounts"), list) else []):
        if isinstance(mount, str) and references.mount_problem(mount) is None:
            source, target, _ = references.split_mount(mount)
            if not Path(source).expanduser().exists():
                yield ("image", "mounts", number), f"there is no {source!r} to mount as {target}: make it, or remove it"


def _build_problems(build: dict[str, Any]) -> Iterator[tuple[TreePath, str]]:
    file, context, given = build.get("file", "containers/Dockerfile"), build.get("context", "."), build.get("args", {})
    if not (isinstance(file, str) and isinstance(context, str) and isinstance(given, dict)):
        return
    if not Path(file).expanduser().is_file():
        yield ("image", "build", "file"), f"there is no file {file!r}: check the path"
        return
    if not Path(context).expanduser().is_dir():
        yield ("image", "build", "context"), f"there is no folder {context!r}: check the path"
        return
    try:
        found = dockerfile.read(Path(file).expanduser())
        args = build_arguments(found, {name: str(value) for name, value in given.items()})
        found.copied(Path(context).expanduser(), args)
    except InputError as error:
        yield ("image", "build"), str(error)
