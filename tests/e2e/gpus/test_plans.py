"""The plans of these experiments, on any machine: a mistake in one would be seen on GPUs only."""

import pytest
import test_gpu_deaths
import test_gpu_experts
import test_gpu_finetuned_experts
import test_gpu_graphs
import test_gpu_hangs
import test_gpu_layouts
import test_gpu_samples
from clone import Workspace

from megaboa.config import load
from megaboa.plan import make_plan

MODULES = (
    test_gpu_deaths,
    test_gpu_experts,
    test_gpu_finetuned_experts,
    test_gpu_graphs,
    test_gpu_hangs,
    test_gpu_layouts,
    test_gpu_samples,
)


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_every_run_is_planned(tmp_path, module):
    loaded = load([module.configuration(Workspace(tmp_path))])
    assert [run.name for run in make_plan(loaded).runs] == list(loaded.experiment.sweep.runs)
