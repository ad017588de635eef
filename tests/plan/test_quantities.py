"""Expressions in place of numbers, resolved for each run."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from megaboa.config import ConfigError
from megaboa.plan import Plan
from megaboa.plan.families import count_parameters

PlanOf = Callable[..., Plan]
STEPS = 8 * 128  # tokens per step


def test_a_scaling_law_in_three_lines(plan_of: PlanOf) -> None:
    text = """
sweep: {grid: {models.dense.config.hidden_size: [32, 64]}}
training:
  train_iters: 20 * params / (gbs * seq_length)
"""
    plan = plan_of(text, training__seed=1)
    for run in plan.runs:
        model = plan.models[run.model]
        params = count_parameters({**model.config, "vocab_size": 512})
        assert run.row["params"] == params
        assert run.config.training.train_iters == run.row["train_iters"] == math.ceil(20 * params / STEPS)
        assert run.run.training["train_iters"] == run.config.training.train_iters
        assert run.row["tokens"] == run.config.training.train_iters * STEPS


def test_tokens_become_whole_steps(plan_of: PlanOf) -> None:
    run = plan_of(training__train_tokens=10 * STEPS + 1).runs[0]
    assert run.config.training.train_iters == 11
    assert "train_tokens" not in run.run.training
    assert run.row["tokens"] == 11 * STEPS
    assert plan_of(training__train_tokens=1.1e4).runs[0].config.training.train_iters == 11


def test_tokens_may_be_swept_and_be_expressions(plan_of: PlanOf) -> None:
    plan = plan_of("sweep: {grid: {training.train_tokens: [2048, gbs * 512]}}", training__seed=1)
    assert [run.name for run in plan.runs] == ["tokens2048", "tokens-gbs-512"]
    assert [run.config.training.train_iters for run in plan.runs] == [2, 4]


@pytest.mark.parametrize(
    ("key", "text", "expected"),
    [
        ("schedule.warmup_iters", "0.01 * train_iters", 1),
        ("schedule.warmup_iters", "train_iters // 4", 2),
        ("training.eval_interval", "max(1, round(train_iters / 4))", 2),
        ("training.micro_batch_size", "gbs / dp", 8),
        ("optimizer.min_lr", "lr / 10", 3e-5),
        ("optimizer.weight_decay", "1 / sqrt(seq_length * 2)", 1 / 16),
        ("optimizer.lr", "3e-4 * 2 ** -1", 1.5e-4),
        ("checkpoint.save_interval", "floor(train_tokens / 5000)", 2),
        ("training.seed", "ceil(log(params)) % 7", None),
        ("schedule.decay_iters", "0.1 * 30", 3),
    ],
)
def test_expressions(plan_of: PlanOf, key: str, text: str, expected: float | None) -> None:
    section, field = key.split(".")
    value = getattr(getattr(plan_of(f"{section}: {{{field}: '{text}'}}").runs[0].config, section), field)
    if expected is not None:
        assert value == pytest.approx(expected, rel=1e-12)
        assert type(value) is type(expected)


def test_expressions_follow_each_other(plan_of: PlanOf) -> None:
    text = "parallel: {tp: gbs / 4}\nresources: {gpus_per_node: 2 * tp}\nschedule: {warmup_iters: dp + world_size}"
    run = plan_of(text).runs[0]
    assert (run.row["tp"], run.row["world_size"], run.row["dp"], run.config.schedule.warmup_iters) == (2, 4, 2, 6)


def test_a_cycle_through_several_keys(plan_of: PlanOf) -> None:
    with pytest.raises(ConfigError, match="tp → world_size → gpus_per_node → tp"):
        plan_of("parallel: {tp: world_size / 2}\nresources: {gpus_per_node: 2 * tp}")


def test_the_number_of_parameters_must_be_known(plan_of: PlanOf) -> None:
    text = "models: {far: {hf: org/name}}\nmodel: far\nschedule: {warmup_iters: params / 1e6}\n"
    with pytest.raises(ConfigError, match=r"schedule\.warmup_iters.*set models\.far\.params"):
        plan_of(text)
    given = plan_of(text.replace("org/name", "org/name, params: 3000000")).runs[0]
    assert given.config.schedule.warmup_iters == 3


def test_an_unknown_family_is_no_problem_where_nobody_asks(plan_of: PlanOf) -> None:
    text = "models: {odd: {tokenizer: bpe, config: {model_type: exaone4}}}\nmodel: odd\n"
    assert plan_of(text).runs[0].row["params"] is None
    with pytest.raises(ConfigError, match=r"'exaone4' model can't be counted.*models\.odd\.params"):
        plan_of(text + "schedule: {warmup_iters: params}\n")


def test_sizes_that_are_missing_are_said_without_pythons_words(plan_of: PlanOf, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "vocab_size": 512, "hidden_size": null}')
    text = f"models: {{odd: {{tokenizer: bpe, hf: {tmp_path}}}}}\nmodel: odd\nschedule: {{warmup_iters: params}}\n"
    with pytest.raises(ConfigError, match=r"a size in the model's config is missing, 0, or no .* models\.odd\.params"):
        plan_of(text)
