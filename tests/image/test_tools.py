# ruff: noqa: E501 (one case a line reads better)
"""What tools say, in one sentence."""

import sys

import pytest

from megaboa.errors import InputError
from megaboa.image import tools

IMAGE = "nvcr.io/nvidia/pytorch@sha256:" + "0" * 64


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("pinging container registry nvcr.io: Get \"https://nvcr.io/v2/\": dial tcp: lookup nvcr.io: no such host", "the registry nvcr.io can't be reached from here"),
        ("Error response from daemon: Get https://nvcr.io/v2/: net/http: TLS handshake timeout", "the registry nvcr.io can't be reached"),
        ("reading manifest sha256:00 in nvcr.io/nvidia/pytorch: manifest unknown", "the registry has no such image"),
        ("unauthorized: authentication required", "log in"),
        ("write /var/lib/containers/x: no space left on device", "the disk is full"),
        ("Write failed because No space left on device", "the disk is full"),
        ("exec /bin/sh: exec format error", "another architecture"),
        ("no image found in manifest list for architecture arm64, variant v8, OS linux", "another architecture"),
    ],
)  # fmt: skip
def test_words_of_tools(said, told):
    assert told in tools.meaning(said, IMAGE)


def test_words_that_are_not_known():
    assert tools.meaning("syntax error in line 3") is None


def test_a_failure_is_told_with_the_last_line():
    command = [sys.executable, "-c", "import sys; print('first'); print('the reason'); sys.exit(3)"]
    with pytest.raises(InputError) as caught:
        tools.call(command, "building it")
    assert str(caught.value) == "building it failed: the reason"


def test_a_silent_failure():
    with pytest.raises(InputError, match="ended with exit code 4"):
        tools.call([sys.executable, "-c", "raise SystemExit(4)"], "building it")


def test_what_is_said_is_given_back(capfd):
    assert tools.call([sys.executable, "-c", "print('hello')"], "it") == "hello"
    assert "hello" in capfd.readouterr().err


def test_a_program_that_is_missing():
    with pytest.raises(InputError, match="mksquashfs-x isn't here: install it"):
        tools.require("mksquashfs-x", "install it")


# As pyxis 0.24.0 and enroot 4.1.2 wrote them under SLURM 22.05.
NODES_IN_DEV = """\
slurmstepd-n1: error: pyxis: child 41 failed with error code: 2
slurmstepd-n1: error: pyxis: failed to create container filesystem for image: /images/base.sqsh
slurmstepd-n1: error: pyxis: printing enroot log file:
slurmstepd-n1: error: pyxis:     [INFO] Extracting squashfs filesystem...
slurmstepd-n1: error: pyxis:     create_inode: could not create character device /data/pyxis_1.0/dev/null, because you're not superuser!
slurmstepd-n1: error: pyxis:     Parallel unsquashfs: Using 2 processors
slurmstepd-n1: error: pyxis:     6891 inodes (7640 blocks) to write
slurmstepd-n1: error: pyxis:     \x20
slurmstepd-n1: error: pyxis:     created 2 hardlinks
slurmstepd-n1: error: spank: required plugin spank_pyxis.so: task_init() failed with rc=-1
slurmstepd-n1: error: Failed to invoke spank plugin stack
srun: error: n1: task 0: Exited with exit code 1
"""
NO_IMAGE = """\
slurmstepd-n2: error: pyxis: child 1630 failed with error code: 1
slurmstepd-n2: error: pyxis: failed to create container filesystem for image: /images/none.sqsh
slurmstepd-n2: error: pyxis: printing enroot log file:
slurmstepd-n2: error: pyxis:     \x1b[0;31m[ERROR]\x1b[0m No such file or directory: /images/none.sqsh
slurmstepd-n2: error: pyxis:     \x1b[0m
slurmstepd-n2: error: spank: required plugin spank_pyxis.so: task_init() failed with rc=-1
slurmstepd-n2: error: Failed to invoke spank plugin stack
slurmstepd-n2: error: pyxis: child 1646 failed with error code: 1
srun: error: n2: task 0: Exited with exit code 1
"""
CUT_OFF = """\
slurmstepd-n1: error: pyxis: child 1585 failed with error code: 1
slurmstepd-n1: error: pyxis: failed to create container filesystem for image: /images/cut.sqsh
slurmstepd-n1: error: pyxis: printing enroot log file:
slurmstepd-n1: error: pyxis:     [INFO] Extracting squashfs filesystem...
slurmstepd-n1: error: pyxis:     Read on filesystem failed because EOF
slurmstepd-n1: error: pyxis:     read_id_table: failed to read id index table
slurmstepd-n1: error: pyxis:     FATAL ERROR: File system corruption detected
slurmstepd-n1: error: spank: required plugin spank_pyxis.so: task_init() failed with rc=-1
"""
NO_MOUNT = """\
slurmstepd-n1: error: pyxis: --container-mounts: source path does not exist: /none
slurmstepd-n1: error: pyxis: couldn't create enroot start configuration script
slurmstepd-n1: error: pyxis: printing enroot log file:
slurmstepd-n1: error: pyxis:     [INFO] Extracting squashfs filesystem...
slurmstepd-n1: error: pyxis: container was not started successfully by another task
slurmstepd-n1: error: spank: required plugin spank_pyxis.so: task_init() failed with rc=-1
"""
NO_ATTEMPT = "failed to create container filesystem for image: /images"


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (
            NODES_IN_DEV,
            f"{NO_ATTEMPT}/base.sqsh: create_inode: could not create character device /data/pyxis_1.0/dev/null, "
            "because you're not superuser!",
        ),
        (NO_IMAGE, f"{NO_ATTEMPT}/none.sqsh: No such file or directory: /images/none.sqsh"),
        (CUT_OFF, f"{NO_ATTEMPT}/cut.sqsh: FATAL ERROR: File system corruption detected"),
        # The task of another host is ended first, under load.
        (
            f"slurmstepd-n2: error: pyxis: child 2040 terminated with signal 15\n{CUT_OFF}",
            f"{NO_ATTEMPT}/cut.sqsh: FATAL ERROR: File system corruption detected",
        ),
        (NO_MOUNT, "--container-mounts: source path does not exist: /none"),
        ("srun: error: n1: task 0: Exited with exit code 1\n", None),
        ("pyxis: imported docker image: ubuntu\nhello\n", None),
    ],
    ids=["device nodes", "no image", "cut off", "another host's", "no mount", "none of pyxis", "all well"],
)
def test_why_an_image_was_not_started(said, why):
    assert tools.why_not_started(said) == why


def test_a_failure_of_enroots_is_told_without_colours():
    says = "print('\\x1b[31m[ERROR]\\x1b[0m No such image'); print('\\x1b[0m'); raise SystemExit(1)"
    with pytest.raises(InputError) as caught:
        tools.call([sys.executable, "-c", says], "fetching it")
    assert str(caught.value) == "fetching it failed: [ERROR] No such image"
