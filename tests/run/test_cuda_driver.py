"""megaboa.run.cuda_driver: the driver is asked for its GPUs by a process that ends."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from drivers import cuda_stand_in

from megaboa.run import cuda_driver


@pytest.fixture
def driver(tmp_path, monkeypatch):
    for name, value in cuda_stand_in(tmp_path).items():
        monkeypatch.setenv(name, value)


def test_the_capability_of_each_gpu(driver):
    assert cuda_driver.capabilities() == [(9, 0), (8, 0)]


def test_without_gpus_there_are_none(driver, monkeypatch):
    monkeypatch.setenv("CUDA_NO_DEVICE", "1")
    assert cuda_driver.capabilities() == []


def test_without_a_driver_there_are_none(tmp_path, monkeypatch):
    (tmp_path / cuda_driver.LIBRARY).write_text("")  # found before a real one, and no library
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    assert cuda_driver.capabilities() == []


def test_an_answer_with_other_lines_is_none(tmp_path, monkeypatch, driver):
    """As where something that is loaded into every program greets."""
    program = tmp_path / "driver.py"
    source = Path(cuda_driver.__file__).read_text()
    program.write_text(
        source.replace("def main() -> None:\n", "def main() -> None:\n    print('Welcome to the site')\n")
    )
    monkeypatch.setattr(cuda_driver, "__file__", str(program))
    assert cuda_driver.capabilities() == []


def test_a_driver_that_hangs_is_killed(driver, monkeypatch):
    monkeypatch.setenv("CUDA_HANGS", "1")
    monkeypatch.setattr(cuda_driver, "SECONDS", 0.5)
    assert cuda_driver.capabilities() == []


@pytest.mark.skipif(not shutil.which("nvidia-smi"), reason="this machine has no GPU")
def test_real_gpus_are_those_that_pytorch_finds():
    asked = "import torch; print([torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())])"
    found = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True)
    assert str(cuda_driver.capabilities()) == found.stdout.strip()
