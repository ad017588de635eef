"""Tokens, operations, time, disk, and the budget."""

import dataclasses
import functools

import pytest
from gpt2_large import facts

from megaboa.check import calibration, costs, flops, overview, speed
from megaboa.check.facts import Cluster
from megaboa.files import write_json, write_text
from megaboa.records import RunSpec, parse


def course(given, gpu="h200-141g", **training):
    values = {"iters": 1000, "save_interval": 100, **training}
    return dataclasses.replace(given, training=dataclasses.replace(given.training, **values), cluster=Cluster(gpu=gpu))


def test_operations_of_gpt2_large_are_those_that_bridge_printed():
    """161 TFLOP for 32 sequences (docs/benchmarks/h200.md)."""
    assert flops.of_step(facts(gbs=32)) == pytest.approx(161e12, rel=0.003)


def test_tokens_and_time_by_an_assumed_share_of_the_peak():
    found = costs.of_run(course(facts(gbs=64, world=2)), mfu=0.36)
    assert found.tokens == 1000 * 64 * 1024
    assert found.step_seconds == pytest.approx(0.452, rel=0.01)  # measured: 453.8 ms
    assert found.source == "36% of peak"
    assert found.gpu_hours == pytest.approx(2 * 1000 * found.step_seconds / 3600)


@pytest.mark.parametrize("layout", [{}, {"tp": 2, "sp": True}, {"pp": 2}, {"cp": 2}])
def test_time_is_predicted_by_layout_and_by_the_one_model_of_speed(layout):
    given = course(facts(mbs=8, world=2, **layout))
    found, step = costs.of_run(given), speed.of_step(given)
    assert found.step_seconds == step.seconds
    is_uncertain = step.host >= speed.HOST_SHARE * step.seconds
    assert found.source == f"predicted by {calibration.short('h200-141g', is_uncertain)}"
    assert bool(layout) == (found.step_seconds != costs.of_run(course(facts(mbs=8, world=2))).step_seconds)


def test_a_run_on_several_nodes_says_that_its_network_is_assumed():
    given = course(facts(world=2))
    several = dataclasses.replace(given, cluster=dataclasses.replace(given.cluster, nodes=2, gpus_per_node=1))
    assert costs.of_run(several).source.endswith(", network assumed)")
    assert "assumed" not in costs.of_run(given).source


def test_the_time_of_fp32_is_unknown_until_it_is_measured():
    given = course(facts())
    given = dataclasses.replace(given, training=dataclasses.replace(given.training, precision="fp32"))
    found = costs.of_run(given)
    assert (found.step_seconds, found.source, found.predicted, found.gpu_hours) == (None, "unknown", None, None)
    assert costs.of_run(given, earlier=(0.5, None)).source == "measured"


def test_what_was_measured_goes_before_what_is_assumed_and_what_was_given_before_both():
    given = course(facts())
    known = (0.5, costs.Correction(1.25, 3))
    found = costs.of_run(given, earlier=known)
    assert (found.step_seconds, found.source) == (0.5, "measured")
    assert found.predicted == speed.of_step(given)
    assert costs.of_run(given, given=0.4, earlier=known).source == "given"
    assert costs.of_run(course(facts(), gpu=None)).gpu_hours is None


@pytest.mark.parametrize(
    ("training", "expected"),
    [
        ({"save_interval": 0}, 0),
        ({"save_interval": None}, 1),
        ({"save_interval": 300}, 4),
        ({"save_interval": 100, "keep_last": 2}, 3),  # one more while the newest is written
        ({"save_interval": 600, "keep_last": 5}, 2),
    ],
)
def test_checkpoints_that_lie_there_at_one_time(training, expected):
    found = costs.of_run(course(facts(), **training), exported=True)
    assert found.checkpoints == expected
    assert found.checkpoint_bytes == pytest.approx(14 * 774_090_240, rel=0.001)
    assert found.disk_bytes == pytest.approx((14 * expected + 2) * 774_090_240, rel=0.001)


def test_a_checkpoint_of_muon_has_one_moment_of_matrices():
    tables = 50304 * 1280  # GPT2-large's embedding is its output layer, too
    found = costs.of_run(course(facts(), optimizer="muon"))
    assert found.checkpoint_bytes == pytest.approx(10 * (774_090_240 - tables) + 14 * tables, rel=0.001)


@pytest.mark.parametrize(("sharded", "bytes_per_parameter"), [(True, 16), (False, 12)])
def test_only_shards_repeat_the_weights_of_fp32(sharded, bytes_per_parameter):
    given = course(facts(), precision="fp32")
    given = dataclasses.replace(given, layout=dataclasses.replace(given.layout, distributed_optimizer=sharded))
    found = costs.of_run(given)
    assert found.checkpoint_bytes == pytest.approx(bytes_per_parameter * 774_090_240, rel=0.001)


def test_a_run_with_a_parent_costs_what_it_trains_itself():
    whole, rest = (costs.of_run(course(facts(), steps_before=start), given=3.6) for start in (0, 250))
    assert rest.tokens == 750 * 64 * 1024 // 64 * facts().training.gbs
    assert (rest.flops, rest.gpu_hours) == pytest.approx((0.75 * whole.flops, 0.75))
    assert (whole.checkpoints, rest.checkpoints) == (10, 8)  # 300, 400 ... 1000


def test_a_budget_names_what_is_exceeded():
    runs = [costs.of_run(course(facts(world=2)), given=3.6), None]
    found = costs.total(runs)
    assert (found.gpu_hours, found.unknown) == (2.0, 1)
    assert costs.over_budget(found, 2.0, "1T") == {}
    exceeded = costs.over_budget(found, 1.5, "50G")
    assert exceeded["budget.gpu_hours"].startswith("1.5 is less than the 2 GPU-hours of the plan (without 1 run of")
    assert exceeded["budget.disk"].startswith("50G is less than the 108 GB that the plan writes")


@pytest.mark.parametrize(
    ("hours", "limit", "disk_bytes", "disk", "said"),
    [
        (0.00015012, 0.00013, 5.66e6, "4M", ("0.00013 is less than the 0.00015 GPU", "4M is less than the 5.66 MB")),
        (5000.04, 5000, 2.00004e13, "20T", ("5,000 is less than the 5,000.04 GPU", "20T is less than the 20.0004 TB")),
        (12345.6, 1.5, 3.2e12, "900G", ("1.5 is less than the 12,300 GPU", "900G is less than the 3.2 TB")),
    ],
)
def test_a_budget_is_never_less_than_the_same_number(hours, limit, disk_bytes, disk, said):
    exceeded = costs.over_budget(costs.Total(0, 0, hours, disk_bytes, 0), limit, disk)
    for text, start in zip(exceeded.values(), said, strict=True):
        assert text.startswith(start)


RUN = {
    "model": {"name": "dense", "init": "scratch", "hf": "a/b"},
    "training": {"global_batch_size": 8, "micro_batch_size": 1, "seq_length": 64, "precision": "fp32", "seed": 1},
    **{"parallel": {"tp": 2}, "world_size": 2, "device": "cuda", "overrides": {}},
}


def earlier(results, experiment, run, seconds, state="PASS", gpu="h100-80g", predicted=None, by=None):
    folder = results / experiment / "runs" / "r"
    if predicted is not None:
        row = dict.fromkeys(overview.COLUMNS) | {
            "run": "r",
            "model_seconds": predicted,
            "model_by": by or calibration.name(gpu),
        }
        write_text(results / experiment / "preflight.tsv", overview.tsv([row]))
    write_json(folder / "run.json", run)
    write_json(folder / "launch.json", {"gpu": gpu})
    write_json(
        folder / "metrics/summary.json",
        {"run": "a", "state": state, "step_seconds": seconds and {"median": seconds, "p5": 0.0, "p95": 9.0, "n": 9}},
    )


def test_the_speed_of_earlier_runs_of_the_same_kind(tmp_path):
    other_seed = {**RUN, "training": {**RUN["training"], "seed": 2}, "model": {**RUN["model"], "name": "again"}}
    earlier(tmp_path, "a", RUN, 1.0)
    earlier(tmp_path, "b", other_seed, 3.0)
    earlier(tmp_path, "c", {**RUN, "parallel": {"tp": 1}}, 9.0)
    earlier(tmp_path, "d", RUN, 9.0, state="INVALID")
    earlier(tmp_path, "e", RUN, 5.0, gpu="h200-141g")
    earlier(tmp_path, "f", RUN, None)
    speeds = costs.history(tmp_path).seconds
    assert speeds[costs.speed_key(parse(RunSpec, RUN, "run.json"), "h100-80g")] == 2.0
    assert speeds[costs.speed_key(parse(RunSpec, RUN, "run.json"), "h200-141g")] == 5.0
    assert costs.speed_key(parse(RunSpec, RUN, "run.json"), None) not in speeds


def test_a_trained_run_has_its_own_time_which_is_no_expectation(tmp_path):
    earlier(tmp_path, "a", RUN, 1.0)
    earlier(tmp_path, "b", RUN, 3.0)
    found, gpu = costs.history(tmp_path), "h100-80g"
    like_it = found.of(parse(RunSpec, RUN, "run.json"), gpu)
    assert found.own == {("a", "r"): 1.0, ("b", "r"): 3.0} and like_it[0] == 2.0
    of = functools.partial(costs.of_run, course(facts(), gpu=gpu), earlier=like_it)
    for known, said in [({"own": 3.0}, (3.0, costs.OWN)), ({"own": 3.0, "given": 1.5}, (1.5, "given")),
                        ({}, (2.0, "measured"))]:  # fmt: skip
        assert (of(**known).step_seconds, of(**known).source) == said


def test_a_models_earlier_runs_correct_what_is_predicted_of_another_layout(tmp_path):
    earlier(tmp_path, "a", RUN, 1.2, predicted=1.0)
    earlier(tmp_path, "b", {**RUN, "parallel": {"tp": 1}}, 2.8, predicted=2.0)
    earlier(tmp_path, "c", {**RUN, "model": {"name": "other", "init": "scratch", "hf": "c/d"}}, 9.0, predicted=1.0)
    earlier(tmp_path, "d", RUN, 9.0, gpu="h200-141g", predicted=1.0)
    earlier(tmp_path, "e", RUN, 9.0, predicted=1.0, by="h100, of another day")
    other = parse(RunSpec, {**RUN, "parallel": {"pp": 2}}, "run.json")
    measured, correction = costs.history(tmp_path).of(other, "h100-80g")
    assert measured is None and correction == costs.Correction(pytest.approx(1.3), 2)
    given = course(facts(), gpu="h100-80g")
    found = costs.of_run(given, earlier=(measured, correction))
    assert found.step_seconds == pytest.approx(1.3 * speed.of_step(given).seconds)
    assert found.source.endswith("x 1.30, as 2 runs of this model took")


def test_nothing_is_known_before_the_first_experiment(tmp_path):
    assert costs.history(tmp_path) == costs.History()
