"""megaboa.run.cuda_driver: the driver is asked for its GPUs by a process that ends."""

import shutil
import subprocess
import sys

import pytest
from drivers import cuda_stand_in

from megaboa.run import cuda_driver


@pytest.fixture
def driver(tmp_path, monkeypatch):
    for name, value in cuda_stand_in(tmp_path).items():
        monkeypatch.setenv(name, value)


def test_the_capability_of_each_gpu(driver):
    assert cuda_driver.capabilities() == [(9, 0), (9, 0)]


def test_without_gpus_there_are_none(driver, monkeypatch):
    monkeypatch.setenv("CUDA_NO_DEVICE", "1")
    assert cuda_driver.capabilities() == []


def test_without_a_driver_there_are_none(tmp_path, monkeypatch):
    monkeypatch.setattr(cuda_driver, "__file__", str(tmp_path / "driver.py"))
    (tmp_path / "driver.py").write_text("import ctypes\nctypes.CDLL('libof-no-driver.so.1')\n")
    assert cuda_driver.capabilities() == []


def test_a_driver_that_hangs_is_left_alone(driver, monkeypatch):
    monkeypatch.setenv("CUDA_HANGS", "1")
    monkeypatch.setattr(cuda_driver, "SECONDS", 0.5)
    assert cuda_driver.capabilities() == []


@pytest.mark.skipif(not shutil.which("nvidia-smi"), reason="this machine has no GPU")
def test_real_gpus_are_those_that_pytorch_finds():
    asked = "import torch; print([torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())])"
    found = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True)
    assert str(cuda_driver.capabilities()) == found.stdout.strip()
