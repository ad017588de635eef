"""What could be better of runs that passed: tables of cases, GPT2-large as it was measured on H200s among them."""

import dataclasses
import math
import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megaboa.check import table
from megaboa.doctor import passed
from megaboa.doctor.passed import ENOUGH, Course, curve_findings, of_examples, spikes
from megaboa.records import (
    Analysis,
    ExamplesRead,
    MedianAndEnds,
    PhaseTime,
    PipelineIdle,
    RankDetails,
    RankSteps,
    ShownExample,
    Spread,
    Step,
    Summary,
)

sys.path.insert(0, str(Path(__file__).parents[1] / "check"))
from gpt2_large import facts

PROFILED = PipelineIdle(ideal=0.5, measured=0.57)
CURRENT = "bf16_with_fp8_current_scaling_mixed"
COURSE = Course(lr=3e-4, warmup=20, clip=1.0)


def on_h200(seconds, **layout):
    given = facts(gbs=64, **layout)
    cluster = dataclasses.replace(given.cluster, gpu="h200-141g", gpus_per_node=8)
    timed = Spread(median=seconds, p5=seconds, p95=seconds, n=9)
    return dataclasses.replace(given, cluster=cluster), Summary(run="a", state="PASS", step_seconds=timed)


@pytest.mark.parametrize(
    ("seconds", "layout", "share"),
    [
        (0.837, {"mbs": 64, "world": 2, "pp": 2}, "19%"),  # measured, one micro-batch: half of it is bubble
        (0.458, {"world": 2}, None),
        (2.0, {"world": 2}, "8%"),
    ],
)
def test_far_below_the_peak(seconds, layout, share):
    found = passed.slow(*on_h200(seconds, **layout))
    assert bool(found) == bool(share)
    if share:
        assert found[0] == f"at {share} of its GPUs' peak: a step takes {seconds:.3g} s"


def test_fp32_is_not_compared_with_the_peak_of_bf16():
    given, summary = on_h200(2.0, world=2)
    given = replace(given, training=replace(given.training, precision="fp32"))
    assert passed.slow(given, summary) == []


@pytest.mark.parametrize(
    ("layout", "more", "split", "less"),
    [
        ({"world": 2, "pp": 2}, "stage 1 has 8% more", "{model.num_layers_in_last_pipeline_stage: 16}", "5% less"),
        ({"world": 4, "pp": 4}, "stage 3 has 24% more", "{model.num_layers_in_last_pipeline_stage: 6}", "17% less"),
        ({"world": 2, "pp": 2, "last_stage_layers": 16}, None, None, None),
        ({"world": 2, "tp": 2}, None, None, None),
    ],
)
def test_a_stage_with_more_work_than_the_others(layout, more, split, less):
    found = passed.unbalanced(facts(mbs=8, **layout), Analysis(pipeline=PROFILED))
    if more is None:
        assert found == []
        return
    assert found[0].startswith(more) and split in found[-1] and found[-1].endswith(less)
    assert "  profile: stages stand still for 57% of a step; with even ones 50%" in found


def test_the_split_that_is_advised_is_legal_and_holds_all_layers():
    best = passed.better_split(facts(mbs=8, world=4, pp=4))
    assert max(passed.works(best)) < max(passed.works(facts(mbs=8, world=4, pp=4)))
    assert sum(passed.works(best)) == sum(passed.works(facts(mbs=8)))


@pytest.mark.parametrize(("host_ms", "said"), [(40.0, "20% of a step"), (19.0, None), (None, None)])
def test_a_loader_that_is_too_slow(host_ms, said):
    phases = () if host_ms is None else (PhaseTime(phase="data", host_ms=host_ms, device_ms=0.0, n=1),)
    rank = RankSteps(rank=3, ms={"wall": milliseconds(200.0)})
    found = passed.waits_for_data(Analysis(ranks=(rank,), details={"3": RankDetails(phases=phases)}), 2)
    assert bool(found) == bool(said)
    if said:
        assert found[0].startswith(said) and "data.num_workers: 4 (now 2)" in found[1]


def test_without_a_profile_nothing_is_said_of_data():
    assert passed.waits_for_data(None, 2) == []


def milliseconds(median):
    return MedianAndEnds(median=median, min=median, max=median)


def starved(median, wall=93.9):
    return RankSteps(rank=0, ms={"starved": median and milliseconds(median), "wall": milliseconds(wall)})


def with_kernels(given, **kernels):
    return dataclasses.replace(given, kernels=dataclasses.replace(given.kernels, **kernels))


def test_a_host_that_launches_too_slowly():
    """Numbers of the two-rank trace from H200s, and of runs that are kept busy or say nothing."""
    given, slow = facts(world=2, tp=2), Analysis(ranks=(starved(44.4), starved(64.7)))
    found = passed.waits_for_host(given, slow)
    assert found[0].startswith("69% of a step the GPU waits for the host")
    assert "full_iteration" in found[1] and "p2p" not in found[1]
    assert passed.waits_for_host(with_kernels(given, graphs="full_iteration"), slow) == []
    for quiet in (Analysis(ranks=(starved(10.0), starved(None), starved(5.0, wall=0.0))), None):
        assert passed.waits_for_host(given, quiet) == []


def test_the_graph_that_is_advised_breaks_no_rule():
    pipeline = facts(mbs=8, world=2, pp=2)
    advised = passed.waits_for_host(pipeline, Analysis(ranks=(starved(90.0),)))[1]
    assert "model.batch_p2p_sync: false" in advised
    taken = with_kernels(pipeline, graphs="full_iteration", nan_check=False, waits_for_messages=False)
    assert table.is_legal(taken) and not table.is_legal(with_kernels(taken, waits_for_messages=True))


@pytest.mark.parametrize(
    ("precision", "weights", "distributed", "said"),
    [
        (CURRENT, True, True, True),
        (CURRENT, False, True, False),
        (CURRENT, True, False, False),
        ("bf16_with_fp8_subchannel_scaling_mixed", True, True, False),
        (None, False, True, False),
    ],
)
def test_weights_kept_in_fp8(precision, weights, distributed, said):
    given = facts()
    training = dataclasses.replace(given.training, precision=precision, fp8_weights=weights)
    layout = dataclasses.replace(given.layout, distributed_optimizer=distributed)
    found = passed.casts_single_rows(dataclasses.replace(given, training=training, layout=layout))
    assert bool(found) == said and (not said or "mixed_precision.fp8_param_gather: false" in found[1])


def curve(count=400, loss=lambda step: 4 + 6 * math.exp(-step / 60) - step / 500, norm=lambda step: 0.4, noise=0.03):
    draw = random.Random(7)
    return [
        Step(step=step, loss=loss(step) + draw.gauss(0, noise), grad_norm=norm(step)) for step in range(1, count + 1)
    ]


def raised(steps, by):
    return [replace(step, loss=step.loss + by.get(step.step, 0.0)) for step in steps]


@pytest.mark.parametrize("noise", [0.0, 0.03, 0.15])
def test_a_calm_curve_has_no_finding(noise):
    assert curve_findings(curve(noise=noise), COURSE) == []


def test_every_spike_is_found_once_at_its_top():
    found = spikes(raised(curve(), {150: 2.0, 151: 3.0, 152: 1.0, 300: 1.5}))
    assert [step for step, _, _ in found] == [151, 300]


@pytest.mark.parametrize(
    ("by", "says"),
    [
        ({300: 3.0, 301: 2.0}, "half the learning rate (optimizer.lr: 0.00015), or recovery.loss_spike"),
        ({60: 9.0}, "schedule.warmup_iters: 100 (now 20)"),
    ],
)
def test_spikes_are_named_with_what_to_try(by, says):
    lines = curve_findings(raised(curve(), by), COURSE)
    assert lines[0].startswith("1 loss spike, the largest at step ") and says in lines[1]


def test_gradients_that_are_clipped_most_of_the_time():
    lines = curve_findings(curve(norm=lambda step: 3.0), COURSE)
    assert lines[0].startswith("gradients are clipped in 100% of the steps: their norm is 3 in the median")
    assert curve_findings(curve(norm=lambda step: 3.0 if step < 150 else 0.5), COURSE) == []


def test_a_run_that_hardly_learns():
    lines = curve_findings(curve(loss=lambda step: 9.0), COURSE)
    assert lines[0].startswith("hardly learns: a loss of 9 in the first tenth") and "0.0009" in lines[1]
    assert curve_findings(curve(loss=lambda step: 2.0 - step / 4000), Course(pretrained=True)) == []


def test_a_second_half_that_brings_nothing():
    (line, _) = curve_findings(curve(loss=lambda step: max(4.0, 9 - step / 20), noise=0.0), COURSE)
    assert line.startswith("the second half brought 0 of ")


def test_of_short_runs_and_of_losses_that_are_none_nothing_is_said():
    assert curve_findings(curve(count=ENOUGH - 1, loss=lambda step: 9.0), COURSE) == []
    assert curve_findings([Step(step=step) for step in range(500)], COURSE) == []


def test_a_spike_says_what_its_step_has_read():
    lines = curve_findings(raised(curve(), {300: 3.0}), COURSE, lambda step: [f"  step {step} read a"])
    assert lines[1] == "  step 300 read a" and lines[2].startswith("  try: ")


def test_a_loss_of_hardly_any_token_is_explained():
    shown = ShownExample(corpus="chats", tokens=3, pieces=(("a", False), ("b", True)))
    counts = {"examples": 100, "longest": 5000, "cut": 0, "positions": 204_800, "template": "the tokenizer's"}
    usual = ExamplesRead(**counts, tokens=50_000, counted=9_000, silent=2, shown=shown)
    assert of_examples(usual) == of_examples(None) == []
    said, advice = of_examples(replace(usual, counted=300))
    assert said.startswith("300 of 50,000 tokens count in the loss") and "tuning.template or tuning.loss_on" in advice
    said, advice = of_examples(replace(usual, counted=300, silent=60))
    assert said.startswith("60 of 100 examples are so long") and "the longest has 5,000 tokens" in advice
