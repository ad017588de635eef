"""A command inside an image's unpacked root file system: for machines that have no runtime for the image.

Needs no program but util-linux. Without root it needs user namespaces.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from megaboa.image import references, tools

# PATH is the image's: programs of this machine are looked for where they always are.
# Arguments: root, folder, number of mounts, then source, target and flag of each, then the command.
_ENTER = """
set -e
inside=$PATH PATH=/usr/sbin:/usr/bin:/sbin:/bin
chroot=$(command -v chroot)
root=$1 folder=$2 count=$3; shift 3
for kernel in proc sys dev; do mount --rbind "/$kernel" "$root/$kernel"; done
while [ "$count" -gt 0 ]; do
  mount --rbind "$1" "$root$2"
  if [ "$3" = ro ]; then mount -o remount,bind,ro "$root$2"; fi
  shift 3; count=$((count - 1))
done
PATH=$inside
exec "$chroot" "$root" /bin/sh -c 'cd "$1" && shift && exec "$@"' sh "$folder" "$@"
"""


def enter(root: str, mounts: Sequence[str], env: Sequence[str], workdir: str, command: Sequence[str]) -> list[str]:
    """As the runtimes: from image, mounts, names of variables, folder and command to argv. `root` is a folder."""
    user = [] if os.geteuid() == 0 else ["--map-root-user"]
    parts = [part for mount in mounts for part in references.split_mount(mount)]
    unshare = [shutil.which("unshare") or "unshare", "--mount", *user]
    return [*unshare, "/bin/sh", "-c", _ENTER, "sh", root, workdir, str(len(mounts)), *parts, *command]


def environment(root: Path, env: Sequence[str], ours: Mapping[str, str]) -> dict[str, str]:
    """The variables of the image, and of ours those that are named."""
    lines = (root / "etc/environment").read_text(errors="replace").splitlines()
    theirs = dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))
    return {**theirs, **{name: ours[name] for name in env if name in ours}}


def prepare(root: Path, mounts: Sequence[str]) -> None:
    """Make the places at which things are mounted, as runtimes do."""
    for folder in ("proc", "sys", "dev", "tmp"):
        (root / folder).mkdir(exist_ok=True)
    for mount in mounts:
        source, target, _ = references.split_mount(mount)
        place = root / target.lstrip("/")
        if Path(source).is_dir():
            place.mkdir(parents=True, exist_ok=True)
        else:
            place.parent.mkdir(parents=True, exist_ok=True)
            place.touch()


@contextlib.contextmanager
def unpacked(image: Path) -> Iterator[Path]:
    """The root file system of a .sqsh in a folder of its own, beside the image, for a while."""
    tools.require("unsquashfs", "install squashfs-tools")
    place = Path(tempfile.mkdtemp(prefix=".unpacked-", dir=image.parent))
    try:
        lenient = [] if os.geteuid() == 0 else ["-no-exit-code"]  # only root can make the nodes of /dev
        command = ["unsquashfs", "-no-progress", "-quiet", *lenient, "-dest", str(place / "root"), str(image)]
        tools.call(command, "unpacking")
        yield place / "root"
    finally:
        subprocess.run(["chmod", "-R", "u+w", str(place)], capture_output=True)
        shutil.rmtree(place, ignore_errors=True)
