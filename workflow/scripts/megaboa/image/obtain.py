"""Obtains the image file of a specification: built, fetched, or used as it is; once per identity."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from megaboa import files, store
from megaboa.errors import InputError, disk_full
from megaboa.image import dockerfile, engines, image_file, references, tools
from megaboa.records import Image, ImageBuild, ImageFile, ImageOrder, ImageSpec, ImageStart, Tree, read, write
from megaboa.store_paths import FACTS


def joined(spec: ImageSpec, inside: ImageStart) -> ImageOrder:
    """The specification and the start of an image in one record."""
    how = inside.build
    build = replace(spec.build, file=how.file, context=how.context, engine=how.engine) if spec.build and how else None
    return ImageOrder(**{**vars(spec), **vars(inside), "build": build})


def obtain(wanted: ImageOrder) -> Image:
    """The image file, and its origin."""
    if wanted.build:
        path, made = _stored(wanted, _build_identity(wanted), lambda target: _build(wanted.build, target))
    elif references.is_file(wanted.path):
        path = Path(wanted.path)
        made = replace(_content(path), made_from={"file": str(path)})
    else:
        path, made = _stored(wanted, _reference_identity(wanted), lambda target: _fetch(wanted.path, target))
    if problem := image_file.problem(path) or image_file.wrong_architecture(path, wanted.architecture):
        raise InputError(problem)
    if path.stat().st_size != made.bytes:
        raise InputError(f"{path} was changed after it was made: remove the folder {path.parent}, and call again")
    about = {**vars(made), "identity": None}
    return Image(**about, runtime=wanted.runtime, path=str(path), bridge_source=wanted.bridge_source)


def _content(path: Path) -> ImageFile:
    """Facts about a file. The time stamp is taken before it is read, so that a replaced file shows."""
    found, sha256 = path.stat(), files.file_digest(path)
    return ImageFile(digest=f"sha256:{sha256}", sha256=sha256, bytes=found.st_size, mtime_ns=found.st_mtime_ns)


def _build_identity(wanted: ImageSpec) -> Tree:
    """The identity of a build, which doesn't include the engine."""
    return {"build": wanted.build.inputs, "suffix": wanted.suffix, "machine": _machine(wanted)}


def _reference_identity(wanted: ImageSpec) -> Tree:
    digest = references.digest_of(wanted.path)
    return {"reference": digest, "suffix": wanted.suffix, "machine": _machine(wanted)}


def _machine(wanted: ImageSpec) -> str:
    return wanted.architecture or platform.machine()


def _stored(wanted: ImageOrder, identity: Tree, make: Callable[[Path], ImageFile]) -> tuple[Path, ImageFile]:
    """Make an image under a lock, in a folder that gets its name when complete; others wait and then use it."""
    final = store.folder(wanted.store, "images", wanted.name, identity)
    with (
        disk_full(f"making {final}", "Free some space, and call again"),
        store.building(final, on_wait=lambda holder: say(f"{final} is being made by {holder}; waiting")) as partial,
    ):
        if partial:
            write(partial / FACTS, replace(make(partial / f"image{wanted.suffix}"), identity=identity))
    return final / f"image{wanted.suffix}", read(ImageFile, final / FACTS)


def _build(build: ImageBuild, target: Path) -> ImageFile:
    engine = engines.find(build.engine)
    file = dockerfile.read(Path(build.file))
    command = build_plan(engine, build)
    say(f"building {file.path} with {engine}")
    base = dockerfile.expand(file.bases[0], build.args)
    tools.call(command, f"building {file.path}", image=base)
    engines.to_file(engine, tag_of(build), target)
    made_from = {"dockerfile": build.file, "args": build.args, "engine": engine, "commit": _commit()}
    return replace(_content(target), made_from=made_from)


def build_plan(engine: str, build: ImageBuild) -> list[str]:
    """The command that builds an image; needs neither an engine nor a registry."""
    labels = {"org.opencontainers.image.revision": _commit() or "unknown", "megaboa.inputs": _inputs(build)}
    return engines.build_command(engine, Path(build.file), Path(build.context), build.args, labels, tag_of(build))


def _fetch(reference: str, target: Path) -> ImageFile:
    image, digest = references.without_tag(reference), str(references.digest_of(reference))
    _fetch_into(target, image, digest)
    return replace(_content(target), digest=digest, made_from={"reference": reference})


def _fetch_into(target: Path, image: str, digest: str) -> None:
    if target.suffix == ".sif":
        tools.require("apptainer", "install it, or set image.runtime to pyxis")
        tools.call(engines.sif_command(f"docker://{image}", target), f"fetching {image}", image)
        return
    if shutil.which("enroot"):
        command = ["enroot", "import", "--output", str(target), references.for_enroot(image)]
        tools.call(command, f"fetching {image}", image)
        return
    engine = engines.find(purpose="fetched")
    tag = f"localhost/megaboa:{digest.removeprefix('sha256:')[: store.ID_LENGTH]}"
    tools.call(engines.pull_command(engine, image), f"fetching {image}", image)
    tools.output(engines.tag_command(engine, image, tag))
    engines.to_file(engine, tag, target)


def tag_of(build: ImageBuild) -> str:
    return f"localhost/megaboa:{_inputs(build)}"


def _inputs(build: ImageBuild) -> str:
    return files.digest(build.inputs)[: store.ID_LENGTH]


def _commit() -> str | None:
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    except (FileNotFoundError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
