"""A recipe of two files: what the experiment leaves open stays as it is, what it sets wins, and overrides arrive."""

import shutil

import pytest
import yaml

pytestmark = pytest.mark.slow

EXPERIMENT = """\
experiment: recipe
device: cpu
models: {gpt: {recipe: own/mine.py, args: {hidden_size: 32}}}
training: {precision: fp32}
sweep:
  runs:
    as-it-is: {}
    changed: {optimizer.lr: 1.0e-3, training.train_iters: 4}
    further: {continue_from: recipe/as-it-is@10, training.train_iters: 14, optimizer.lr: 1.0e-3}
overrides:
  model.layernorm_epsilon: 1.0e-6
  model.init_method_std: 0.05
  logger.log_params_norm: true
"""


@pytest.fixture(scope="module")
def done(workspace):
    own = workspace.path / "own"
    own.mkdir()
    shutil.copy(workspace.path / "recipes/gpt_tiny.py", own / "tiny.py")
    (own / "mine.py").write_text("from tiny import configure\n")
    (workspace.path / "recipe.yaml").write_text(EXPERIMENT)
    workspace.snakemake("--configfile", "recipe.yaml")
    return workspace


def bridge_configuration(workspace, run):
    """What Bridge itself says that it trained with."""
    manifest = workspace.json("recipe", "runs", run, "train.json")
    return yaml.safe_load((workspace.path / manifest["checkpoint"] / "run_config.yaml").read_text())


def test_a_recipe_is_trained_and_reported(done):
    assert done.json("recipe", "runs", "as-it-is", "train.json")["train_iters"] == 10, "the recipe's own number"
    assert done.json("recipe", "runs", "changed", "train.json")["train_iters"] == 4
    assert done.json("recipe", "report", "checks.json")["state"] == "PASS"
    assert "\trecipe\t" in done.results("recipe", "plan.tsv").read_text()


def test_only_what_is_set_overwrites_the_recipe(done):
    kept, changed = (bridge_configuration(done, run) for run in ("as-it-is", "changed"))
    assert kept["model"]["hidden_size"] == changed["model"]["hidden_size"] == 32
    assert kept["optimizer"]["lr"] == 3e-4 and changed["optimizer"]["lr"] == 1e-3
    assert kept["train"]["global_batch_size"] == 8
    assert kept["optimizer"]["weight_decay"] == 0.1


def test_overrides_arrive_with_their_types(done):
    found = bridge_configuration(done, "as-it-is")
    assert found["model"]["layernorm_epsilon"] == 1e-6
    assert found["model"]["init_method_std"] == 0.05
    assert found["logger"]["log_params_norm"] is True
    run = done.json("recipe", "runs", "as-it-is", "run.json")
    assert "logger.log_params_norm" not in run["overrides"], "it can't change a loss"
    assert run["overrides"]["model.layernorm_epsilon"] == 1e-6


def test_a_run_goes_on_from_one_of_a_recipe(done):
    """Whose length the plan doesn't know: so the step is named."""
    steps = done.steps("recipe", "further")
    assert [step for step, *_ in steps] == [11, 12, 13, 14]
    found = bridge_configuration(done, "further")
    assert found["optimizer"]["lr"] == 1e-3 and found["scheduler"]["override_opt_param_scheduler"] is True
    parent = done.json("recipe", "runs", "further", "train.json")["parent"]
    assert (parent["run"], parent["iteration"]) == ("as-it-is", 10)


def test_the_step_of_a_recipe_that_is_not_trained_must_be_named(done):
    (done.path / "untold.yaml").write_text(
        EXPERIMENT.replace("experiment: recipe", "experiment: untold").replace("recipe/as-it-is@10", "untold/as-it-is")
    )
    output = done.snakemake("-n", "--configfile", "untold.yaml", code=1)
    assert "the last step of untold/as-it-is is known to its recipe only: write untold/as-it-is@<step>" in output


def test_a_change_of_what_a_recipe_imports_is_a_change_of_the_recipe(done):
    tiny = done.path / "own/tiny.py"
    before = tiny.read_text()
    tiny.write_text(before.replace("num_layers=2", "num_layers=3"))
    assert done.planned("pretrain", "--configfile", "recipe.yaml")["train"] == 3
    tiny.write_text(before + "# nothing else\n")
    assert done.planned("pretrain", "--configfile", "recipe.yaml") == {}
