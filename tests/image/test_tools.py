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
