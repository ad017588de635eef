"""The image file that a specification asks for: built, fetched, or taken as it is. Once for each identity."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megaboa import files, store
from megaboa.errors import InputError, disk_full
from megaboa.image import dockerfile, engines, image_file, references, tools
from megaboa.paths import FACTS

Made = dict[str, Any]


def joined(spec: dict[str, Any], inside: dict[str, Any]) -> dict[str, Any]:
    """What makes the image, and how it is made and started."""
    build = {**spec["build"], **inside["build"]} if spec["build"] else None
    return {**spec, **inside, "build": build}


def obtain(wanted: dict[str, Any]) -> Made:
    """`path`, `digest` and `bytes` of the image file, and how it came to be there."""
    if wanted["build"]:
        made = _stored(wanted, _build_identity(wanted), lambda target: _build(wanted, target))
    elif references.is_file(wanted["path"]):
        path = Path(wanted["path"])
        made = {"path": str(path), **_content(path), "from": {"file": str(path)}}
    else:
        made = _stored(wanted, _reference_identity(wanted), lambda target: _fetch(wanted, target))
    path = Path(made["path"])
    if problem := image_file.problem(path) or image_file.wrong_architecture(path, wanted.get("architecture")):
        raise InputError(problem)
    if path.stat().st_size != made["bytes"]:
        raise InputError(f"{path} was changed after it was made: remove the folder {path.parent}, and call again")
    return made


def _content(path: Path) -> Made:
    """Its time stamp is taken before it is read: a file that is exchanged meanwhile has another one."""
    found, sha256 = path.stat(), files.file_digest(path)
    return {"digest": f"sha256:{sha256}", "sha256": sha256, "bytes": found.st_size, "mtime_ns": found.st_mtime_ns}


def _build_identity(wanted: dict[str, Any]) -> dict[str, Any]:
    """The engine is not part of the identity."""
    return {"build": wanted["build"]["inputs"], "suffix": wanted["suffix"], "machine": _machine(wanted)}


def _reference_identity(wanted: dict[str, Any]) -> dict[str, Any]:
    digest = references.digest_of(wanted["path"])
    return {"reference": digest, "suffix": wanted["suffix"], "machine": _machine(wanted)}


def _machine(wanted: dict[str, Any]) -> str:
    return wanted.get("architecture") or platform.machine()


def _stored(wanted: dict[str, Any], identity: dict[str, Any], make: Callable[[Path], Made]) -> Made:
    """Make it under a lock in a folder that gets its name when all is done; others wait, then take it."""
    final = store.folder(wanted["store"], "images", wanted["name"], identity)
    with (
        disk_full(f"making {final}", "Free some space, and call again"),
        store.building(final, on_wait=lambda holder: say(f"{final} is being made by {holder}; waiting")) as partial,
    ):
        if partial:
            target = partial / f"image{wanted['suffix']}"
            facts = make(target)
            files.write_json(partial / FACTS, {**_content(target), **facts, "identity": identity})
    facts = files.read_json(final / FACTS)
    return {"path": str(final / f"image{wanted['suffix']}"), **{k: v for k, v in facts.items() if k != "identity"}}


def _build(wanted: dict[str, Any], target: Path) -> Made:
    build = wanted["build"]
    engine, tag = engines.find(build["engine"]), tag_of(wanted)
    file = dockerfile.read(Path(build["file"]))
    command = build_plan(engine, wanted)
    say(f"building {file.path} with {engine}")
    base = dockerfile.expand(file.bases[0], build["args"])
    tools.call(command, f"building {file.path}", image=base)
    engines.to_file(engine, tag, target)
    return {"from": {"dockerfile": build["file"], "args": build["args"], "engine": engine, "commit": _commit()}}


def build_plan(engine: str, wanted: dict[str, Any]) -> list[str]:
    """The command that builds an image; needs no engine and no registry."""
    build = wanted["build"]
    labels = {"org.opencontainers.image.revision": _commit() or "unknown", "megaboa.inputs": _inputs(wanted)}
    return engines.build_command(
        engine, Path(build["file"]), Path(build["context"]), build["args"], labels, tag_of(wanted)
    )


def _fetch(wanted: dict[str, Any], target: Path) -> Made:
    image, digest = references.without_tag(wanted["path"]), str(references.digest_of(wanted["path"]))
    made: Made = {"digest": digest, "from": {"reference": wanted["path"]}}
    if target.suffix == ".sif":
        tools.require("apptainer", "install it, or set image.runtime to pyxis")
        tools.call(engines.sif_command(f"docker://{image}", target), f"fetching {image}", image)
        return made
    if shutil.which("enroot"):
        command = ["enroot", "import", "--output", str(target), references.for_enroot(image)]
        tools.call(command, f"fetching {image}", image)
        return made
    engine = engines.find(purpose="fetched")
    tag = f"localhost/megaboa:{digest.removeprefix('sha256:')[: store.ID_LENGTH]}"
    tools.call(engines.pull_command(engine, image), f"fetching {image}", image)
    tools.output(engines.tag_command(engine, image, tag))
    engines.to_file(engine, tag, target)
    return made


def tag_of(wanted: dict[str, Any]) -> str:
    return f"localhost/megaboa:{_inputs(wanted)}"


def _inputs(wanted: dict[str, Any]) -> str:
    return files.digest(wanted["build"]["inputs"])[: store.ID_LENGTH]


def _commit() -> str | None:
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    except (FileNotFoundError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
