"""megaboa.plan.planner: what runs of a plan share, and problems that only the whole plan has."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from ordinary_user import as_ordinary_user

from megaboa.check import costs
from megaboa.check.fact_sources import with_overrides
from megaboa.config import ConfigError, load
from megaboa.plan import Plan, make_plan
from megaboa.plan.planner import with_costs

ROOT = Path(__file__).resolve().parents[2]
PlanOf = Callable[..., Plan]


def test_the_shipped_experiment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    plan = make_plan(load([ROOT / "config/config.yaml"]))
    assert len(plan.runs) >= 7
    assert set(plan.models) == {"dense", "fresh", "moe"}
    assert {plan.models[run.model].init for run in plan.runs if run.name in plan.exports} == {"pretrained", "scratch"}
    assert all(isinstance(run.row["params"], int) for run in plan.runs)


def test_sweeping_a_model_that_a_run_does_not_train_is_no_difference(plan_of: PlanOf) -> None:
    other = "models: {other: {tokenizer: bpe, config: {model_type: llama}}}\n"
    with pytest.raises(ConfigError, match=r"differ only in models\.other\.config\.hidden_size"):
        plan_of(other + "model: dense\nsweep: {grid: {models.other.config.hidden_size: [32, 64]}}")


def test_corpora_and_tokenizers_of_runs(plan_of: PlanOf) -> None:
    run = plan_of().runs[0]
    assert (run.corpora, run.tokenizers) == (("text",), ("bpe",))
    assert plan_of().corpus_tokenizers == {"text": "bpe"}


def test_models_with_different_tokenizers_can_not_share_a_corpus(plan_of: PlanOf) -> None:
    text = "models: {other: {hf: org/name}}\nsweep: {runs: {a: {model: dense}, b: {model: other}}}"
    with pytest.raises(
        ConfigError, match=r"corpora\.text: .*dense wants bpe, other wants org/name.*or name one .*: bpe"
    ):
        plan_of(text)


def test_models_whose_tokenizers_have_the_same_files_share_a_corpus(plan_of: PlanOf, tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"model_type": "qwen3", "hidden_size": 64}))
        (tmp_path / name / "tokenizer.json").write_text("{}")
    models = f"models: {{one: {{hf: {tmp_path}/one}}, two: {{hf: {tmp_path}/two}}}}\n"
    text = f"corpora: {{text: {{source: python-stdlib}}}}\n{models}sweep: {{grid: {{model: [one, two]}}}}\n"
    assert plan_of(text).corpus_tokenizers["text"] == f"{tmp_path}/one"
    (tmp_path / "two" / "tokenizer.json").write_text('{"model": null}')
    with pytest.raises(ConfigError, match=r"corpora\.text: the models need different tokenizers"):
        plan_of(text)


def test_a_store_that_cannot_be_written_is_a_note(
    plan_of: PlanOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tmp_path.chmod(0o777)
    Path("held").mkdir(mode=0o555)
    with as_ordinary_user(tmp_path):
        (note,) = plan_of(**{"training.train_iters": 10, "store": "held/store"}).notes
    assert note == f"warning: store: you can't write in {tmp_path / 'held'}: jobs that make something will fail"


@pytest.mark.parametrize("given", ["held", "held/store", "dead"])
def test_a_store_that_can_not_be_is_refused(
    plan_of: PlanOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("held").touch()
    Path("dead").symlink_to("nowhere")
    with pytest.raises(ConfigError, match=f"store: {tmp_path / given.partition('/')[0]} is a .*: name a folder, or"):
        plan_of(**{"training.train_iters": 10, "store": given})


def test_runs_that_cost_the_same_are_predicted_once(plan_of: PlanOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call plans all runs, and a third of 600 runs' plan was their predictions."""
    predicted = []
    of_run = costs.of_run
    monkeypatch.setattr(costs, "of_run", lambda f, **more: predicted.append(f) or of_run(f, **more))
    grid = "grid: {training.seed: [1, 2], parallel.tp: [1, 2]}"
    runs = "runs: {a: {optimizer.lr: 0.1}, b: {optimizer.lr: 0.2, resources.step_seconds: 2}, c: {optimizer.lr: 0.3}}"
    gpus = "device: cuda\nresources: {gpus_per_node: 2, gpu: h200-141g}\n"
    plan = plan_of(f"{gpus}sweep: {{{grid}, {runs}}}\n")
    assert (len(plan.runs), len(predicted)) == (12, 4)
    assert len({run.costs.step_seconds for run in plan.runs}) == 3


def test_facts_with_a_list_have_costs(plan_of: PlanOf, tmp_path: Path) -> None:
    """They have no hash."""
    plan = plan_of()
    (run,) = plan.runs
    growing = replace(run, facts=with_overrides(run.facts, {"train.rampup_batch_size": [2, 2, 8]}))
    assert with_costs([growing], (), plan.experiment.budget, tmp_path)[0].costs == run.costs


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("schedule: {wsd_decay_iters: 5}", ["schedule.wsd_decay_iters: 5 does nothing with schedule.decay: cosine, "]),
        ("schedule: {decay: WSD, wsd_decay_iters: 5}", []),
        ("schedule: {wsd_decay_iters: 5}\nsweep: {grid: {schedule.decay: [WSD, linear]}}", []),
        ("schedule: {wsd_decay_iters: 5}\nsweep: {runs: {a: {}, b: {schedule.decay: WSD}}}", []),
        (
            "schedule: {decay: constant}\noptimizer: {min_lr: lr / 10}",
            ["optimizer.min_lr: 3e-05 does nothing with schedule.decay: constant, "],
        ),
        ("optimizer: {min_lr: lr / 10}\nsweep: {grid: {schedule.decay: [constant, linear]}}", []),
        ("optimizer: {min_lr: lr / 10}", []),
    ],
)
def test_keys_that_no_decay_reads_are_said(plan_of, text, said):
    warnings = [one for one in plan_of(text).warnings if "does nothing with" in one]
    assert len(warnings) == len(said) and all(map(str.startswith, warnings, said)), warnings
