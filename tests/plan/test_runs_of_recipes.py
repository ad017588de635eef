"""What a run takes from a recipe's file, and what of its code decides the run's identity."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from megaboa.config import load
from megaboa.plan import Plan, make_plan

PlanOf = Callable[..., Plan]
RECIPE = "models: {r: {recipe: RECIPE_FILE, tokenizer: bpe, args: {layers: 2}}}\nmodel: r\noptimizer: {lr: 1.0e-3}\n"


def recipe_run(tmp_path: Path, code: str):
    file = tmp_path / "recipe.py"
    file.write_text(code)
    experiment = tmp_path / "recipes.yaml"
    corpus = "corpora: {text: {source: python-stdlib}}\ntokenizers: {bpe: {train_on: text}}\n"
    experiment.write_text(corpus + RECIPE.replace("RECIPE_FILE", str(file)))
    return make_plan(load([experiment])).runs[0]


def test_keys_that_are_not_set_never_overwrite_a_recipe(tmp_path: Path) -> None:
    run = recipe_run(tmp_path, "def configure(layers): ...\n")
    assert run.run.optimizer == {"lr": 0.001}
    assert run.run.training == run.run.parallel == run.run.schedule == {}
    assert run.run.data == {"blend": {"text": 1.0}}
    assert (run.row["lr"], run.row["gbs"], run.row["dp"], run.row["tokens"]) == (0.001, "recipe", "recipe", "recipe")


def test_a_comment_in_a_recipe_is_no_change_but_code_is(tmp_path: Path) -> None:
    plain = recipe_run(tmp_path, "def configure(layers):\n    return layers\n")
    commented = recipe_run(
        tmp_path, '"""Doc."""\n\n\ndef configure(layers):\n    """Why."""\n    # c\n    return layers\n'
    )
    changed = recipe_run(tmp_path, "def configure(layers):\n    return layers + 1\n")
    assert plain.run.model["recipe_code"] == commented.run.model["recipe_code"]
    assert plain.run.model["recipe_code"] != changed.run.model["recipe_code"]


def test_what_a_recipe_imports_is_part_of_it(tmp_path: Path) -> None:
    digests = []
    for code in ("SIZE = 1\n", "SIZE = 1  # one\n", "SIZE = 2\n"):
        (tmp_path / "sizes.py").write_text(code)
        digests.append(recipe_run(tmp_path, "import sizes\n\n\ndef configure(layers): ...\n").run.model["recipe_code"])
    first, commented, changed = digests
    assert first == commented != changed


def test_a_recipes_own_way_of_saving_is_left_alone(plan_of: PlanOf, tmp_path: Path) -> None:
    recipe = tmp_path / "r.py"
    recipe.write_text("def configure(): ...\n")
    loaded = tmp_path / "recipe.yaml"
    loaded.write_text(f"device: cpu\nmodels: {{r: {{recipe: {recipe}}}}}\ncheckpoint: {{keep_last: 2}}\n")
    assert make_plan(load([loaded])).runs[0].launch.checkpoint == {"keep_last": 2}
