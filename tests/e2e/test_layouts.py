"""Layouts: a checkpoint written under one goes on under another; what the launcher can't do is refused."""

import shutil

import pytest

from megaboa.paths import RunFolder
from megaboa.run.identity import identity_of, store_of

pytestmark = pytest.mark.slow

RUNS = {
    "dp1": "{}",
    "tp2": "{resources.gpus_per_node: 2, parallel.tp: 2, parallel.sp: true}",
    "pp2": "{resources.gpus_per_node: 2, parallel.pp: 2}",
}


@pytest.fixture(scope="module")
def trained(workspace):
    """One model under two layouts."""
    config = workspace.experiment("layouts", RUNS, steps=10, save_interval=5)
    workspace.snakemake(*(f"results/layouts/runs/{run}/train.json" for run in ("dp1", "tp2")), "--configfile", config)
    return config


def losses(workspace, run):
    return {step: float.fromhex(loss) for step, loss, _ in workspace.steps("layouts", run)}


def test_the_losses_do_not_depend_on_the_layout(workspace, trained):
    one, two = losses(workspace, "dp1"), losses(workspace, "tp2")
    assert list(one) == list(two) == list(range(1, 11))
    assert all(abs(one[step] - two[step]) < 1e-5 for step in one)


def test_a_checkpoint_of_one_layout_goes_on_under_another(workspace, trained, monkeypatch):
    halfway = workspace.store("layouts", "tp2") / "checkpoints" / "iter_0000005"
    monkeypatch.chdir(workspace.path)
    pp2 = RunFolder(workspace.results("layouts", "runs", "pp2"))
    other = store_of(pp2, identity_of(pp2)).checkpoints
    shutil.copytree(halfway, workspace.path / other / halfway.name)
    output = workspace.snakemake("pretrain", "--configfile", trained)
    assert "2 ranks, from step 5" in output
    whole, resumed = losses(workspace, "dp1"), losses(workspace, "pp2")
    assert list(resumed) == [6, 7, 8, 9, 10]
    assert all(abs(loss - whole[step]) < 1e-5 for step, loss in resumed.items())
