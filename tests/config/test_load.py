"""Reading and merging."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megaboa.config import ConfigError, load

ROOT = Path(__file__).resolve().parents[2]
BASE = "models: {m: {hf: org/name}}\n"


def write(folder: Path, name: str, text: str) -> Path:
    file = folder / name
    file.write_text(text)
    return file


def test_later_files_and_the_command_line_win(tmp_path: Path) -> None:
    one = write(tmp_path, "one.yaml", BASE + "training: {seed: 1, train_iters: 1}\nparallel: {tp: 2}\n")
    two = write(tmp_path, "two.yaml", "training: {seed: 2}\n")
    experiment = load([one, two], {"parallel.tp": 4, "optimizer": {"lr": 0.5}, "overrides.model.x.y": 1}).experiment
    assert (experiment.training.seed, experiment.training.train_iters) == (2, 1)
    assert (experiment.parallel.tp, experiment.optimizer.lr) == (4, 0.5)
    assert experiment.overrides == {"model.x.y": 1}
    assert experiment.experiment == "one"


def test_the_sweep_replaces_what_the_files_set(tmp_path: Path) -> None:
    text = "models: {m: {tokenizer: x, config: {model_type: qwen3, hidden_size: 8}}}\nparallel:\n  tp: 2\n"
    text += "tokenizers: {x: {vocab_size: 512, train_on: c}}\ncorpora: {c: {source: python-stdlib}}\n"
    swept = "sweep: {grid: {parallel.tp: [1, 4]}, runs: {a: {}, b: {models.m.config.hidden_size: 16}}}\n"
    file = write(tmp_path, "one.yaml", text + swept)
    assert load([file]).notes == (
        f"sweep.grid.parallel.tp replaces parallel.tp: 2 ({file}, line 3)",
        f"sweep.runs.b.models.m.config.hidden_size replaces models.m.config.hidden_size: 8 ({file}, line 1)",
    )
    with pytest.raises(ConfigError, match=r"sweep\.grid\.parallel\.tp: is also set in --config: remove one of the two"):
        load([file], {"parallel.tp": 2})


def test_anchors_aliases_and_merge_keys(tmp_path: Path) -> None:
    text = """
models: {m: {hf: org/name}}
optimizer: &o {lr: 0.5, beta1: &b 0.8}
overrides:
  model.a: &a {x: 1, y: 2}
  model.b: {<<: *a, y: 3}
  model.c: {<<: [*a, {z: 4}]}
  model.d: *b
"""
    overrides = load([write(tmp_path, "e.yaml", text)]).experiment.overrides
    assert overrides["model.b"] == {"x": 1, "y": 3}
    assert overrides["model.c"] == {"x": 1, "y": 2, "z": 4}
    assert overrides["model.d"] == 0.8


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3e-4", 3e-4),
        ("1E3", 1000.0),
        (".5", 0.5),
        ("-2", -2),
        ("1_000", 1000),
        ("0", 0),
        ("true", True),
        ("null", None),
        ("~", None),
        ("'no'", "no"),
        ("'010'", "010"),
        ("nowhere", "nowhere"),
        ("2024-01-01", "2024-01-01"),
        ("1.2.3", "1.2.3"),
        ("y", "y"),
        ("[1, {a: off-road}]", [1, {"a": "off-road"}]),
    ],
)
def test_scalars(text: str, value: object, tmp_path: Path) -> None:
    file = write(tmp_path, "e.yaml", f"{BASE}overrides: {{model.x: {text}}}\n")
    found = load([file]).experiment.overrides["model.x"]
    assert found == value
    assert type(found) is type(value)


def test_an_expression_stays_text_until_the_plan(tmp_path: Path) -> None:
    file = write(tmp_path, "e.yaml", BASE + "training: {train_iters: 2 * gbs, train_tokens: null}\n")
    assert load([file]).experiment.training.train_iters == "2 * gbs"


def test_a_local_model_and_a_glob_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    write(tmp_path, "model/config.json", "{}")
    write(tmp_path, "a.jsonl", "{}")
    text = (
        f"models: {{m: {{hf: ./model}}}}\ncorpora: {{c: {{source: '*.jsonl'}}, d: {{source: '{tmp_path}/a.jsonl'}}}}\n"
    )
    assert load([write(tmp_path, "e.yaml", text)]).experiment.models["m"].hf == "./model"


def test_reading_and_planning_need_no_heavy_libraries() -> None:
    heavy = {"torch", "pandas", "transformers", "numpy"}
    code = f"import sys, megaboa.config, megaboa.plan; print(sorted({heavy} & set(sys.modules)))"
    path = str(ROOT / "workflow/scripts")
    run = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": path}, capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == "[]"
