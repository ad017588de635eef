"""The syntax of image references, mounts and commits, and its errors."""

from __future__ import annotations

import re

# A registry's image with immutable content: `nvcr.io/nvidia/pytorch@sha256:...`, with or without a tag.
_PINNED = re.compile(r"^(?P<name>[\w.-]+(:\d+)?(/[\w.-]+)*)(:[\w.-]+)?@(?P<digest>sha256:[0-9a-f]{64})$")
_MOUNT = re.compile(r"^(?P<source>[^:,\s]+):(?P<target>/[^:,\s]*)(:(?P<flag>ro|rw))?$")
SUFFIXES = {"pyxis": ".sqsh", "apptainer": ".sif"}


def is_commit(text: str) -> bool:
    return re.fullmatch(r"[0-9a-f]{40}", text) is not None


def is_file(image: str) -> bool:
    return image.endswith(tuple(SUFFIXES.values()))


def digest_of(image: str) -> str | None:
    """The digest in a registry's reference; None if it has none."""
    match = _PINNED.match(image)
    return match["digest"] if match else None


def without_tag(image: str) -> str:
    """`name@sha256:...`: the digest suffices, and not every tool accepts a tag with it."""
    match = _PINNED.match(image)
    return f"{match['name']}@{match['digest']}" if match else image


def for_enroot(image: str) -> str:
    """A registry's reference in the format of `enroot import`: `docker://REGISTRY#NAME:sha256:...`."""
    name, _, digest = without_tag(image).partition("@")
    registry = registry_of(name)
    name = name.removeprefix(f"{registry}/")
    return f"docker://{'' if registry == 'docker.io' else f'{registry}#'}{name}:{digest}"


def registry_of(image: str) -> str:
    """The registry's host; Docker's default if none is named."""
    first, slash, _ = image.partition("/")
    return first if slash and ("." in first or ":" in first or first == "localhost") else "docker.io"


def image_problem(image: str, runtime: str) -> str | None:
    """Why a runtime can't use an image that is written like this; None if it can."""
    wanted = SUFFIXES[runtime]
    if is_file(image):
        if image.endswith(wanted):
            return None
        other = next(name for name, suffix in SUFFIXES.items() if image.endswith(suffix))
        return f"{image!r} is an image for {other}, and {runtime} takes {wanted}: set runtime to {other}"
    if digest_of(image):
        return None
    if "@" in image or image.startswith("docker://") or ":" in image or "/" in image.lstrip("./~"):
        return (
            f"{image!r} has no digest, and tags can move: give `name@sha256:...` "
            f"(`docker buildx imagetools inspect` prints it), or a {wanted} file"
        )
    return f"{image!r} is neither a {wanted} file nor a registry's `name@sha256:...`"


def mount_problem(mount: str) -> str | None:
    if _MOUNT.match(mount):
        return None
    return "is not a mount: write `source:target`, the target beginning with `/`, and `:ro` after it to forbid writing"


def split_mount(mount: str) -> tuple[str, str, str]:
    """Source, target and flag."""
    match = _MOUNT.match(mount)
    assert match, mount
    return match["source"], match["target"], match["flag"] or "rw"
