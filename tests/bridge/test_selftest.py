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

ENTRYPOINT = Path(__file__).parents[2] / "workflow/scripts/train_rank.py"


def test_versions_are_held_against_the_pins():
    found = {"Torch": "2.13.0+cu130", "megatron_core": "0.19.1"}
    wanted = {"torch": "2.13.0", "megatron-core": "0.19.2", "deep-ep": "1"}
    assert selftest.differences(found, wanted) == [
        ("megatron-core", "0.19.1", "0.19.2"),
        ("deep-ep", None, "1"),
    ]


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
    for package, version in pins.packages("cpu").items():
        assert report["packages"][package] == version
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
