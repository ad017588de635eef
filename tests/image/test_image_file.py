"""Image files that can't be run, each in one sentence; and whole ones, made here."""

import os
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from megaboa.image import contract, image_file


def squashfs(path: Path, size: int) -> Path:
    """The beginning of a squashfs that says it has so many bytes."""
    path.write_bytes(b"hsqs" + bytes(36) + struct.pack("<Q", size) + bytes(100))
    return path


def test_an_image_that_can_not_be_read(tmp_path):
    path = squashfs(tmp_path / "i.sqsh", 100)
    path.chmod(0)
    user = os.geteuid()
    if user == 0:  # who may read everything
        os.seteuid(65534)
    try:
        assert "can't be read (Permission denied): check its permissions" in image_file.problem(path)
    finally:
        os.seteuid(user)


def test_what_is_no_image(tmp_path):
    assert "there is no image" in image_file.problem(tmp_path / "none.sqsh")
    (tmp_path / "folder.sqsh").mkdir()
    assert "is a folder" in image_file.problem(tmp_path / "folder.sqsh")
    for name in ("text.sqsh", "text.sif"):
        (tmp_path / name).write_text("hello")
        assert f"is not a .{name[5:]} image" in image_file.problem(tmp_path / name)


def test_an_image_that_is_cut_off(tmp_path):
    assert "is truncated: it has 148 of 5,000 bytes" in image_file.problem(squashfs(tmp_path / "i.sqsh", 5000))
    assert image_file.problem(squashfs(tmp_path / "i.sqsh", 148)) is None


def test_a_sif_has_its_mark_after_the_line_that_starts_it(tmp_path):
    path = tmp_path / "i.sif"
    path.write_bytes(b"#!/usr/bin/env run-singularity\n\0SIF_MAGIC\0" + bytes(100))
    assert image_file.problem(path) is None


@pytest.fixture
def image_of(tmp_path):
    """A .sqsh whose /usr/bin/env is this machine's own, with another number of the machine."""
    if not (shutil.which("mksquashfs") and shutil.which("unsquashfs")):
        pytest.skip("squashfs-tools are not installed")

    def make(machine: int | None) -> Path:
        tree = tmp_path / "tree" / "usr/bin"
        tree.mkdir(parents=True)
        program = bytearray(Path("/usr/bin/env").read_bytes())
        if machine is not None:
            program[18:20] = struct.pack("<H", machine)
        (tree / "env").write_bytes(program)
        path = tmp_path / "i.sqsh"
        subprocess.run(["mksquashfs", tmp_path / "tree", path, "-quiet", "-no-progress"], check=True)
        return path

    return make


def test_an_image_for_another_architecture(image_of):
    path = image_of(183)
    assert image_file.problem(path) is None and image_file.architecture(path) == "aarch64"
    assert f"is for aarch64, and this machine is {os.uname().machine}" in image_file.wrong_architecture(path)


def test_an_image_for_this_one(image_of):
    path = image_of(None)
    assert image_file.architecture(path) == os.uname().machine
    assert image_file.wrong_architecture(path) is None


def test_an_image_for_nodes_that_are_others_than_this_machine(image_of, tmp_path, fake_command):
    fake_command("apptainer", "exit 1")
    path = image_of(183)
    assert image_file.wrong_architecture(path, "aarch64") is None
    assert "is for aarch64, and image.architecture is riscv64" in image_file.wrong_architecture(path, "riscv64")
    wanted = {"runtime": "apptainer", "device": "cpu", "architecture": "riscv64"}
    report = contract.test(wanted, path, tmp_path)
    assert report["state"] == "NOT_RUN" and "is for riscv64, and this machine is" in report["why"]
