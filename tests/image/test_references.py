"""Images, mounts and commits as they are written."""

import pytest

from megaboa.image import references

DIGEST = "sha256:" + "a" * 64
PINNED = f"nvcr.io/nvidia/pytorch@{DIGEST}"


@pytest.mark.parametrize("image", [PINNED, f"nvcr.io/nvidia/pytorch:26.06-py3@{DIGEST}", f"host:5000/a/b@{DIGEST}"])
def test_a_reference_with_a_digest(image):
    assert references.digest_of(image) == DIGEST
    assert references.image_problem(image, "pyxis") is references.image_problem(image, "apptainer") is None


@pytest.mark.parametrize("image", ["nvcr.io/nvidia/pytorch:26.06-py3", "nvidia/pytorch", "pytorch:latest", PINNED[:-1]])
def test_a_reference_without_one_is_refused(image):
    assert references.digest_of(image) is None
    assert "has no digest" in references.image_problem(image, "pyxis")


def test_each_runtime_has_its_files():
    assert references.image_problem("./a+b.sqsh", "pyxis") is references.image_problem("/x/a.sif", "apptainer") is None
    assert "set runtime to apptainer" in references.image_problem("a.sif", "pyxis")
    assert "set runtime to pyxis" in references.image_problem("a.sqsh", "apptainer")
    assert "neither a .sqsh file nor" in references.image_problem("image", "pyxis")


@pytest.mark.parametrize(
    ("image", "registry"),
    [(PINNED, "nvcr.io"), ("localhost:5000/a@x", "localhost:5000"), ("library/python", "docker.io")],
)
def test_the_registry_of_an_image(image, registry):
    assert references.registry_of(image) == registry


def test_mounts():
    assert references.split_mount(".:/workspace") == (".", "/workspace", "rw")
    assert references.split_mount("/a:/b:ro") == ("/a", "/b", "ro")
    for bad in ("/fsx", "/a:b", "/a:/b:rx", "/a:/b,/c:/d", ""):
        assert "source:target" in references.mount_problem(bad)


def test_only_a_full_hash_is_a_commit():
    assert references.is_commit("0123456789abcdef0123456789abcdef01234567")
    assert not any(map(references.is_commit, ("main", "v0.6.2", "0123456", "G" * 40)))


@pytest.mark.parametrize(
    ("image", "asked"),
    [
        ("nvcr.io/nvidia/nemo", "docker://nvcr.io#nvidia/nemo:"),
        ("nvcr.io/nvidia/nemo:26.02", "docker://nvcr.io#nvidia/nemo:"),
        ("mirror:5000/a/b", "docker://mirror:5000#a/b:"),
        ("docker.io/library/debian", "docker://library/debian:"),
        ("debian", "docker://debian:"),
    ],
)
def test_how_enroot_is_asked_for_a_digest(image, asked):
    digest = "sha256:" + "a" * 64
    assert references.for_enroot(f"{image}@{digest}") == asked + digest
