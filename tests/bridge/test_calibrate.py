"""`megaboa calibrate` on this machine's processors: two ranks, gloo."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megaboa import records
from megaboa.bridge.kernel_times import Bench
from megaboa.check import calibration
from megaboa.commands import calibrate
from megaboa.records import Calibration

MEGABOA = Path(__file__).parents[2] / "workflow" / "scripts" / "megaboa"


@pytest.mark.slow
def test_everything_is_measured_and_written_for_the_planner(tmp_path, monkeypatch):
    command = [sys.executable, MEGABOA, "calibrate", "--device", "cpu", "--gpus", "2"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    found = records.read(Calibration, tmp_path / "calibrations" / "cpu.json")
    assert found.node.ranks == 2 and found.network is None
    assert set(found.products) == {"fp32"} and set(found.attention) == {"forward", "backward"}
    laws = [*found.products.values(), *found.attention.values(), found.memory, found.node.all_reduce, found.node.send]
    assert all(law.rate > 0 and law.points for law in laws)
    # An expert's is a difference of times, which on a loaded machine may be none: test_host_times.py counts operations.
    assert 0 < found.launch < found.layer["fp32"] and found.experts_host.seconds(0, groups=8) >= 0
    assert found.tensor_host == 0 <= found.micro_batch
    assert "written: calibrations/cpu.json" in done.stdout
    monkeypatch.setattr(calibration, "FOLDER", tmp_path / "calibrations")
    assert calibration.of("cpu") == found


@pytest.mark.slow
def test_a_rank_that_fails_ends_the_others(tmp_path):
    command = [sys.executable, MEGABOA, "calibrate", "--device", "cpu", "--out", "/proc/no/file.json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode != 0 and "/proc/no" in done.stderr


def test_kernels_without_gradients_are_measured_between_layers_that_have_them():
    layer, seconds = Bench(torch.device("cpu")).layer
    with torch.no_grad():
        layer()
    assert seconds > 0


def test_a_gpu_of_another_kind_than_the_experiment_says_is_told(monkeypatch):
    monkeypatch.setattr(calibration, "FOLDER", Path("calibrations"))
    used = "predictions in this folder are made with calibrations/h100.json from now on"
    assert calibrate._used("h100", "h100-80g") == calibrate._used("h100", None) == used
    assert calibrate._used("h100pcie", "h100-80g") == (
        "resources.gpu: h100-80g, and the GPUs are of the kind h100pcie: with h100pcie-80g predictions are made with "
        "calibrations/h100pcie.json, with h100-80g they are not"
    )


@pytest.mark.parametrize(
    ("words", "there", "why"),
    [
        (["--device", "cuda"], 0, "--device: cuda, and this machine has no GPU"),
        (["--device", "cuda", "--gpus", "3"], 2, "--gpus: 3, and this machine has 2"),
        (["--device", "cpu", "--gpus", "0"], 0, "--gpus: 0: at least 1"),
    ],
)
def test_ranks_that_this_machine_has_not_are_refused(monkeypatch, capsys, words, there, why):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: there)
    with pytest.raises(SystemExit):
        calibrate.main(words)
    assert capsys.readouterr().err.endswith(f"error: {why}\n")
