"""Every experiment that is shipped is planned without a mistake, and says what GPUs it is for."""

from pathlib import Path

import pytest

from megaboa.bridge_recipes import tuned_for
from megaboa.config import load
from megaboa.plan import make_plan
from megaboa.report.expected import gap_rows
from megaboa.report.runs import RunResult

FOLDER = Path(__file__).parents[2] / "config" / "experiments"
EXPERIMENTS = sorted(path.stem for path in FOLDER.glob("*.yaml"))
WITH_GPU = (
    "deepseek-v2-lite",
    "few-layers-4xh200",
    "fsdp",
    "gpt3",
    "gpt3-h100",
    "llama3",
    "lora-llama3-8b-2xh200",
    "moe",
)


def plan_of(name):
    return make_plan(load([FOLDER / f"{name}.yaml"]))


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_has_the_name_of_its_file_and_breaks_no_rule(name):
    plan = plan_of(name)
    assert plan.name == name
    assert plan.runs and not plan.invalid


def test_few_layers_fit_two_gpus_by_a_file_laid_over_those_for_four():
    plan = make_plan(load([FOLDER / "few-layers-4xh200.yaml", FOLDER / "overlays" / "few-layers-2xh200.yaml"]))
    assert plan.name == "few-layers-2xh200" and not plan.invalid
    assert {run.run.world_size for run in plan.runs} == {2}
    assert {run.name for run in plan.runs} == {run.name for run in plan_of("few-layers-4xh200").runs}


@pytest.mark.parametrize("name", WITH_GPU)
def test_memory_is_predicted_for_every_run(name):
    assert all(run.launch.gpu for run in plan_of(name).runs)


@pytest.mark.parametrize("name", [name for name in EXPERIMENTS if name.startswith("megatron-bridge-")])
def test_each_run_of_a_performance_experiment_is_compared_with_its_row(name):
    """At the layout, batch and precision that the table states."""
    plan = plan_of(name)
    rows = {
        run.name: {key: "-" if value is None else str(value) for key, value in run.row.items()} for run in plan.runs
    }
    gaps = gap_rows(plan.published, [RunResult(run, row, "PASS", summary={}) for run, row in rows.items()])
    found = [gap for gap in gaps if gap["run"]]
    compared = {gap["run"] for gap in found}
    assert compared == set(rows), (
        f"no row of config/published/{plan.experiment.report.compare_to}.yaml has the layout of "
        f"{sorted(set(rows) - compared)}: add the row, or correct its `conditions`; a new axis that tables leave open "
        "is `stated=False` in layout.py"
    )
    # Which GPU it was, only a run can say.
    differing = [one for gap in found for one in gap["differs"]]
    assert all(one.startswith("gpu: None instead of NVIDIA ") for one in differing), differing
    assert all(tuned_for(plan.models[run.model].recipe)[1] == run.row["world_size"] for run in plan.runs)


def test_layouts_are_those_of_the_published_table():
    plan = plan_of("gpt3-h100")
    for row in plan.published["rows"]:
        run, asked = plan[f"gpt3-{row['name'].lower()}"], row["conditions"]
        parallel = run.config.parallel
        found = {"tp": parallel.tp, "pp": parallel.pp, "world_size": run.run.world_size}
        assert found == {name: asked[name] for name in found}
        assert run.config.training.global_batch_size == asked["gbs"]


def test_the_small_models_read_openwebtext_from_the_hub():
    plan = plan_of("gpt3")
    assert plan.experiment.corpora["owt"].source == "hf:stas/openwebtext-10k"
    assert {run.corpora for run in plan.runs} == {("owt",)}


def test_fsdp_is_tried_in_all_its_shardings_and_comes_back_where_it_can():
    runs = {run.config.parallel.fsdp_sharding: run for run in plan_of("fsdp").runs if run.model == "llama-1b"}
    saved = {sharding: run.config.checkpoint.save_interval for sharding, run in runs.items()}
    assert saved == {"no_shard": 0, "optim": 50, "optim_grads": 50, "optim_grads_params": 50}
