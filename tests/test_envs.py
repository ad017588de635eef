"""The lock files: complete, consistent with each other and with what they were made from, and free of hosts."""

import re
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

ENVS = Path(__file__).parents[1] / "envs"
LOCKS = ("bootstrap", "pipeline", "runtime-cpu", "runtime-cuda", "megatron", "dev")


def pins(name):
    return dict(re.findall(r"^([a-z0-9.-]+)==(\S+)", (ENVS / f"{name}.txt").read_text(), re.MULTILINE))


def wanted(name):
    """What a source file asks for, by package."""
    lines = [line.split("#")[0].strip() for line in (ENVS / f"{name}.in").read_text().splitlines()]
    asked = [Requirement(line) for line in lines if line]
    return {one.name.lower().replace("_", "-"): one.specifier for one in asked}


@pytest.mark.parametrize("name", LOCKS)
def test_everything_asked_for_is_pinned_and_hashed(name):
    assert set(wanted(name)) <= set(pins(name))
    text = (ENVS / f"{name}.txt").read_text()
    assert len(re.findall(r"^\S+==\S+ \\\n    --hash=sha256:", text, re.MULTILINE)) == len(pins(name))


@pytest.mark.parametrize("name", LOCKS)
def test_no_pin_is_stale_against_its_source(name):
    """An edited source without `envs/lock.sh`."""
    found = pins(name)
    for package, versions in wanted(name).items():
        assert package not in found or versions.contains(found[package], prereleases=True), f"{package}: envs/lock.sh"


def test_the_lock_for_gpus_brings_nothing_of_the_images_own():
    theirs = re.compile("torch|triton|numpy|setuptools|cuda-.*|nvidia-(?!resiliency-ext|ml-py).*")
    assert [package for package in pins("runtime-cuda") if theirs.fullmatch(package)] == []


def test_the_locks_do_not_contradict_each_other():
    together = {}
    for name in LOCKS:
        for package, version in pins(name).items():
            assert together.setdefault(package, version) == version, package


@pytest.mark.parametrize("name", LOCKS)
def test_no_host_is_named(name):
    assert not re.search(r"https?:|--index-url|--find-links", (ENVS / f"{name}.txt").read_text())


@pytest.mark.parametrize("name", ["pipeline", "runtime-cpu"])
def test_the_conda_file_has_the_same_pins(name):
    listed = yaml.safe_load((ENVS / f"{name}.yaml").read_text())["dependencies"][-1]["pip"]
    assert dict(pin.split("==") for pin in listed) == pins(name)


def test_the_conda_environment_of_the_ranks_gets_megatron_too():
    script = (ENVS / "runtime-cpu.post-deploy.sh").read_text()
    assert all(f"{package}=={version}" in script for package, version in pins("megatron").items())
