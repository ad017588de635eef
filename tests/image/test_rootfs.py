"""A command in a root file system, without any runtime: here one made of this machine's own programs."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from megaboa.errors import InputError
from megaboa.image import contract, rootfs

pytestmark = pytest.mark.skipif(not contract.can_unshare(), reason="no right to make namespaces here")


@pytest.fixture
def root(tmp_path):
    """/bin, /lib and /usr are mounted; the rest is empty."""
    place = tmp_path / "root"
    (place / "etc").mkdir(parents=True)
    (place / "etc/environment").write_text("# of the image\nPATH=/usr/bin:/bin\nCOLOUR=red\nSIZE=1\n")
    return place


def system_mounts():
    """Links into /usr are made as links by a distribution; here each is mounted by itself."""
    return [f"{path}:{path}:ro" for path in ("/usr", "/bin", "/lib", "/lib64") if Path(path).exists()]


def inside(root, mounts, script, workdir="/", env=()):
    mounts = [*system_mounts(), *mounts]
    rootfs.prepare(root, mounts)
    variables = rootfs.environment(root, env, os.environ)
    command = rootfs.enter(str(root), mounts, env, workdir, ["sh", "-c", script])
    return subprocess.run(command, env=variables, capture_output=True, text=True)


def test_folder_mounts_and_variables(root, tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    (tmp_path / "data/file").write_text("hello")
    monkeypatch.setenv("SIZE", "2")
    monkeypatch.setenv("OTHER", "3")
    done = inside(
        root, [f"{tmp_path}/data:/w/data:rw"], 'pwd; cat file; echo " $COLOUR$SIZE$OTHER"', "/w/data", ["SIZE"]
    )
    assert (done.returncode, done.stdout) == (0, "/w/data\nhello red2\n"), done.stderr


def test_what_is_mounted_for_reading_is_not_written(root, tmp_path):
    for flag, code in (("rw", 0), ("ro", 1)):
        (tmp_path / flag).mkdir()
        done = inside(root, [f"{tmp_path}/{flag}:/w:{flag}"], "echo x > /w/file || exit 1")
        assert done.returncode == code, done.stderr
        assert (tmp_path / flag / "file").exists() == (code == 0)


def test_nothing_else_of_this_machine_is_there_and_nothing_stays_mounted(root, tmp_path):
    done = inside(root, [], "ls -d /tmp/* /home/* 2>/dev/null; echo end")
    assert done.stdout == "end\n"
    assert str(root) not in Path("/proc/self/mountinfo").read_text()


def test_the_commands_own_exit_code(root):
    assert inside(root, [], "exit 7").returncode == 7


def test_a_single_file_can_be_mounted(root, tmp_path):
    (tmp_path / "file").write_text("one")
    assert inside(root, [f"{tmp_path}/file:/etc/one:ro"], "cat /etc/one").stdout == "one"


@pytest.mark.skipif(not shutil.which("mksquashfs"), reason="squashfs-tools are not installed")
def test_an_image_is_unpacked_for_a_while(root, tmp_path):
    subprocess.run(["mksquashfs", root, tmp_path / "i.sqsh", "-quiet", "-no-progress"], check=True)
    left = tmp_path / "store/.unpacked/root/left"
    left.mkdir(parents=True)  # by one that was killed
    with rootfs.unpacked(tmp_path / "i.sqsh", tmp_path / "store") as found:
        assert not left.exists() and found.is_relative_to(tmp_path / "store")
        assert (found / "etc/environment").read_text() == (root / "etc/environment").read_text()
    assert not found.parent.exists()


def test_links_of_the_image_do_not_lead_out_of_it(root, tmp_path):
    """An image's /opt may be a link to /else: below the root, not on this machine."""
    outside, data = tmp_path / "outside", tmp_path / "data"
    outside.mkdir()
    data.mkdir()
    (data / "file").write_text("hello")
    (root / "opt").symlink_to(outside)
    (root / "up").symlink_to(f"../../..{outside}")
    for target in ("/opt/data", "/up/data"):
        done = inside(root, [f"{data}:{target}:rw"], f"cat {target}/file")
        assert (done.returncode, done.stdout) == (0, "hello"), done.stderr
    assert not list(outside.iterdir()) and (root / str(outside)[1:] / "data").is_dir()


def test_links_in_a_circle(root):
    (root / "a").symlink_to("b")
    (root / "b").symlink_to("/a")
    with pytest.raises(InputError, match="links at /a/data lead in a circle"):
        rootfs.place(root, "/a/data")


def test_an_image_without_variables(root):
    (root / "etc/environment").unlink()
    assert inside(root, [], "exit 7").returncode == 7
