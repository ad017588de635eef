"""Layouts: a checkpoint written under one goes on under another; what the launcher can't do is refused."""

import shutil

import pytest

from megaboa.results import RunFolder
from megaboa.run.supervisor import store_of

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("layouts")]

RUNS = {
    "dp1": "{}",
    "tp2": "{resources.gpus_per_node: 2, parallel.tp: 2, parallel.sp: true}",
    "pp2": "{resources.gpus_per_node: 2, parallel.pp: 2}",
}


def test_a_checkpoint_of_one_layout_goes_on_under_another(workspace, monkeypatch):
    config = workspace.experiment("layouts", RUNS, steps=10, save_interval=5)
    targets = [f"results/layouts/runs/{run}/train.json" for run in ("dp1", "tp2")]
    workspace.snakemake(*targets, "--configfile", config)
    halfway = workspace.store("layouts", "tp2") / "checkpoints" / "iter_0000005"
    monkeypatch.chdir(workspace.path)
    other = store_of(RunFolder(workspace.results("layouts", "runs", "pp2"))).checkpoints
    shutil.copytree(halfway, workspace.path / other / halfway.name)
    output = workspace.snakemake("pretrain", "--configfile", config)
    assert "pp2" in output and "from step 5" in output
    whole = {step: float.fromhex(loss) for step, loss, _ in workspace.steps("layouts", "dp1")}
    resumed = {step: float.fromhex(loss) for step, loss, _ in workspace.steps("layouts", "pp2")}
    assert list(resumed) == [6, 7, 8, 9, 10]
    assert all(abs(loss - whole[step]) < 1e-5 for step, loss in resumed.items())
