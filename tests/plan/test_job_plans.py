"""What a job of one run plans, compared with the plan of all runs: the job must see the same of its run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from megaboa.calls.configuration import runs_of_job
from megaboa.config import ConfigError, load
from megaboa.plan import make_plan, planner
from megaboa.plan.resources import JobResources
from megaboa.plan.rule_inputs import Inputs
from megaboa.plan.shared import Shared

DEFAULT = Path(__file__).parents[2] / "config" / "config.yaml"
CHAIN = """
models: {dense: {init: pretrained}}
training: {train_iters: 20}
sweep:
  runs:
    first: {optimizer.lr: 1.0}
    second: {optimizer.lr: 2.0, training.train_iters: 30, continue_from: small/first}
    third: {training.train_iters: 40, continue_from: small/second@30, model: dense}
    other: {resources.gpus_per_node: 2}
export: {runs: [other, third]}
report: {agreements: [{reference: first, runs: ["*"], tolerance: 1.0e-3}]}
"""


def of_run(shared: Shared, run: str, *, submits: bool = False) -> dict:
    """All that rules ask about a run, when Snakemake looks at one of its jobs."""
    asked, inputs = JobResources(shared, submits), Inputs(shared, str, str)
    one = SimpleNamespace(run=run)
    resources = [asked.training("train"), asked.training("capture"), asked.exports(), asked.evaluation()]
    model = shared.runs[run].model
    return {
        "inputs": inputs.before_training(run),
        "documents": shared.runs[run].documents["run"],
        "index": shared.runs[run].launch.index,
        "cores": asked.cores(run),
        "peak": asked.of(run).peak_tflops,
        "resources": [{name: value(one) if callable(value) else value for name, value in r.items()} for r in resources],
        "memory": shared.conversion_mb(model, copies=2),
        "model": model,
        "store": shared.plan.experiment.store,
    }


def same_for_every_run(loaded, tmp_path, planned_at_most):
    everything = Shared(make_plan(loaded, tmp_path))
    for run in everything.runs:
        plan = make_plan(loaded, tmp_path, only={run})
        assert run in {one.name for one in plan.runs} and len(plan.runs) <= planned_at_most
        assert of_run(Shared(plan), run) == of_run(everything, run)


def test_of_the_default_experiment(tmp_path):
    same_for_every_run(load([DEFAULT]), tmp_path, planned_at_most=1)


def test_what_a_run_continues_from_is_planned_too(loaded_of, tmp_path):
    loaded = loaded_of(CHAIN)
    same_for_every_run(loaded, tmp_path, planned_at_most=3)
    assert [run.name for run in make_plan(loaded, tmp_path, only={"third"}).runs] == ["first", "second", "third"]
    assert make_plan(loaded, tmp_path, only={"third"}).runs[-1].run.parent.run == "second"


def test_a_recipe_may_need_the_tokenizer_of_another_run(tmp_path):
    file = tmp_path / "recipes.yaml"
    recipe = DEFAULT.parents[1] / "recipes" / "gpt_tiny.py"
    models = {
        "hub": {"hf": "somebody/model", "revision": "main"},
        "recipe": {"recipe": str(recipe), "tokenizer": "somebody/model"},
    }
    runs = {"one": {"model": "recipe"}, "two": {"model": "recipe", "optimizer.lr": 0.1}}
    text = {"experiment": "recipes", "device": "cpu", "models": models, "sweep": {"runs": runs}}
    file.write_text(yaml.safe_dump(text))
    same_for_every_run(load([file]), tmp_path, planned_at_most=2)


def test_a_run_that_is_not_there_is_looked_for_among_all(loaded_of, tmp_path):
    loaded = loaded_of(CHAIN)
    names = [run.name for run in make_plan(loaded, tmp_path).runs]
    assert [run.name for run in make_plan(loaded, tmp_path, only={"gone"}).runs] == names


def test_what_is_wrong_with_the_run_is_said(loaded_of, tmp_path):
    runs = "{good: {}, bad: {training.global_batch_size: 7, training.micro_batch_size: 2}}"
    loaded = loaded_of(f"sweep: {{runs: {runs}}}\n", {"training.train_iters": 10})
    assert len(make_plan(loaded, tmp_path, only={"good"}).runs) == 1
    with pytest.raises(ConfigError, match="bad"):
        make_plan(loaded, tmp_path, only={"bad"})


def test_other_runs_are_not_resolved(loaded_of, tmp_path, monkeypatch):
    """What a job's start costs doesn't grow with the sweep by more than its names."""
    loaded = loaded_of(CHAIN)
    planned, plan = [], planner.RunPlanner.plan
    monkeypatch.setattr(
        planner.RunPlanner, "plan", lambda self, choice: planned.append(choice.name) or plan(self, choice)
    )
    make_plan(loaded, tmp_path, only={"second"})
    assert sorted(planned) == ["first", "second"]


@pytest.mark.parametrize(
    ("words", "runs"),
    [
        ("snakemake -n", set()),
        ("snakemake --target-jobs train:run=dp1 --allowed-rules train --cores all", {"dp1"}),
        ("snakemake --target-jobs train:run=a.b-1 capture:run=c", {"a.b-1", "c"}),
        ("snakemake --target-jobs train:run=dp1 import_model:model=dense --force", set()),
        ("snakemake --target-jobs preflight: --force", set()),
        ("snakemake --target-jobs tokenize:corpus=text,shard=0,shards=2", set()),
    ],
)
def test_which_runs_a_job_is_about(words, runs):
    assert runs_of_job(words.split()) == runs
