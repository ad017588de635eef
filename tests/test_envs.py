"""The lock files: complete, consistent with each other and with what they were made from, and free of hosts."""

import re
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from megaboa.image import dockerfile
from megaboa.image.pins import LOCKS as OF_RANKS

ENVS = Path(__file__).parents[1] / "envs"
BOTH = ("bootstrap", "pipeline", "megatron", "peft", "dev")
GPUS = ("runtime-cuda", "transformer-engine", "resiliency")
ENVIRONMENTS = {"cpu": (*BOTH, "runtime-cpu"), "cuda": (*BOTH, *GPUS)}  # what setup.sh installs together
LOCKS = (*BOTH, "runtime-cpu", *GPUS)
NOT_OF_RANKS = {"pipeline", "dev"}


def pins(name):
    return dict(re.findall(r"^([a-z0-9.-]+)==(\S+)", (ENVS / f"{name}.txt").read_text(), re.MULTILINE))


def wanted(name):
    """What a source file asks for, by package."""
    lines = [line.split("#")[0].strip() for line in (ENVS / f"{name}.in").read_text().splitlines()]
    asked = [Requirement(line) for line in lines if line]
    return {one.name.lower().replace("_", "-"): one.specifier for one in asked}


def test_setup_installs_these_together():
    first, *of_gpus = re.findall(r"locks\+?=\((.*)\)", (ENVS / "setup.sh").read_text())
    for device, lists in {"cpu": [first], "cuda": [first, *of_gpus]}.items():
        assert {*OF_RANKS[device]} == {*ENVIRONMENTS[device]} - {"bootstrap", "resiliency", *NOT_OF_RANKS}
        names = re.findall(r"envs/(\S+)\.txt", " ".join(lists).replace("$device", device))
        assert set(names) == set(ENVIRONMENTS[device])


@pytest.mark.parametrize(("file", "device"), [("Dockerfile.cpu", "cpu"), ("Dockerfile", "cuda")])
def test_an_image_has_what_setup_installs_for_ranks(file, device):
    """Without `peft`, for one, an adapter's proof leaves a check out."""
    wanted = {name.replace("runtime-cuda", "image-cuda") for name in ENVIRONMENTS[device]} - NOT_OF_RANKS
    read = dockerfile.read(ENVS.parent / "containers" / file)
    for instruction in ("COPY", "RUN"):
        assert set(re.findall(r"([\w-]+)\.txt\b", " ".join(one.text for one in read.named(instruction)))) == wanted


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


def test_the_images_lock_is_the_gpus_without_the_images_own():
    theirs = re.compile(
        r"torch|triton|numpy|setuptools|cuda-.*"
        r"|nvidia-(cu|nccl|nvjitlink|nvshmem|nvtx)(?!dnn-frontend|tlass).*"
    )
    gpus = pins("runtime-cuda")
    assert pins("image-cuda") == {name: version for name, version in gpus.items() if not theirs.fullmatch(name)}
    assert len(pins("image-cuda")) < len(gpus) - 20


def test_transformer_engines_three_parts_are_of_one_version():
    """It refuses to be imported otherwise."""
    parts = pins("runtime-cuda") | pins("transformer-engine")
    names = ("transformer-engine", "transformer-engine-cu13", "transformer-engine-torch")
    assert len({parts[name] for name in names}) == 1


def test_headers_are_of_the_cuda_that_torch_is_built_for():
    found = pins("runtime-cuda")
    headers = ("cccl", "crt", "profiler-api", "runtime")
    assert {found[f"nvidia-cuda-{name}"].rsplit(".", 1)[0] for name in headers} == {"13.0"}
    assert found["cuda-toolkit"].startswith("13.0.")


@pytest.mark.parametrize("device", ENVIRONMENTS)
def test_the_locks_of_an_environment_do_not_contradict_each_other(device):
    together = {}
    for name in ENVIRONMENTS[device]:
        for package, version in pins(name).items():
            assert together.setdefault(package, version) == version, package


def test_what_both_devices_have_is_of_one_version():
    """But for torch, and what it brings: GPUs have the one that Transformer Engine ran with."""
    own = re.compile("torch|triton|setuptools|(nvidia|cuda)-.*")
    cpu, cuda = pins("runtime-cpu"), pins("runtime-cuda")
    assert {name: (cpu[name], cuda[name]) for name in cpu.keys() & cuda if cpu[name] != cuda[name]}.keys() <= {
        name for name in cpu if own.fullmatch(name)
    }


@pytest.mark.parametrize("name", [*LOCKS, "image-cuda"])
def test_no_host_is_named(name):
    assert not re.search(r"https?:|--index-url|--find-links", (ENVS / f"{name}.txt").read_text())


@pytest.mark.parametrize("name", ["pipeline", "runtime-cpu"])
def test_the_conda_file_has_the_same_pins(name):
    listed = yaml.safe_load((ENVS / f"{name}.yaml").read_text())["dependencies"][-1]["pip"]
    assert dict(pin.split("==") for pin in listed) == pins(name)


def test_the_conda_environment_of_the_ranks_gets_megatron_and_peft_too():
    script = (ENVS / "runtime-cpu.post-deploy.sh").read_text()
    assert all(
        f"{package}=={version}" in script for name in ("megatron", "peft") for package, version in pins(name).items()
    )
