"""The entrypoint's own test, here, where nothing of a GPU is."""

import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megaboa.bridge import selftest
from megaboa.bridge.wheels import is_installed
from megaboa.files import read_json
from megaboa.image import pins
from megaboa.records import Contract, OtherVersion

ENTRYPOINT = Path(__file__).parents[2] / "workflow/scripts/train_rank.py"


def test_versions_are_held_against_the_pins():
    found = {"Torch": "2.13.0+cu130", "megatron_core": "0.19.1"}
    wanted = {"torch": "2.13.0", "megatron-core": "0.19.2", "deep-ep": "1"}
    assert selftest.differences(found, wanted) == (
        OtherVersion(package="deep-ep", found=None, pinned="1"),
        OtherVersion(package="megatron-core", found="0.19.1", pinned="0.19.2"),
    )


def test_one_line_says_what_is_other_than_pinned():
    locked = pins.locked(*pins.LOCKS["cuda"])

    def told(found):
        other = selftest.differences(found, locked)
        report = Contract(state="PASS", device="cuda", python="3.12.1", c_library="glibc 2.39", other_than_pinned=other)
        return [line for line in selftest.told(report) if "pinned" in line]

    assert told(locked) == []
    others = {"torch": "2.12.0a0+nv26.6", "nvidia-modelopt": "0.44.0", "megatron_energon": "7.0.0"}
    assert told(locked | others) == [
        f"other than pinned: torch 2.12.0a0+nv26.6 (pinned: {locked['torch']}), "
        f"megatron-energon 7.0.0 (pinned: {locked['megatron-energon']}), "
        f"nvidia-modelopt 0.44.0 (pinned: {locked['nvidia-modelopt']})"
    ]
    (line,) = told({"diffusers": "0.1"})
    assert line.startswith("other than pinned: megatron-bridge missing (pinned: ")
    assert line.endswith(f"diffusers 0.1 (pinned: {locked['diffusers']}), {len(locked) - 6} more in the report")


@pytest.fixture
def examined(monkeypatch, tmp_path):
    """The strict self-test of an environment with these packages, in an image of ours or outside."""

    def examine(found, image=False, glibc=(2, 39)):
        (tmp_path / "versions.toml").touch()
        monkeypatch.setattr(pins, "IN_IMAGE", tmp_path / ("versions.toml" if image else "none"))
        monkeypatch.setattr(pins, "_glibc", lambda: glibc)
        monkeypatch.setattr(selftest, "installed_packages", lambda: found)
        monkeypatch.setattr(selftest, "linked_imports", lambda installed: {})
        monkeypatch.setattr(selftest, "_failed_imports", lambda device: {"torch": "not tried"})
        report = selftest.examine("cuda", strict=True)
        others = {one.package: (one.found, one.pinned) for one in report.other_than_pinned}
        return others, [text for text in report.problems if "is pinned" in text]

    return examine


def test_what_make_setup_installs_is_what_is_pinned(examined):
    """NVSHMEM too: torch's own, where no image brings the one for DeepEP."""
    locked = pins.locked(*pins.LOCKS["cuda"])
    assert examined(locked | pins.locked("resiliency")) == ({}, [])
    assert examined(locked, glibc=(2, 36)) == ({}, [])
    others, problems = examined(locked)
    assert list(others) == ["nvidia-resiliency-ext"] and "is not installed" in problems[0]


def test_what_an_images_base_brings_is_listed_and_no_mistake(examined):
    ours = pins.locked("image-cuda", "transformer-engine", "resiliency", "megatron", "peft")
    built = {"nvidia-nvshmem-cu13": pins.arguments()["NVSHMEM_VERSION"]}
    assert examined(ours | built, image=True) == ({}, [])
    torch = pins.packages("cuda")["torch"]
    found = ours | built | {"torch": "2.12.0a0+nv26.6"}
    assert examined(found, image=True) == ({"torch": ("2.12.0a0+nv26.6", torch)}, [])
    _, (problem,) = examined({**ours, "nvidia-nvshmem-cu13": "3.4.5"}, image=True)
    assert problem == f"nvidia-nvshmem-cu13 is 3.4.5, and {built['nvidia-nvshmem-cu13']} is pinned"


def test_the_first_of_two_versions_counts_which_is_imported(tmp_path, monkeypatch):
    """An image's environment lies over its base's packages."""
    for folder, name, version in (("base", "Transformer-Engine", "2.17"), ("venv", "transformer_engine", "2.20.2")):
        info = tmp_path / folder / f"transformer_engine-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        monkeypatch.syspath_prepend(tmp_path / folder)
    found = selftest.installed_packages()
    assert found["transformer_engine"] == "2.20.2" and "Transformer-Engine" not in found


def test_what_is_missing_says_what_it_disables():
    def told(device, installed, programs=()):
        return {one.what: one.disables for one in selftest.missing(device, installed.__contains__, dict(programs).get)}

    every = set(selftest.OPTIONAL)
    assert told("cuda", every, {"nsys": "/nsys"}) == told("cpu", every) == {}
    assert "fp8" in told("cuda", every - {"transformer_engine"})["transformer_engine"]
    assert "an export's adapters" in told("cpu", every - {"peft"})["peft"]
    assert told("cuda", every)["nsys"] == "profile.tool: nsys"
    assert "transformer_engine" not in told("cpu", {"wandb"})


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Install a package of one module, for this process and those that it starts."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ['PYTHONPATH']}")

    def install(name, code, below=None):
        path = tmp_path.joinpath(name, *([below] if below else []), "__init__.py")
        path.parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name / "__init__.py").touch()
        path.write_text(code)
        importlib.invalidate_caches()

    return install


WRONG_CUDA = "libcudart.so.11.0: cannot open shared object file: No such file or directory"


def test_what_is_installed_is_really_imported(package):
    assert selftest.linked_imports(is_installed) == {}, "nothing of a GPU is here"
    package("deep_ep", "import ctypes\nctypes.CDLL('libcudart.so.11.0')\n")
    package("transformer_engine", "", below="pytorch")
    assert selftest.linked_imports(is_installed) == {
        "deep_ep": f"OSError: {WRONG_CUDA}",
        "transformer_engine.pytorch": None,
    }


def test_a_half_of_transformer_engine_that_it_hides_itself(package):
    package("transformer_engine", "import gone\n", below="pytorch")
    package("transformer_engine", "try:\n    from . import pytorch\nexcept ImportError:\n    pass\n")
    told = selftest.linked_imports(is_installed)["transformer_engine.pytorch"]
    assert told == "ModuleNotFoundError: No module named 'gone'"


def test_an_import_that_ends_its_process(package):
    package("deep_ep", "import os\nos.kill(os.getpid(), 11)\n")
    assert selftest.import_error("deep_ep") == "the process ended by signal 11"


@pytest.mark.parametrize(
    ("why", "of_the_driver"),
    [
        ("ImportError: libcuda.so.1: cannot open shared object file: No such file or directory", True),
        ("RuntimeError: Found no NVIDIA driver on your system.", True),
        ("RuntimeError: 0 active drivers ([]). There should only be one.", True),
        ("RuntimeError: CUDA driver version is insufficient for CUDA runtime version", True),
        (f"ImportError: {WRONG_CUDA}", False),
        ("ModuleNotFoundError: No module named 'transformer_engine_torch'", False),
        ("ImportError: deep_ep_cpp.so: undefined symbol: _ZN3c104cuda9SetDeviceEab", False),
    ],
)
def test_a_driver_that_is_not_there_is_no_fault_of_the_image(why, of_the_driver):
    assert (selftest.BROKEN.search(why) is None) == of_the_driver


def self_test(*arguments):
    return subprocess.run([sys.executable, ENTRYPOINT, "--self-test", *arguments], capture_output=True, text=True)


@pytest.mark.slow
def test_the_entrypoint_examines_this_environment(tmp_path):
    done = self_test("--device=cpu", "--strict", f"--out={tmp_path}/report.json")
    assert done.returncode == 0, done.stderr
    report = read_json(tmp_path / "report.json")
    assert report["state"] == "PASS" and report["other_than_pinned"] == []
    assert report["imports"] == list(selftest.REQUIRED)
    assert report["packages"]["torch"].split("+")[0] == pins.packages("cpu")["torch"]
    assert report["gpu"]["cuda"].startswith("13.") and report["gpu"]["nccl"]  # torch's own, unused here
    assert Path(report["bridge"]).name == "bridge"


@pytest.mark.slow
def test_what_is_asked_of_gpus_and_is_not_here_or_broken(package):
    package("deep_ep", f"raise ImportError({WRONG_CUDA!r})\n")
    done = self_test("--device=cuda", "--strict")
    report = json.loads(done.stdout)
    assert done.returncode == 1 and report["state"] == "FAIL"
    assert any("transformer-engine is not installed, and 2.20.2 is pinned" in line for line in report["problems"])
    assert f"deep_ep can't be imported: ImportError: {WRONG_CUDA}" in report["problems"]
    assert report["imports"] == list(selftest.REQUIRED)
    assert (
        "self-test: without transformer_engine: no fp8" in done.stderr and "self-test: CUDA 13.0, NCCL" in done.stderr
    )
    missing = {one["what"] for one in report["missing"]}
    assert "transformer_engine" in missing and "deep_ep" not in missing
    assert ("nsys" in missing) == (shutil.which("nsys") is None)  # the one of these that a CPU may well have
