"""megaboa.plan.parents: who continues from whom, and what stands against it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import made
import pytest

from megaboa.config import ConfigError
from megaboa.files import digest, read_json, write_json
from megaboa.paths import RunFolder
from megaboa.plan import Plan, screen
from megaboa.plan.parent_runs import planned_steps
from megaboa.plan.screen import submission
from megaboa.plan.shared import Shared
from megaboa.records import plain, write
from megaboa.run import checkpoints
from megaboa.store_paths import RunStore

PlanOf = Callable[..., Plan]
SAVES = {"training.train_iters": 100, "checkpoint.save_interval": 10}


def saved(root: Path, *iterations: int, whole: bool = True) -> None:
    for iteration in iterations:
        folder = checkpoints.folder(root, iteration)
        folder.mkdir(parents=True)
        form = f"dist_ckpt_optim_fully_reshardable: {str(whole).lower()}"
        (folder / checkpoints.LAST_WRITTEN).write_text(f"checkpoint: {{{form}, ckpt_format: torch_dist}}\n")
    checkpoints.mark_complete(root)


@pytest.fixture
def trained(plan_of: PlanOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Plan]:
    """Plan the small experiment as `old`, with a run `base` that has been trained and has checkpoints 10 and 20."""
    monkeypatch.chdir(tmp_path)

    def make(whole: bool = True, **changes: object) -> Plan:
        given = {"experiment": "old", "training.train_iters": 20, "checkpoint.save_interval": 10, **changes}
        plan = plan_of("sweep: {runs: {base: {}}}", **given)
        plan.write("results")
        run = RunFolder(Path("results/old/runs/base"))
        store = RunStore(Path("store/runs/old/base/0123"))
        identity = {"run": read_json(run.path / "run.json")}
        write_json(store.identity, identity)
        saved(store.checkpoints, 10, 20, whole=whole)
        write(run.train_manifest, made.trained(store=str(store.path), identity=digest(identity)))
        return plan

    return make


def problems(plan_of: PlanOf, text: str, **given: object) -> str:
    with pytest.raises(ConfigError) as error:
        plan_of(text, **{**SAVES, **given})
    return str(error.value)


def test_a_parent_of_the_same_experiment_is_part_of_what_the_child_is(plan_of: PlanOf) -> None:
    text = "sweep: {runs: {base: {}, child: {continue_from: small/base@50}}}"
    plan = plan_of(text, **SAVES)
    load = {"optimizer": True, "rng": True}
    assert plain(plan["child"].run.parent) == {"experiment": "small", "run": "base", "iteration": 50, "load": load}
    assert "parent" not in plan["base"].documents["run"], "no other run's identity has changed"
    assert (plan["base"].row["parent"], plan["child"].row["parent"]) == (None, "small/base@50")
    manifest = "results/small/runs/base/train.json"
    shared = Shared(plan)
    assert manifest in shared.run_inputs(plan["child"]) and manifest not in shared.run_inputs(plan["base"])


def test_the_last_checkpoint_where_no_step_is_named(plan_of: PlanOf, trained: Callable[..., Plan]) -> None:
    trained()
    runs = "sweep: {runs: {base: {training.train_iters: 60}, a: {continue_from: small/base, training.train_iters: 70}}}"
    plan = plan_of(runs, **{"checkpoint.save_interval": 25})
    assert plan["a"].run.parent.iteration == 60
    assert plan_of("continue_from: old/base", **SAVES).runs[0].run.parent.iteration == 20


def test_it_may_be_swept_and_a_run_is_named_by_it(plan_of: PlanOf, trained: Callable[..., Plan]) -> None:
    trained()
    plan = plan_of("sweep: {grid: {continue_from: [old/base@10, old/base@20], load.optimizer: [true, false]}}", **SAVES)
    assert [run.name for run in plan.runs][:2] == ["from-old-base-10-loadopt", "from-old-base-10-noloadopt"]
    assert [run.run.parent.load.optimizer for run in plan.runs] == [True, False, True, False]


def test_jobs_are_counted_for_the_steps_that_are_left(plan_of: PlanOf, trained: Callable[..., Plan]) -> None:
    trained()
    text = "resources: {runtime: 1h, step_seconds: 300}\n"
    whole = plan_of(text, **SAVES).runs[0].row["jobs"]
    rest = plan_of(text + "continue_from: old/base@20", **SAVES).runs[0].row["jobs"]
    assert rest < whole


def test_costs_and_index_are_of_the_steps_that_the_run_trains_itself(
    plan_of: PlanOf, trained: Callable[..., Plan]
) -> None:
    trained()
    text = "resources: {step_seconds: 300, gpus_per_node: 1}\n"
    whole, rest = (
        plan_of(f"{text}{more}\nbudget: {{gpu_hours: {hours}}}", **SAVES)
        for more, hours in (("", 8.4), ("continue_from: old/base@20", 6.7))  # 100 and 80 steps of 300 s
    )
    assert [submission(plan.runs).expected_hours for plan in (whole, rest)] == pytest.approx([100 / 12, 80 / 12])
    assert whole.runs[0].launch.index != rest.runs[0].launch.index
    said = problems(plan_of, f"{text}continue_from: old/base@20\nbudget: {{gpu_hours: 6.6}}")
    assert "6.6 is less than the" in said


def test_the_screen_says_which_steps_follow_which_checkpoint(plan_of: PlanOf) -> None:
    runs = "base: {training.train_iters: 50}, one: {continue_from: small/base@20}, two: {continue_from: small/base@20"
    text = f"sweep: {{runs: {{{runs}, training.seed: 2}}, last: {{continue_from: small/base}}}}}}\n"
    plan = plan_of(f"{text}training: {{train_iters: 100}}", **{"checkpoint.save_interval": 10})
    assert screen.continued(plan) == [
        "continue from a checkpoint:",
        "  one, two: steps 21 to 100, after small/base@20",
        "  last: steps 51 to 100, after small/base@50",
    ]


@pytest.mark.parametrize(
    ("settings", "last", "expected"),
    [
        ({"save_interval": None}, 50, [50]),
        ({"save_interval": 20}, 50, [20, 40, 50]),
        ({"save_interval": 0}, 50, []),
        ({"save_interval": 10, "keep_last": 1, "keep_every": 20}, 50, [20, 40, 50]),
        ({}, 50, None),
        ({"save_interval": 10}, None, None),
    ],
)
def test_which_checkpoints_a_run_will_have(settings: dict, last: int | None, expected: list[int] | None) -> None:
    assert planned_steps(settings, last) == expected


EXPERTS = ", ".join(
    f"models.dense.config.{key}: {value}"
    for key, value in {"model_type": "qwen3_moe", "num_experts": 4, "moe_intermediate_size": 16}.items()
)


@pytest.mark.parametrize(
    ("runs", "said"),
    [
        ("{a: {continue_from: small/basis@50}}", "there is no run 'basis'; did you mean 'base'?"),
        ("{a: {continue_from: small/base@55}}", "small/base keeps no checkpoint of step 55, but of 10, 20, 30"),
        ("{a: {continue_from: small/a}}", "a → a: a run can't continue from what continues from it"),
        ("{a: {continue_from: small/b@10}, b: {continue_from: small/a@10}}", "a → b → a: a run can't continue"),
        (
            "{a: {continue_from: small/base, SAME}}",
            "100 is the step at which the run ends, and it begins after step 100",
        ),
        ("{a: {continue_from: base@50}}", "has the wrong form: continue from another run's checkpoint"),
        ("{a: {continue_from: small/base@0}}", "has the wrong form"),
        ("{a: {continue_from: other/base@50}}", "other/base has not been trained: there is no results/other/runs/base"),
        (
            "{a: {continue_from: small/base@50, SAME, optimizer.name: sgd, parallel.distributed_optimizer: false}}",
            "sgd can't take the state of adam",
        ),
        (
            "{a: {continue_from: small/base@50, SAME, parallel.distributed_optimizer: false}}",
            "the state of small/base's optimizer was saved with true, and has another format",
        ),
        (
            "{plain: {SAME, parallel.distributed_optimizer: false}, a: {continue_from: small/plain@50, SAME, "
            "parallel.distributed_optimizer: false, training.precision: fp32}}",
            "fp32 can't take the state of an optimizer in bf16_mixed, which small/plain has",
        ),
        (
            "{spread: {SAME, MUON, parallel.ep: 2, resources.gpus_per_node: 2}, "
            "a: {continue_from: small/spread@50, SAME, MUON}}",
            "muon keeps experts that are spread over ranks apart, and only one of this run and small/spread has any",
        ),
        (
            "{a: {continue_from: small/base@50, SAME, parallel.fsdp: megatron}}",
            "checkpoints of Megatron-FSDP have their own format",
        ),
        (
            "{a: {continue_from: small/base@50, models.dense.config.hidden_size: 64}}",
            "small/base has another model: config.hidden_size is 32 there, and 64 here",
        ),
    ],
)
def test_what_can_not_be_is_said_with_its_key(
    plan_of: PlanOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    runs = runs.replace("{", "{base: {SAME}, ", 1).replace("SAME", "models.dense.config.hidden_size: 32")
    runs = runs.replace("MUON", f"optimizer.name: muon, parallel.distributed_optimizer: false, {EXPERTS}")
    text = problems(plan_of, "sweep: {runs: " + runs + "}")
    assert said in text and ("sweep.runs.a.continue_from" in text or "(run a)" in text)


def test_runs_of_a_parent_that_is_left_out_are_left_out_too(plan_of: PlanOf) -> None:
    """They would begin at step 0."""
    runs = "c: {continue_from: small/b@30}, b: {continue_from: small/a@20}, a: {parallel.tp: 3}, other: {}"
    plan = plan_of(f"resources: {{gpus_per_node: 4}}\nsweep: {{skip_illegal: true, runs: {{{runs}}}}}", **SAVES)
    assert [run.name for run in plan.runs] == ["other"]
    assert [str(one) for one in plan.invalid][1:] == [
        "b is INVALID: continue_from: small/a@20 is INVALID",
        "c is INVALID: continue_from: small/b@30 is INVALID",
    ]


def test_a_parent_that_keeps_only_some(plan_of: PlanOf) -> None:
    runs = "sweep: {runs: {base: {}, a: {continue_from: small/base@30}}}"
    text = problems(plan_of, runs, **{"checkpoint.keep_last": 2, "checkpoint.keep_every": 50})
    assert "small/base keeps no checkpoint of step 30, but of 50, 90, 100: take one of these, or change" in text
    text = problems(plan_of, runs, **{"checkpoint.save_interval": 0})
    assert "small/base has no checkpoint: set its checkpoint.save_interval above 0" in text


def test_a_parent_that_continues_itself_has_no_checkpoints_from_before(plan_of: PlanOf) -> None:
    runs = "sweep: {runs: {base: {}, a: {continue_from: small/base@40}, b: {continue_from: small/a@20}}}"
    text = problems(plan_of, runs)
    assert "small/a keeps no checkpoint of step 20, but of 50, 60, 70, 80, 90, 100" in text


def test_exports_along_a_run_that_continues_are_of_its_own_steps(plan_of: PlanOf) -> None:
    runs = "{runs: {base: {}, a: {continue_from: small/base@50, checkpoint.keep_last: %d}}}"
    text = f"sweep: {runs}\nexport: {{runs: [a], checkpoints: {{every: 20}}}}"
    plan_of(text % 5, **SAVES)  # of a's own steps all are kept
    text = problems(plan_of, text % 2)
    assert "the run 'a' keeps no checkpoint of step 60, 80, but of 90, 100" in text


def test_a_run_that_is_trained_is_asked_for_what_it_has(plan_of: PlanOf, trained: Callable[..., Plan]) -> None:
    trained()
    text = problems(plan_of, "continue_from: old/base@30")
    assert "old/base keeps no checkpoint of step 30, but of 10, 20" in text
    text = problems(plan_of, "continue_from: old/bass@10")
    assert "old/bass has not been trained" in text and "trained here: old/base" in text


def test_a_trained_run_may_export_what_it_has(
    plan_of: PlanOf, trained: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    trained()
    monkeypatch.setattr("megaboa.plan.parent_runs.is_trained", lambda folder: True)  # its corpus is not made here
    given = {"experiment": "old", "training.train_iters": 20, "checkpoint.save_interval": 7}
    plan_of("sweep: {runs: {base: {}}}\nexport: {runs: all, checkpoint: 10}", **given)
    with pytest.raises(ConfigError, match=r"no checkpoint of step 14 is kept, the nearest is of 10 and 20"):
        plan_of("sweep: {runs: {base: {}}}\nexport: {runs: all, checkpoint: 14}", **given)


def test_a_smaller_batch_would_have_read_too_much(plan_of: PlanOf, trained: Callable[..., Plan]) -> None:
    trained()
    text = problems(plan_of, "continue_from: old/base@10", **{"training.global_batch_size": 4})
    assert "training.global_batch_size: 4 is less than the 8 of old/base" in text
    plan_of("continue_from: old/base@10", **{**SAVES, "training.global_batch_size": 16})


def test_another_layout_needs_a_checkpoint_that_was_saved_for_it(plan_of: PlanOf, trained: Callable[..., Plan]) -> None:
    """By what the checkpoint says, as the key may have been another when it was saved."""
    trained(whole=False, **{"checkpoint.reshardable": True})
    wide = "continue_from: old/base@10\nresources: {gpus_per_node: 2}\nparallel: {tp: 2}\n"
    text = problems(plan_of, wide)
    assert (
        "the optimizer's state of old/base is saved by ranks of another layout (checkpoint.reshardable: false" in text
    )
    assert "continue old/base (continue_from: itself) by some steps with true" in text
    assert plan_of(wide + "load: {optimizer: false}", **SAVES).runs[0].run.parent.iteration == 10
    more = "continue_from: old/base@10\nresources: {gpus_per_node: 2}\n"
    assert plan_of(more, **SAVES).runs[0].run.parent.iteration == 10, "any number of data parallel ranks takes it"


@pytest.mark.parametrize("size", ["vpp: 1", "tp: 1", "etp: 1"])
def test_writing_a_layout_out_does_not_change_it(plan_of: PlanOf, trained: Callable[..., Plan], size: str) -> None:
    trained(whole=False)
    plan = plan_of(f"continue_from: old/base@10\nparallel: {{{size}}}\n", **SAVES)
    assert plan.runs[0].run.parent.iteration == 10
    runs = f"sweep: {{runs: {{a: {{}}, b: {{continue_from: small/a@10, parallel.{size}}}}}}}\n"
    large = {"models.dense.config.num_hidden_layers": 3}  # whose state isn't gathered without need
    assert plan_of(runs, **SAVES, **large)["a"].launch.checkpoint["reshardable"] is False


def test_a_checkpoint_that_was_saved_whole_has_any_layout(plan_of: PlanOf, trained: Callable[..., Plan]) -> None:
    trained(whole=True, **{"checkpoint.reshardable": False})
    wide = "continue_from: old/base@10\nresources: {gpus_per_node: 2}\nparallel: {tp: 2}\n"
    assert plan_of(wide, **SAVES).runs[0].run.parent.iteration == 10


def test_a_parent_that_is_yet_to_be_trained_is_told_to_save_whole(plan_of: PlanOf) -> None:
    child = "b: {continue_from: small/a@10, resources.gpus_per_node: 2, parallel.tp: 2}"
    sweep = f"sweep: {{runs: {{a: {{}}, {child}}}}}\n"
    text = problems(plan_of, f"checkpoint: {{reshardable: false, save_interval: 10}}\n{sweep}")
    assert "another layout (checkpoint.reshardable: false" in text and "set it to true for that run" in text


@pytest.mark.parametrize(
    ("child", "whole"),
    [
        ("resources.gpus_per_node: 2, parallel.tp: 2", True),
        ("resources.gpus_per_node: 2, parallel.tp: 2, load.optimizer: false", None),
        ("resources.gpus_per_node: 2", None),  # as many shards as there are copies can be put together
    ],
)
def test_a_parent_saves_whole_where_a_run_goes_on_in_another_layout(
    plan_of: PlanOf, tmp_path: Path, child: str, whole: bool | None
) -> None:
    """Also where else its recipe decides, which the plan doesn't read."""
    recipe = tmp_path / "recipe.py"
    recipe.write_text("def configure(): ...\n")
    text = f"models: {{r: {{recipe: {recipe}, tokenizer: bpe}}}}\n"
    text += f"sweep: {{runs: {{a: {{model: r}}, b: {{model: r, continue_from: small/a@10, {child}}}}}}}\n"
    plan = plan_of(text, **SAVES)
    parent, other = plan.runs
    assert other.run.parent.iteration == 10
    assert parent.launch.checkpoint.get("reshardable") is whole and "reshardable" not in other.launch.checkpoint


@pytest.mark.parametrize(("layers", "warned"), [(2, []), (3, ["a"])])  # 142 and 210 million parameters
def test_what_that_costs_a_large_parent_is_said(plan_of: PlanOf, layers: int, warned: list[str]) -> None:
    child = "b: {continue_from: small/a@10, resources.gpus_per_node: 2, parallel.tp: 2, load.optimizer: true}"
    plan = plan_of(
        f"sweep: {{runs: {{a: {{}}, {child}}}}}\n", **SAVES, **{"models.dense.config.num_hidden_layers": layers}
    )
    assert plan.runs[0].launch.checkpoint["reshardable"] is True
    assert [
        run for said, runs in plan.warnings.items() if "checkpoint.reshardable is true" in said for run in runs
    ] == warned


def test_another_precision_takes_the_state_of_a_distributed_optimizer_or_none(
    plan_of: PlanOf, trained: Callable[..., Plan]
) -> None:
    trained(**{"training.precision": "fp32"})
    assert plan_of("continue_from: old/base@10", **SAVES).runs[0].run.parent.load.optimizer is True
    plain = "continue_from: old/base@10\nparallel: {distributed_optimizer: false}\nload: {optimizer: false}\n"
    assert plan_of(plain, **SAVES).runs[0].run.parent.load.optimizer is False


def test_keep_every_needs_keep_last(plan_of: PlanOf) -> None:
    assert "keep_every needs keep_last" in problems(plan_of, "checkpoint: {keep_every: 50}")


def test_what_is_loaded_counts_for_a_child_only(plan_of: PlanOf) -> None:
    plain, other = plan_of().runs[0], plan_of("load: {optimizer: false, rng: false}").runs[0]
    assert plain.run == other.run


TRUNK = """
training: {{train_iters: 100}}
schedule: {{decay: WSD, warmup_iters: 3}}
checkpoint: {{save_interval: 10}}
sweep: {{runs: {{trunk: {{schedule.decay: constant}}, b: {b}}}}}
"""


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("schedule.wsd_decay_iters: 10", None),
        ("schedule.wsd_decay_iters: 5", None),
        ("schedule.wsd_decay_iters: 40", "to 4.02e-05 in the next (schedule.wsd_decay_iters: 40, which begins after"),
        ("schedule.decay: linear", "to 3.45e-05 in the next (schedule.decay: linear, which counts from the first"),
        ("schedule.decay: cosine", "step 80 of small/trunk to 9.67e-06 in the next (schedule.decay: cosine"),
        ("schedule.decay: inverse-square-root", "schedule.decay: inverse-square-root"),
        ("schedule.decay: constant, optimizer.lr: 1e-5", None),
        ("schedule.decay: linear, schedule.decay_iters: 1000", None),
        ("schedule.decay: linear, load.optimizer: false", None),
        ("schedule.decay: linear, schedule.warmup_iters: 85", None),
    ],
)
def test_a_rate_that_falls_with_the_first_step_is_said(plan_of: PlanOf, given: str, said: str | None) -> None:
    b = f"{{continue_from: small/trunk@80, training.train_iters: 90, {given}}}"
    warnings = [one for one in plan_of(TRUNK.format(b=b), device="cpu").warnings if "falls at once" in one]
    assert len(warnings) == (said is not None), warnings
    for text in warnings:
        assert said in text and "the learning rate falls at once, from 0.0003 in step 80 of small/trunk" in text
        assert text.endswith("; `decay: WSD` with `wsd_decay_iters: 10` begins to fall there")


def test_wsd_is_no_remedy_where_the_parent_had_left_its_peak(plan_of: PlanOf) -> None:
    b = "{continue_from: small/trunk@80, training.train_iters: 85, schedule.decay: cosine}"
    text = TRUNK.format(b=b).replace("schedule.decay: constant", "schedule.decay: cosine")
    [said] = [one for one in plan_of(text, device="cpu").warnings if "falls at once" in one]
    assert "wsd_decay_iters" not in said


@pytest.mark.parametrize(
    ("given", "keeps"),
    [("cosine", True), ("cosine, optimizer.lr: 2e-4", False), ("linear", False)],
)
def test_the_end_of_the_parents_schedule_is_a_remedy_where_nothing_else_differs(
    plan_of: PlanOf, given: str, keeps: bool
) -> None:
    b = f"{{continue_from: small/trunk@40, training.train_iters: 50, schedule.decay: {given}}}"
    text = TRUNK.format(b=b).replace("schedule.decay: constant", "schedule.decay: cosine")
    [said] = [one for one in plan_of(text, device="cpu").warnings if "falls at once" in one]
    assert ("; schedule.decay_iters: 100 keeps its schedule" in said) == keeps
    if keeps:
        kept = text.replace("training.train_iters: 50", "training.train_iters: 50, schedule.decay_iters: 100")
        assert not [one for one in plan_of(kept, device="cpu").warnings if "falls at once" in one]


@pytest.mark.parametrize("decay", ["linear", "cosine", "inverse-square-root", "WSD"])
def test_a_schedule_that_goes_on_does_not_fall_at_once(plan_of: PlanOf, decay: str) -> None:
    b = "{continue_from: small/trunk@98, training.seed: 2}"
    text = f"schedule: {{decay: {decay}, wsd_decay_iters: 4}}\nsweep: {{runs: {{trunk: {{}}, b: {b}}}}}"
    plan = plan_of(text, **SAVES | {"checkpoint.save_interval": 1})
    assert not [one for one in plan.warnings if "falls at once" in one]
