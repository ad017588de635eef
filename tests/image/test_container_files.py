# ruff: noqa: E501 (one case a line reads better)
"""The Dockerfiles in containers/: linted as hadolint does it, and planned without an engine or a registry."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megaboa.image import dockerfile, pins

ROOT = Path(__file__).parents[2]
FILES = ["Dockerfile", "Dockerfile.cpu"]


def found(text, path):
    """What is wrong with a Dockerfile, by the names of hadolint's rules."""
    path.write_text(text)
    file = dockerfile.read(path)
    return set(_found(file))


def _found(file):
    runs = [" ".join(one.text.split()) for one in file.named("RUN")]
    shells = [one for one in file.named("SHELL") if "pipefail" in one.text]
    for base in file.bases:
        if "$" not in base and (":" not in base or base.endswith(":latest")):
            yield "DL3006 DL3007 a base without a version"
    users = [one.words[0] for one in file.named("USER")]
    if not users or users[-1].split(":")[0] in ("root", "0"):
        yield "DL3002 the last user is root"
    for one in file.named("WORKDIR"):
        if not one.words[0].startswith("/"):
            yield "DL3000 a relative WORKDIR"
    if file.named("MAINTAINER"):
        yield "DL4000 MAINTAINER"
    if file.named("ADD"):
        yield "DL3020 ADD where COPY does"
    if len(file.named("CMD")) > 1 or len(file.named("ENTRYPOINT")) > 1:
        yield "DL4003 DL4004 several CMD or ENTRYPOINT"
    for text in runs:
        if re.search(r"\bsudo\b", text):
            yield "DL3004 sudo"
        if re.search(r"\bapt (install|update|upgrade)\b", text):
            yield "DL3027 apt in place of apt-get"
        if re.search(r"apt-get (dist-)?upgrade", text):
            yield "DL3005 an upgrade that nothing pins"
        for install in re.findall(r"apt-get install[^&|;]*", text):
            if "--no-install-recommends" not in install:
                yield "DL3015 recommended packages"
            if " -y" not in install:
                yield "DL3014 no -y"
        if "apt-get update" in text and "rm -rf" not in text.split("apt-get update")[1]:
            yield "DL3009 lists are left"
        if "apt-get install" in text and "apt-get update" not in text:
            yield "DL3008 an install without update"
        for install in re.findall(r"\bpip install[^&|;]*", text):
            if not (
                "--require-hashes" in install or "==" in install or "@" in install or re.search(r" /\S+\s*$", install)
            ):
                yield "DL3013 a package without a version"
            if "--no-cache" not in install:
                yield "DL3042 pip's cache is left"
        if re.search(r"[^|]\|[^|]", text) and not shells:
            yield "DL4006 a pipe without pipefail"
        if re.search(r"\bcurl\b(?![^&|;]*-f)", text) or "wget" in text:
            yield "a download that doesn't fail with its server"
        if re.search(r"git clone(?!.*checkout)", text):
            yield "a clone without a commit"


@pytest.mark.parametrize("name", FILES)
def test_nothing_is_found(name, tmp_path):
    assert found((ROOT / "containers" / name).read_text(), tmp_path / "Dockerfile") == set()


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("FROM debian\nUSER 1", "DL3006"),
        ("FROM debian:latest\nUSER 1", "DL3007"),
        ("FROM debian:12", "DL3002"),
        ("FROM debian:12\nUSER 1\nUSER root", "DL3002"),
        ("FROM debian:12\nUSER 1\nWORKDIR here", "DL3000"),
        ("FROM debian:12\nADD a /b\nUSER 1", "DL3020"),
        ("FROM debian:12\nCMD a\nCMD b\nUSER 1", "DL4003"),
        ("FROM debian:12\nMAINTAINER me\nUSER 1", "DL4000"),
        ("FROM debian:12\nRUN sudo true\nUSER 1", "DL3004"),
        ("FROM debian:12\nRUN apt install -y x\nUSER 1", "DL3027"),
        ("FROM debian:12\nRUN apt-get update && apt-get upgrade -y && rm -rf /v\nUSER 1", "DL3005"),
        ("FROM debian:12\nRUN apt-get update && apt-get install -y x && rm -rf /v\nUSER 1", "DL3015"),
        ("FROM debian:12\nRUN apt-get update && apt-get install --no-install-recommends x && rm -rf /v\nUSER 1", "DL3014"),
        ("FROM debian:12\nRUN apt-get update && apt-get install -y --no-install-recommends x\nUSER 1", "DL3009"),
        ("FROM debian:12\nRUN apt-get install -y --no-install-recommends x\nUSER 1", "DL3008"),
        ("FROM debian:12\nRUN pip install --no-cache-dir torch\nUSER 1", "DL3013"),
        ("FROM debian:12\nRUN pip install torch==2\nUSER 1", "DL3042"),
        ("FROM debian:12\nRUN a | b\nUSER 1", "DL4006"),
        ("FROM debian:12\nRUN curl -sSL http://x -o y\nUSER 1", "a download"),
        ("FROM debian:12\nRUN git clone http://x\nUSER 1", "a clone"),
    ],
)  # fmt: skip
def test_every_check_finds_something(text, rule, tmp_path):
    assert any(rule in one for one in found(text, tmp_path / "Dockerfile"))


@pytest.mark.parametrize("name", FILES)
def test_every_version_comes_from_the_one_file(name):
    """No ARG that is a version has a default of its own, and none is without a value."""
    file = dockerfile.read(ROOT / "containers" / name)
    switches = {"PACKAGES", "INSTALL_EFA", "CUDA_ARCHITECTURES"}
    assert {arg for arg, default in file.arguments.items() if default is not None} <= switches
    assert set(file.arguments) - switches <= set(pins.arguments())
    values = pins.build_arguments(file, {})
    unused = [arg for arg in values if len(re.findall(rf"\b{arg}\b", file.path.read_text())) < 2]
    assert unused == []


def test_every_build_argument_of_the_versions_is_used():
    declared = {arg for name in FILES for arg in dockerfile.read(ROOT / "containers" / name).arguments}
    assert set(pins.arguments()) <= declared


def test_the_cpu_image_has_nothing_of_nvidias():
    (base,) = dockerfile.read(ROOT / "containers/Dockerfile.cpu").bases
    assert "nvidia" not in dockerfile.expand(base, pins.arguments())


@pytest.mark.parametrize("name", FILES)
def test_user_and_labels(name):
    file = dockerfile.read(ROOT / "containers" / name)
    assert file.named("USER")[-1].words == ["1000:1000"]
    labels = " ".join(one.text for one in file.named("LABEL"))
    assert all(f"org.opencontainers.image.{label}=" in labels for label in ("title", "description", "licenses"))


@pytest.mark.parametrize("name", FILES)
def test_the_context_brings_what_is_copied_and_nothing_else(name):
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    assert "*" in (ROOT / ".dockerignore").read_text().splitlines()
    for path in dockerfile.read(ROOT / "containers" / name).copied(ROOT):
        assert any(path.relative_to(ROOT).match(pattern) for pattern in allowed), path


@pytest.mark.parametrize("engine", ["docker", "podman", "buildah"])
def test_the_build_plan_of_the_nvidia_image(engine):
    """The whole command, from the versions' file, where there is neither engine nor registry."""
    done = subprocess.run(
        [sys.executable, "workflow/scripts/megaboa", "image", "--engine", engine, "--plan", "containers/Dockerfile", "INSTALL_EFA=true"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    words = shlex.split(done.stdout)
    assert words[:4] == [engine, "build", "--file", "containers/Dockerfile"] and words[-1] == "."
    given = dict(words[at + 1].split("=", 1) for at, word in enumerate(words) if word == "--build-arg")
    assert given["NVIDIA_IMAGE"] == "nvcr.io/nvidia/pytorch:26.06-py3" and given["INSTALL_EFA"] == "true"
    assert re.fullmatch("[0-9a-f]{40}", given["DEEPEP_COMMIT"])
    assert not any("$" in word for word in words)
    labels = [words[at + 1] for at, word in enumerate(words) if word == "--label"]
    assert any(re.fullmatch("org.opencontainers.image.revision=[0-9a-f]{40}", label) for label in labels)


@pytest.mark.parametrize("name", FILES)
def test_shell_of_every_run_is_well_formed(name):
    """bash reads every RUN, without doing it."""
    for one in dockerfile.read(ROOT / "containers" / name).named("RUN"):
        done = subprocess.run(["bash", "-n", "-c", one.text], capture_output=True, text=True)
        assert done.returncode == 0, f"line {one.line}: {done.stderr}"
