"""Runs that are not what was asked for."""

from dataclasses import replace

import made
import pytest

from megaboa.observe.measure import drift
from megaboa.observe.steps import step_rows
from megaboa.records import Identity, Step

ASKED = {
    "model": {"name": "m"},
    "training": {"train_iters": 10, "global_batch_size": 8, "seq_length": 64},
    "optimizer": {"lr": 1e-3},
    "overrides": {},
}
IDENTITY = Identity(run=ASKED, model="abc")


TRAIN = made.trained(identity=IDENTITY.digest)


def rows(tokens=512):
    return step_rows([Step(step=step, tokens=tokens, attempt=1) for step in range(1, 4)])


def test_a_run_as_it_was_asked_for():
    assert drift(ASKED, IDENTITY, TRAIN, rows()) == []


def test_a_configuration_that_has_changed_since():
    now = {**ASKED, "optimizer": {"lr": 2e-3}, "new": 1}
    assert drift(now, IDENTITY, TRAIN, rows()) == [
        "the configuration has drifted since it was trained: new, optimizer.lr"
    ]


def test_a_store_of_another_run():
    (reason,) = drift(ASKED, replace(IDENTITY, model="def"), TRAIN, rows())
    assert "another run" in reason


def test_steps_of_another_size():
    assert drift(ASKED, IDENTITY, TRAIN, rows(1024)) == ["steps of 1024 tokens instead of 512"]


@pytest.mark.parametrize(
    "change", [{"overrides": {"train.rampup_batch_size": [1, 1, 1]}}, {"training": {"train_iters": 3}}]
)
def test_where_something_else_decides_the_size_is_free(change):
    asked = {**ASKED, **change}
    identity = Identity(run=asked)
    assert drift(asked, identity, made.trained(identity=identity.digest), rows(1024)) == []
