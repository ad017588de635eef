"""Loss curves: calm ones say nothing; spikes, clipping and standstill are named with what to try."""

import math
import random
from dataclasses import replace

import pytest

from megaboa.doctor.curve import ENOUGH, Course, findings, spikes
from megaboa.records import Step

COURSE = Course(lr=3e-4, warmup=20, clip=1.0)


def curve(count=400, loss=lambda step: 4 + 6 * math.exp(-step / 60) - step / 500, norm=lambda step: 0.4, noise=0.03):
    draw = random.Random(7)
    return [
        Step(step=step, loss=loss(step) + draw.gauss(0, noise), grad_norm=norm(step)) for step in range(1, count + 1)
    ]


def raised(steps, by):
    return [replace(step, loss=step.loss + by.get(step.step, 0.0)) for step in steps]


@pytest.mark.parametrize("noise", [0.0, 0.03, 0.15])
def test_a_calm_curve_has_no_finding(noise):
    assert findings(curve(noise=noise), COURSE) == []


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
    lines = findings(raised(curve(), by), COURSE)
    assert lines[0].startswith("1 loss spike(s), the largest at step ") and says in lines[1]


def test_gradients_that_are_clipped_most_of_the_time():
    lines = findings(curve(norm=lambda step: 3.0), COURSE)
    assert lines[0].startswith("gradients are clipped in 100% of the steps: their norm is 3 in the median")
    assert findings(curve(norm=lambda step: 3.0 if step < 150 else 0.5), COURSE) == []


def test_a_run_that_hardly_learns():
    lines = findings(curve(loss=lambda step: 9.0), COURSE)
    assert lines[0].startswith("hardly learns: a loss of 9 in the first tenth") and "0.0009" in lines[1]
    assert findings(curve(loss=lambda step: 2.0 - step / 4000), Course(pretrained=True)) == []


def test_a_second_half_that_brings_nothing():
    (line, _) = findings(curve(loss=lambda step: max(4.0, 9 - step / 20), noise=0.0), COURSE)
    assert line.startswith("the second half brought 0 of ")


def test_of_short_runs_and_of_losses_that_are_none_nothing_is_said():
    assert findings(curve(count=ENOUGH - 1, loss=lambda step: 9.0), COURSE) == []
    assert findings([Step(step=step) for step in range(500)], COURSE) == []
