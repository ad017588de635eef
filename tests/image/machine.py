"""A base image made of this machine: its own Debian suite from its own mirror, and its own Python 3.12. No registry."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import pytest

TREE = "MEGABOA_IMAGE_TREE"  # a tree that was made before, to save the download
TOOLS = ("debootstrap", "buildah", "podman", "mksquashfs", "unsquashfs", "unshare")
IMAGE = "localhost/megaboa-test-base:1"
SITE_PACKAGES = sysconfig.get_path("purelib")
# Of Python's prefix what programs need; modules for windows bring libraries of a desktop.
_LEFT_OUT = (
    "lib/python3.12/test",
    "lib/python3.12/site-packages/*",
    "lib/python3.12/config-*",
    "lib/python3.12/idlelib",
)
_LEFT_OUT_MODULES = ("_tkinter",)


def require() -> None:
    """Skip where an image can't be built; fail where that was ordered."""
    lacks = [tool for tool in TOOLS if not shutil.which(tool)]
    reason = f"{', '.join(lacks)} not installed" if lacks else "" if os.geteuid() == 0 else "needs root"
    if not reason and sys.base_prefix == "/usr":
        reason = "Python is the system's own, and can't be copied by itself"
    if reason and os.environ.get("MEGABOA_REQUIRE_IMAGES"):
        pytest.fail(f"images can't be built here: {reason}")
    if reason:
        pytest.skip(f"images can't be built here: {reason}")


def tree(target: Path) -> Path:
    """The root file system: Debian, and Python in /usr/local."""
    made = Path(os.environ.get(TREE) or target)
    if not made.exists():  # complete
        made.parent.mkdir(parents=True, exist_ok=True)
        new = Path(tempfile.mkdtemp(prefix=f"{made.name}-", dir=made.parent))
        _fill(new)
        try:
            new.rename(made)
        except OSError:  # other tests were faster
            shutil.rmtree(new)
    return made


def _fill(new: Path) -> None:
    new.chmod(0o755)
    suite, mirror = _suite_and_mirror()
    packages = ",".join(sorted(_libraries()))
    command = ["debootstrap", "--variant=minbase", f"--include={packages}", suite, str(new), mirror]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    left_out = [f"--exclude={pattern}" for pattern in (*_LEFT_OUT, "__pycache__")]
    packed = subprocess.Popen(
        ["tar", "-C", sys.base_prefix, *left_out, "-cf", "-", "bin", "lib"], stdout=subprocess.PIPE
    )
    subprocess.run(["tar", "-C", str(new / "usr/local"), "-xf", "-"], stdin=packed.stdout, check=True)
    subprocess.run(["chroot", str(new), "ldconfig"], check=True)


def _suite_and_mirror() -> tuple[str, str]:
    """As this machine's apt has them."""
    listed = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(ORIGIN) $(COMPONENT) $(CODENAME) $(SITE)", "Created-By: Packages"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    release = dict(line.split("=", 1) for line in Path("/etc/os-release").read_text().splitlines() if "=" in line)
    for line in listed.splitlines():
        words = line.split()
        if words[:3] == ["Debian", "main", release["VERSION_CODENAME"]]:
            return words[2], words[3]
    pytest.fail(f"apt here names no mirror of Debian's {release['VERSION_CODENAME']}: {listed}")


def _libraries() -> set[str]:
    """The packages of the libraries that this Python is linked to."""
    modules = Path(sys.base_prefix, "lib/python3.12/lib-dynload").glob("*.so")
    wanted = [str(path) for path in modules if not path.name.startswith(_LEFT_OUT_MODULES)]
    linked = subprocess.run(["ldd", *wanted], capture_output=True, text=True).stdout
    paths = {line.split("=>")[1].split()[0] for line in linked.splitlines() if "=> /" in line}
    packages = set()
    for path in {path for found in paths for path in (found, os.path.realpath(found))}:
        owner = subprocess.run(["dpkg", "-S", path], capture_output=True, text=True).stdout
        packages |= {line.split(":")[0] for line in owner.splitlines() if " " not in line.split(":")[0]}
    return packages


# This machine's Python, as an image sees it.
MOUNTS = [f"{folder}:{folder}:ro" for folder in dict.fromkeys((sys.prefix, sys.base_prefix))]


def sif(image: Path, new_tree: Path) -> None:
    """The tree as an image of Apptainer's; uncompressed is faster."""
    squash = ["--mksquashfs-args", "-noI -noD -noF -noX"]
    subprocess.run(["apptainer", "build", *squash, image, tree(new_tree)], check=True, capture_output=True)


def import_tree(root: Path) -> None:
    """The tree as an image in buildah's storage."""

    def buildah(*words: str) -> str:
        return subprocess.run(["buildah", *words], capture_output=True, text=True, check=True).stdout.strip()

    container = buildah("from", "scratch")
    buildah("copy", "--quiet", container, str(root), "/")
    buildah("commit", "--quiet", container, IMAGE)
    buildah("rm", container)
