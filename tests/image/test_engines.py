"""Which engine builds, and with what command."""

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


def test_enroot_takes_images_from_docker_and_podman_only():
    sources = [engines.enroot_source(engine, "m:1") for engine in engines.ENGINES]
    assert sources == ["dockerd://m:1", "podman://m:1", None]


def test_variables_of_an_image_are_a_line_each():
    assert engines.environment_file(["PATH=/a:/b", "A=x\ny", "B="]) == "PATH=/a:/b\nB=\n"
