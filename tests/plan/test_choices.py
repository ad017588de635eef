"""megaboa.plan.choices: the runs of a sweep, what they and their models are called, and their values."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from megaboa.config import ConfigError
from megaboa.plan import Plan

PlanOf = Callable[..., Plan]


def names(plan: Plan) -> list[str]:
    return [run.name for run in plan.runs]


@pytest.mark.parametrize(
    ("sweep", "expected"),
    [
        ("{grid: {parallel.tp: [1, 2], training.micro_batch_size: [1, 2]}}", "tp1-mbs1 tp1-mbs2 tp2-mbs1 tp2-mbs2"),
        ("{grid: {optimizer.lr: [3e-4, 1e-5, 2.0]}}", "lr0.0003 lr1e-05 lr2"),
        ("{grid: {parallel.distributed_optimizer: [true, false]}}", "distopt nodistopt"),
        ("{grid: {schedule.decay: [WSD, inverse-square-root]}}", "decay-WSD decay-inverse-square-root"),
        ("{grid: {checkpoint.keep_last: [null], training.seed: [1]}}", "keep_last-none-seed1"),
        ("{zip: {training.seed: [1, 2], optimizer.lr: [0.1, 0.2]}}", "seed1-lr0.1 seed2-lr0.2"),
        ("{runs: {b: {training.seed: 1}, a: {training.seed: 2}}}", "b a"),
        ("{grid: {parallel.tp: [2]}, runs: {a: {training.seed: 1}, b: {training.seed: 2}}}", "tp2-a tp2-b"),
        ("{grid: {layout: {two: {parallel.tp: 2}, wide: {parallel.tp: 4}}}}", "two wide"),
        ("{grid: {overrides.model.moe_permute_fusion: [true, false]}}", "moe_permute_fusion nomoe_permute_fusion"),
        ("{grid: {overrides.ddp.bucket_size: [1000000]}}", "bucket_size1000000"),
        ("{grid: {overrides.optimizer.lr: [0.1]}}", "lr0.1"),
        ("{grid: {data.blend: [{text: 2}]}}", "data-text2"),
        ("{grid: {data.split: ['90,5,5']}}", "split-90-5-5"),
        ("{grid: {training.micro_batch_size: [gbs / 2]}}", "mbs-gbs-2"),
    ],
)
def test_names(plan_of: PlanOf, sweep: str, expected: str) -> None:
    needed = "resources: {gpus_per_node: 4}\n" if "parallel.tp" in sweep else ""
    assert names(plan_of(f"{needed}sweep: {sweep}")) == expected.split()


def test_no_sweep_is_one_run(plan_of: PlanOf) -> None:
    assert names(plan_of()) == ["run"]


GRID = "sweep: {grid: {models.dense.config.hidden_size: %s}, runs: {trunk: {}, %s}}"
CELLS = {"training.train_iters": 40, "checkpoint.save_interval": 10}


@pytest.mark.parametrize(
    ("sizes", "runs", "expected"),
    [
        ([32, 64], "b: {continue_from: small/trunk@20}", {"h32-b": "h32-trunk@20", "h64-b": "h64-trunk@20"}),
        (
            [32],
            "b: {continue_from: small/trunk@20, training.seed: 2}, c: {continue_from: small/b@30}",
            {"h32-b": "h32-trunk@20", "h32-c": "h32-b@30"},
        ),
        # a run's full name, also if an entry is called so
        ([32], "h32-trunk: {training.seed: 2}, b: {continue_from: small/h32-trunk@20}", {"h32-b": "h32-trunk@20"}),
    ],
)
def test_a_run_continues_from_another_of_its_cell_of_the_grid(
    plan_of: PlanOf, sizes: list[int], runs: str, expected: dict[str, str]
) -> None:
    plan = plan_of(GRID % (sizes, runs), **CELLS)
    assert {run.name: run.row["parent"] for run in plan.runs if run.run.parent} == {
        name: f"small/{parent}" for name, parent in expected.items()
    }


@pytest.mark.parametrize(
    ("parent", "said"),
    [
        ("small/trunc@20", "there is no run 'trunc'; runs: h32-trunk, h32-b"),
        ("small/trunk@25", "small/h32-trunk keeps no checkpoint of step 25"),
        ("small/b@20", "h32-b → h32-b: a run can't continue"),
        ("other/trunk@20", "other/trunk has not been trained"),
    ],
)
def test_a_parent_of_no_cell_is_refused_with_its_key(plan_of: PlanOf, parent: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        plan_of(GRID % ([32, 64], f"b: {{continue_from: {parent}}}"), **CELLS)
    assert f"sweep.runs.b.continue_from: {said}" in str(error.value)


def test_a_swept_model_becomes_one_model_for_each_value(plan_of: PlanOf) -> None:
    plan = plan_of("sweep: {grid: {models.dense.config.hidden_size: [32, 64], training.seed: [1, 2]}}")
    assert names(plan) == ["h32-seed1", "h32-seed2", "h64-seed1", "h64-seed2"]
    assert [run.model for run in plan.runs] == ["dense-h32", "dense-h32", "dense-h64", "dense-h64"]
    assert {name: model.config["hidden_size"] for name, model in plan.models.items()} == {
        "dense-h32": 32,
        "dense-h64": 64,
    }
    assert plan["h32-seed1"].config.model == "dense-h32"
    assert plan["h32-seed1"].run.model["name"] == "dense-h32"


def test_names_of_models_may_hold_dots(plan_of: PlanOf) -> None:
    text = "models: {q-2.5: {tokenizer: bpe, config: {model_type: llama}}}\nmodel: q-2.5\n"
    plan = plan_of(text + "sweep: {grid: {models.q-2.5.config.hidden_size: [64]}}")
    assert plan.runs[0].model == "q-2.5-h64"


def test_a_derived_model_may_not_take_the_name_of_another(plan_of: PlanOf) -> None:
    other = "models: {dense-h32: {hf: org/name}}\nmodel: dense\n"
    with pytest.raises(ConfigError, match="two different models would be called 'dense-h32'"):
        plan_of(other + "sweep: {grid: {models.dense.config.hidden_size: [32]}}")


def test_what_is_swept_reaches_the_run(plan_of: PlanOf) -> None:
    plan = plan_of("sweep: {runs: {a: {optimizer.lr: 1, overrides.model.x: {y: 1}}, b: {}}}")
    a, b = plan.runs
    assert (a.config.optimizer.lr, a.run.optimizer["lr"], a.row["lr"]) == (1.0, 1.0, 1.0)
    assert a.run.overrides == {"model.x": {"y": 1}}
    assert b.config.optimizer.lr == 3e-4
    assert b.run.overrides == {}
    assert a.values == {"optimizer.lr": 1, "overrides.model.x": {"y": 1}}


def test_a_bad_value_of_a_sweep_is_placed_in_the_sweep(plan_of: PlanOf) -> None:
    with pytest.raises(ConfigError, match=r"more\.yaml:1: sweep\.grid\.training\.micro_batch_size: -8 must be greater"):
        plan_of("sweep: {grid: {training.micro_batch_size: [1, -gbs]}}")
