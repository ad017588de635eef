"""Runs a command inside an image's unpacked root file system, on machines without a runtime for the image.

Needs no program but util-linux. Without root it needs user namespaces.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from megaboa import store
from megaboa.errors import InputError
from megaboa.image import references, tools

MAX_LINKS = 40  # the kernel's limit

# PATH is the image's, so this machine's programs are searched for in their usual places.
# Arguments: root, folder, number of mounts, then source, target and flag of each, then the command.
_ENTER = """
set -e
inside=$PATH PATH=/usr/sbin:/usr/bin:/sbin:/bin
chroot=$(command -v chroot)
root=$1 folder=$2 count=$3; shift 3
for kernel in proc sys dev; do mount --rbind "/$kernel" "$root/$kernel"; done
while [ "$count" -gt 0 ]; do
  mount --rbind "$1" "$2"
  if [ "$3" = ro ]; then mount -o remount,bind,ro "$2"; fi
  shift 3; count=$((count - 1))
done
PATH=$inside
exec "$chroot" "$root" /bin/sh -c 'cd "$1" && shift && exec "$@"' sh "$folder" "$@"
"""


def enter(root: str, mounts: Sequence[str], env: Sequence[str], workdir: str, command: Sequence[str]) -> list[str]:
    """argv for a command in the root file system, with the runtimes' interface.

    `root`: a folder instead of an image.
    """
    user = [] if os.geteuid() == 0 else ["--map-root-user"]
    split = [references.split_mount(mount) for mount in mounts]
    parts = [part for source, target, flag in split for part in (source, str(place(Path(root), target)), flag)]
    unshare = [shutil.which("unshare") or "unshare", "--mount", *user]
    return [*unshare, "/bin/sh", "-c", _ENTER, "sh", root, workdir, str(len(mounts)), *parts, *command]


def environment(root: Path, env: Sequence[str], ours: Mapping[str, str]) -> dict[str, str]:
    """The image's variables, plus the named ones of ours."""
    file = place(root, "/etc/environment")
    lines = file.read_text(errors="replace").splitlines() if file.is_file() else []
    theirs = dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))
    return {**theirs, **{name: ours[name] for name in env if name in ours}}


def prepare(root: Path, mounts: Sequence[str]) -> None:
    """Create the mount points, as runtimes do."""
    for folder in ("proc", "sys", "dev"):
        if (root / folder).is_symlink():
            raise InputError(f"the image's /{folder} is a link, where the kernel's own is mounted: build another image")
        (root / folder).mkdir(exist_ok=True)
    place(root, "/tmp").mkdir(parents=True, exist_ok=True)
    for mount in mounts:
        source, target, _ = references.split_mount(mount)
        there = place(root, target)
        if Path(source).is_dir():
            there.mkdir(parents=True, exist_ok=True)
        else:
            there.parent.mkdir(parents=True, exist_ok=True)
            there.touch()


def place(root: Path, path: str) -> Path:
    """The place of an image's path here. Its links are followed below `root`, as after chroot."""
    here, parts, links = root, path.split("/")[::-1], 0
    while parts:
        part = parts.pop()
        if part == "..":
            here = here if here == root else here.parent
        elif part and (here / part).is_symlink():
            links += 1
            if links > MAX_LINKS:
                raise InputError(
                    f"the image's links at {path} lead in a circle: mount elsewhere, or build another image"
                )
            target = str((here / part).readlink())
            here = root if target.startswith("/") else here
            parts += target.split("/")[::-1]
        elif part not in ("", "."):
            here /= part
    return here


@contextlib.contextmanager
def unpacked(image: Path, store_: Path) -> Iterator[Path]:
    """The root file system of a .sqsh, unpacked in the store for a while. One at a time, so that leftovers of a killed
    process are removed."""
    tools.require("unsquashfs", "install squashfs-tools")
    folder = store_ / ".unpacked"
    with store.locked(store_ / ".unpacked.lock"):
        _remove(folder)
        try:
            yield _unpack(image, folder / "root")
        finally:
            _remove(folder)


def _unpack(image: Path, target: Path) -> Path:
    target.parent.mkdir()
    lenient = [] if os.geteuid() == 0 else ["-no-exit-code"]  # only root can create the nodes of /dev
    command = ["unsquashfs", "-no-progress", "-quiet", *lenient, "-dest", str(target), str(image)]
    tools.call(command, "unpacking")
    return target


def _remove(folder: Path) -> None:
    subprocess.run(["chmod", "-R", "u+w", str(folder)], capture_output=True)
    shutil.rmtree(folder, ignore_errors=True)
