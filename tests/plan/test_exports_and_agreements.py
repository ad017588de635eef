"""Which runs an experiment exports, evaluates and compares: steps that are kept, agreements, twins and seeds."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import made
import pytest

from megaboa.config import ConfigError, LoadedExperiment, load
from megaboa.plan import Plan, make_plan
from megaboa.records import AgreementSpec, write

PlanOf = Callable[..., Plan]


def test_exports_and_agreements_are_matched(plan_of: PlanOf) -> None:
    text = """
sweep: {grid: {training.seed: [1, 2, 3]}}
export: {runs: ['seed[12]']}
report: {agreements: [{reference: seed1, runs: ['*'], tolerance: 1}]}
"""
    plan = plan_of(text)
    assert plan.exports == ["seed1", "seed2"]
    limits = {"tolerance": 1.0, "grad_norm_tolerance": None}
    assert plan.agreements == [AgreementSpec(reference="seed1", runs=("seed2", "seed3"), **limits)]
    assert all(run.launch.routing for run in plan.runs)


@pytest.mark.parametrize(
    ("wanted", "settings", "nearest"),
    [
        (20, "save_interval: 10", None),
        (45, "save_interval: 10", None),  # the last step is always saved
        (25, "save_interval: 10", "20 and 30"),
        (60, "save_interval: 10", "45"),
        (20, "save_interval: 10, keep_last: 2", "40"),
        (20, "save_interval: 10, keep_last: 2, keep_every: 20", None),
        (10, "{}", "45"),
        ("best", "save_interval: 10, keep_last: 2", None),
    ],
)
def test_a_step_to_export_must_be_one_that_is_kept(
    plan_of: PlanOf, wanted: object, settings: str, nearest: str | None
) -> None:
    text = f"export: {{runs: all, checkpoint: {wanted}}}\ncheckpoint: {{{settings.strip('{}')}}}\n"
    given = {"training.train_iters": 45, "data.split": "98,1,1"}
    if nearest is None:
        assert plan_of(text, **given).exports == ["run"]
        return
    said = f"export.checkpoint: no checkpoint of step {wanted} is kept, the nearest is of {nearest}: name a step"
    with pytest.raises(ConfigError, match=said):
        plan_of(text, **given)


CORPORA = "corpora: {text: {source: python-stdlib}, b: {source: 'hf:org/b'}}\n"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("training: {eval_iters: 0}", "training.eval_iters is 0: set it to 1 or more, or name `final` or a step"),
        ("data: {split: '99,0,1'}", "data.split is '99,0,1', which leaves nothing for validation: raise its second"),
        ("overrides: {validation.eval_iters: 0}", "training.eval_iters is 0: set it to 1 or more"),
        (CORPORA + "data: {blend_per_split: {train: text}}", "data.blend_per_split.valid is not set: name a corpus"),
        (CORPORA + "data: {blend_per_split: {train: text, valid: b}}", None),
        ("", None),
    ],
)
def test_the_best_checkpoint_needs_a_validation_loss(plan_of: PlanOf, settings: str, said: str | None) -> None:
    text = f"export: {{runs: all, checkpoint: best}}\n{settings}\n"
    given = {"training.train_iters": 40, "checkpoint.save_interval": 10}
    if said is None:
        assert plan_of(text, **given).exports == ["run"]
        return
    expected = f"export.checkpoint: is `best`, and the run has no validation loss, as {said}"
    with pytest.raises(ConfigError, match=re.escape(expected)):
        plan_of(text, **given)
    plan_of(text.replace("best", "final"), **given)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"training.eval_interval": 30, "checkpoint.save_interval": 20, "training.train_iters": 50},
            "none of the others (20, 40) is evaluated: training.eval_interval is 30, and checkpoint.save_interval 20; "
            "set training.eval_interval to 20",
        ),
        (
            {"training.eval_interval": 6, "checkpoint.save_interval": 20, "training.train_iters": 50},
            "(20, 40) is evaluated: training.eval_interval is 6, and checkpoint.save_interval 20; "
            "set training.eval_interval to 5",
        ),
        (
            {"training.eval_interval": 1000, "checkpoint.save_interval": 300, "training.train_iters": 2000},
            "set training.eval_interval to 900",
        ),
        (
            {"checkpoint.save_interval": 20, "training.train_iters": 50},
            "(20, 40) is evaluated: training.eval_interval is not set; set training.eval_interval to 20",
        ),
        (
            {"training.eval_interval": 10, "checkpoint.save_interval": 10, "checkpoint.keep_last": 1},
            "no other is kept: lower checkpoint.save_interval, or raise keep_last",
        ),
        ({"training.eval_interval": 30, "checkpoint.save_interval": 20, "training.train_iters": 70}, None),
        ({"training.eval_interval": 10, "checkpoint.save_interval": 20, "training.train_iters": 50}, None),
    ],
)
def test_a_best_checkpoint_that_can_only_be_the_last_is_warned_of(
    plan_of: PlanOf, given: dict[str, int], said: str | None
) -> None:
    given = {"training.train_iters": 40, **given}
    of_best = [text for text in plan_of("export: {runs: all, checkpoint: best}", **given).warnings if "best is" in text]
    if said is None:
        assert of_best == []
        return
    [warning] = of_best
    assert warning.startswith(
        f"export.checkpoint: best is the checkpoint of the last step, {given['training.train_iters']}, as "
    )
    assert warning.endswith(said)
    final = plan_of("export: {runs: all}", **given)
    assert not [text for text in final.warnings if "best is" in text]


def test_a_step_that_was_exported_needs_its_checkpoint_no_more(
    plan_of: PlanOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    export = Path("results/small/runs/run/export.json")
    write(export, made.export(iteration=20))
    given = {"training.train_iters": 45, "checkpoint.save_interval": 10, "checkpoint.keep_last": 2}
    assert plan_of("export: {runs: all, checkpoint: 20}", **given).exports == ["run"]
    with pytest.raises(ConfigError, match="no checkpoint of step 10 is kept"):
        plan_of("export: {runs: all, checkpoint: 10}", **given)


def test_a_child_keeps_no_checkpoint_of_its_parents_steps(plan_of: PlanOf) -> None:
    text = """
sweep: {runs: {base: {training.train_iters: 20}, child: {training.train_iters: 45, continue_from: small/base}}}
export: {runs: [child], checkpoint: 20}
"""
    with pytest.raises(
        ConfigError, match=r"export\.checkpoint: no checkpoint of step 20 is kept, the nearest is of 30"
    ):
        plan_of(text, **{"checkpoint.save_interval": 10})


def test_an_agreement_adds_twins_and_seeds_of_its_reference(plan_of: PlanOf) -> None:
    text = """
sweep: {runs: {a: {optimizer.lr: 1e-3}, b: {training.micro_batch_size: 2}}}
export: {runs: ['a*']}
report: {agreements: [{reference: a, runs: ['*'], twins: 2, seeds: 1, within: seed}]}
"""
    plan = plan_of(text)
    runs = {run.name: run for run in plan.runs}
    assert list(runs) == ["a", "b", "a-twin1", "a-twin2", "a-seed1"]
    [agreement] = plan.agreements
    assert (agreement.runs, agreement.twins, agreement.seeds) == (("b",), ("a-twin1", "a-twin2"), ("a-seed1",))
    assert plan.exports == ["a"], "patterns are about the runs of the sweep"
    assert [runs[name].run.training.get("nudge") for name in runs] == [None, None, 1, 2, None]
    assert runs["a-seed1"].run.training["seed"] == runs["a"].run.training["seed"] + 1
    assert runs["a-twin2"].run.optimizer == runs["a"].run.optimizer
    assert [name for name, run in runs.items() if not run.launch.routing] == ["a-seed1"]


@pytest.mark.parametrize(
    ("more", "warned"),
    [
        ("", ["tp2", "pp2"]),
        ("models: {dense: {init: pretrained}}", []),
        ("report: {agreements: [{reference: dp1, runs: ['*'], within: seed, seeds: 1}]}", []),
        ("overrides: {model.use_cpu_initialization: true}", []),
    ],
)
def test_layouts_that_draw_other_weights_can_not_agree(
    loaded_of: Callable[..., LoadedExperiment], tmp_path: Path, more: str, warned: list[str]
) -> None:
    text = """
sweep:
  runs:
    dp1: {}
    dp2: {resources.gpus_per_node: 2}
    tp2: {resources.gpus_per_node: 2, parallel.tp: 2}
    pp2: {resources.gpus_per_node: 2, parallel.pp: 2}
report: {agreements: [{reference: dp1, runs: ['*']}]}
"""
    given = {"training.train_iters": 10}
    loaded_of(text, given)
    (tmp_path / "last.yaml").write_text(more or "{}")
    plan = make_plan(load([tmp_path / name for name in ("small.yaml", "more.yaml", "last.yaml")], given))
    found = {text: runs for text, runs in plan.warnings.items() if "draws other initial weights than dp1" in text}
    assert [run for runs in found.values() for run in runs] == warned
    assert all("set models.dense.init to pretrained" in text for text in found)
    assert not warned or ["as parallel.tp differs" in text for text in found] == [True, False]


def test_runs_that_continue_from_one_checkpoint_have_its_weights(plan_of: PlanOf) -> None:
    text = """
sweep:
  runs:
    first: {training.train_iters: 5}
    dp1: {continue_from: small/first, training.train_iters: 10}
    tp2: {continue_from: small/first, training.train_iters: 10, resources.gpus_per_node: 2, parallel.tp: 2}
report: {agreements: [{reference: dp1, runs: [tp2]}]}
"""
    plan = plan_of(text, **{"checkpoint.save_interval": 5})
    assert not [text for text in plan.warnings if "initial weights" in text]


def test_a_job_of_a_twin_plans_it_alone(plan_of: PlanOf, tmp_path: Path) -> None:
    text = "sweep: {runs: {a: {}, b: {training.seed: 2}}}\nreport: {agreements: [{reference: a, runs: [b], twins: 1}]}"
    plan_of(f"training: {{train_iters: 5}}\n{text}")
    alone = make_plan(load([tmp_path / "small.yaml", tmp_path / "more.yaml"]), only=["a-twin1"])
    assert [run.name for run in alone.runs] == ["a-twin1"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("twins: 10", r"agreements\[0\]\.twins: .*less than or equal to 9"),
        ("within: seed", r"agreements\[0\]\.within: is `seed`, and no other seed is run: set seeds to 2 or more"),
        ("within: luck", r"agreements\[0\]\.within"),
    ],
)
def test_twins_and_seeds_that_can_not_be(plan_of: PlanOf, text: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        plan_of(
            f"sweep: {{runs: {{a: {{}}, b: {{training.seed: 7}}}}}}\n"
            f"report: {{agreements: [{{reference: a, runs: [b], {text}}}]}}"
        )


def test_twins_under_fsdp_are_refused(plan_of: PlanOf) -> None:
    sweep = "sweep: {runs: {a: {parallel.fsdp: megatron, resources.gpus_per_node: 2}, b: {}}}\n"
    with pytest.raises(ConfigError, match=r"FSDP holds them in pieces: remove twins, or parallel\.fsdp"):
        plan_of(sweep + "report: {agreements: [{reference: a, runs: [b], twins: 1}]}")


def test_evaluated_are_the_exported_runs_that_match(plan_of: PlanOf) -> None:
    sweep = "sweep: {grid: {training.seed: [1, 2, 3]}}\nexport: {runs: ['*1', '*2']}\n"
    command = "evaluate: {command: 'x {model} {out}', runs: %s}"
    assert plan_of(sweep + command % "all").evaluated == ["seed1", "seed2"]
    assert plan_of(sweep + command % "['*2']").evaluated == ["seed2"]
    assert plan_of(sweep).evaluated == []
