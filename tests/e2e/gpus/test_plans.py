"""The plans of these experiments, on any machine: a mistake in one would be seen on GPUs only."""

import pytest
import test_gpu_experts
import test_gpu_graphs
import test_gpu_layouts
from clone import Workspace
from gpu_runs import experiment
from test_gpu_deaths import long_runs

from megaboa.config import load
from megaboa.plan import make_plan

EXPERIMENTS = {
    "deaths": long_runs,
    "experts": lambda workspace: experiment(workspace, "made", test_gpu_experts.RUNS, model=test_gpu_experts.MODEL),
    "graphs": lambda workspace: experiment(workspace, "made", test_gpu_graphs.RUNS, init="scratch", seq_length=64),
    "layouts": lambda workspace: experiment(workspace, "made", test_gpu_layouts.RUNS, proved=test_gpu_layouts.PROVED),
}


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_run_is_planned(tmp_path, name):
    loaded = load([EXPERIMENTS[name](Workspace(tmp_path))])
    assert [run.name for run in make_plan(loaded).runs] == list(loaded.experiment.sweep.runs)
