"""Which engine builds, and with what command."""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from megaboa.errors import InputError
from megaboa.image import engines


@pytest.fixture
def installed(fake_command, monkeypatch, tmp_path):
    """Engines that answer with an exit code; the others are not installed."""

    def install(**codes):
        for name, code in codes.items():
            path = fake_command(name, f"echo 'Cannot connect to the Docker daemon' >&2; exit {code}")
        monkeypatch.setenv("PATH", str(path.parent if codes else tmp_path))

    return install


@pytest.mark.parametrize(
    ("codes", "asked", "found"),
    [
        ({"docker": 0, "podman": 0, "buildah": 0}, "auto", "docker"),
        ({"docker": 1, "podman": 0, "buildah": 0}, "auto", "podman"),  # a client without its server
        ({"buildah": 0}, "auto", "buildah"),
        ({"docker": 0, "buildah": 0}, "buildah", "buildah"),
    ],
)
def test_the_first_that_works_or_the_one_that_is_asked_for(installed, codes, asked, found):
    installed(**codes)
    assert engines.find(asked) == found


def test_no_engine(installed):
    installed(docker=1)
    with pytest.raises(InputError) as caught:
        engines.find()
    assert str(caught.value) == (
        "no image can be built here (docker: Cannot connect to the Docker daemon; podman: not installed; buildah: not "
        "installed): install one of them, or give a finished image (image.path)"
    )


def test_the_engine_that_is_asked_for_is_missing(installed):
    installed(docker=0)
    with pytest.raises(InputError, match=r"podman: not installed\): install it, or set image.build.engine to auto"):
        engines.find("podman")


@pytest.mark.parametrize("engine", engines.ENGINES)
def test_the_build_command(engine):
    command = engines.build_command(engine, Path("c/Dockerfile"), Path(), {"A": "1 2"}, {"rev": "x"}, "localhost/m:1")
    assert command[:2] == [engine, "build"] and command[-1] == "."
    text = " ".join(command)
    assert "--file c/Dockerfile --tag localhost/m:1" in text and "--label rev=x" in text
    assert command[command.index("--build-arg") + 1] == "A=1 2"


def test_archives_for_apptainer():
    assert engines.archive_source("docker", Path("/a.tar")) == "docker-archive:/a.tar"
    assert engines.archive_command("buildah", "m:1", Path("/a.tar"))[-1] == engines.archive_source(
        "buildah", Path("/a.tar")
    )
    assert engines.sif_command("oci-archive:/a.tar", Path("/i.sif")) == [
        *("apptainer", "build", "--force", "/i.sif", "oci-archive:/a.tar")
    ]


def test_variables_of_an_image_are_a_line_each():
    assert engines.environment_file(["PATH=/a:/b", "A=x\ny", "B="]) == "PATH=/a:/b\nB=\n"


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make device nodes")
needs_squashfs = pytest.mark.skipif(
    not (shutil.which("mksquashfs") and shutil.which("unsquashfs")), reason="squashfs-tools aren't installed"
)


@pytest.fixture
def with_devices(tmp_path):
    """A root file system as base images have it: device nodes, and another folder of that name."""
    root = tmp_path / "root"
    for folder in ("dev/pts", "opt/dev", "etc"):
        (root / folder).mkdir(parents=True)
    os.mknod(root / "dev/null", 0o666 | 0o020000, os.makedev(1, 3))
    (root / "dev/fd").symlink_to("/proc/self/fd")
    for file in ("opt/dev/kept", "etc/hostname"):
        (root / file).touch()
    return root


@pytest.fixture
def open_to_all():
    """A folder that other users reach, unlike pytest's own."""
    with tempfile.TemporaryDirectory(prefix="megaboa-tests-", dir="/tmp") as folder:
        Path(folder).chmod(0o777)
        yield Path(folder)


@needs_root
@needs_squashfs
@pytest.mark.parametrize("way", ["folder", "stream"])
def test_a_user_can_unpack_what_was_squashed(way, with_devices, tmp_path, open_to_all):
    """unsquashfs ends with 2 where it can't make a device node, and pyxis then starts nothing."""
    image = tmp_path / "image.sqsh"
    if way == "folder":
        subprocess.run(["mksquashfs", with_devices, image, *engines.squash_options()], check=True, capture_output=True)
    else:
        engines._squash_stream(["tar", "-C", str(with_devices), "-cf", "-", "dev", "etc", "opt"], image)
    target = open_to_all / "root"
    shutil.copy(image, open_to_all / "image.sqsh")
    user = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--"]
    command = [*user, "unsquashfs", "-no-progress", "-dest", str(target), str(open_to_all / "image.sqsh")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = {str(path.relative_to(target)) for path in target.rglob("*") if not path.is_dir()}
    assert found == {"opt/dev/kept", "etc/hostname"} and (target / "dev").is_dir()
