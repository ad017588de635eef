"""Steps of all attempts in one table, each step once and what was done again marked."""

import json
import math

import pandas as pd
import pyarrow.parquet as pq
import pytest
from fake_runs import START, FakeExperiment, start_event, step_event, write_attempt, write_attempts
from hypothesis import given
from hypothesis import strategies as st

from megaboa.files import write_text
from megaboa.observe.steps import add_routing, read_events, step_rows, write_steps
from megaboa.records import Evaluated, Step, parse
from megaboa.store_paths import RunStore


@pytest.fixture
def store(tmp_path):
    return FakeExperiment(tmp_path).plan_run("dp2")


def step(number, attempt=1, **values):
    return parse(Step, {**step_event(number, START + number), "attempt": attempt, **values}, "a test")


def test_a_resumed_attempt_marks_what_it_did_again(store):
    write_attempts(store, [start_event(1), start_event(2, resumed_from=10)])
    write_attempt(store, 1, [step_event(number, START + number) for number in range(1, 14)], torn='{"event": "st')
    write_attempt(store, 2, [step_event(number, START + 50 + number) for number in range(11, 21)])
    rows = step_rows(read_events(RunStore(store)))
    assert [(row.step, row.attempt) for row in rows if row.replayed] == [(11, 1), (12, 1), (13, 1)]
    assert [row.step for row in rows if not row.replayed] == list(range(1, 21))


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 20)), min_size=1, max_size=5))
def test_every_step_has_exactly_one_row_that_counts(attempts):
    events = [
        step(number, attempt)
        for attempt, (resumed_from, length) in enumerate(attempts, start=1)
        for number in range(resumed_from + 1, resumed_from + length + 1)
    ]
    rows = step_rows(events)
    assert len(rows) == len(events)
    counting = [row for row in rows if not row.replayed]
    assert sorted(row.step for row in counting) == sorted({event.step for event in events})
    for row in counting:
        assert row.attempt == max(event.attempt for event in events if event.step == row.step)


def test_other_events_make_no_rows():
    assert step_rows([Evaluated(step=1, time=START, attempt=1)]) == []


def test_a_further_validation_set_has_a_column_of_its_own(tmp_path):
    losses = {"lm loss": 6.0, "valid/far": 7.0}
    evaluations = [
        Evaluated(step=2, time=START, losses=losses, attempt=1),
        Evaluated(step=2, time=START, losses={**losses, "valid/far": 7.5}, attempt=1),
        Evaluated(step=4, time=START, losses=losses, attempt=2),  # without a step of its own
    ]
    write_steps(tmp_path / "steps.parquet", step_rows([step(1), step(2), step(3), *evaluations]))
    table = pd.read_parquet(tmp_path / "steps.parquet")
    assert table["valid/far"].fillna(0).tolist() == [0, 7.5, 0]


def test_the_table_keeps_nan_and_null_apart_and_has_a_column_for_every_further_loss(tmp_path):
    rows = step_rows(
        [
            step(1, loss=math.nan, losses={"lm loss": math.nan}),
            step(2, loss=None, grad_norm=None, losses={}),
            step(3, losses={"lm loss": 5.0, "load_balancing_loss": 1.25}),
        ]
    )
    path = tmp_path / "metrics" / "steps.parquet"
    write_steps(path, rows)
    table = pq.read_table(path)
    assert table["loss"].null_count == 1
    assert math.isnan(table["loss"][0].as_py())
    assert table["losses/load_balancing_loss"].to_pylist() == [None, None, 1.25]
    assert [name for name in table.column_names if name.startswith("losses/")] == ["losses/load_balancing_loss"]
    frame = pd.read_parquet(path)
    assert frame["step"].tolist() == [1, 2, 3]
    assert frame["tokens"].tolist() == [1024] * 3
    assert list(path.parent.iterdir()) == [path], "no temporary file is left"


def test_a_run_without_steps_gives_an_empty_table(tmp_path):
    write_steps(tmp_path / "steps.parquet", [])
    assert pd.read_parquet(tmp_path / "steps.parquet").empty


def test_the_same_rows_give_the_same_bytes(tmp_path):
    rows = step_rows([step(1), step(2)])
    write_steps(tmp_path / "a", rows)
    write_steps(tmp_path / "b", rows)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.fixture
def routed(tmp_path):
    path = FakeExperiment(tmp_path).plan_run("moe")
    write_attempts(path, [start_event(1), start_event(2, resumed_from=2)])
    write_attempt(path, 1, [step_event(number, START + number) for number in (1, 2, 3)])
    write_attempt(path, 2, [step_event(number, START + 9 + number) for number in (3, 4)])
    return RunStore(path)


def write(routed, attempt, rank, lines, torn=""):
    text = "".join(json.dumps({"step": step, "layers": layers}) + "\n" for step, layers in lines)
    write_text(routed.attempt(attempt).routing / f"{rank}.jsonl", text + torn)


def rows_of(routed):
    return add_routing(step_rows(read_events(routed)), routed)


def one(load, *margins):
    return {"load": load, "margins": list(margins)}


def test_ranks_of_a_layer_are_summed_and_layers_of_other_ranks_put_beside_it(routed):
    write(routed, 1, 0, [(1, {"2": one([5, 3], 0.1, 0.4)})])
    write(routed, 1, 1, [(1, {"2": one([1, 7], 0.2)})])
    write(routed, 1, 2, [(1, {"10": one([4, 4], 0.3)})])
    [row, *_] = rows_of(routed)
    assert json.loads(row.routing) == {"2": one([6, 10], 0.1, 0.2, 0.4), "10": one([4, 4], 0.3)}
    assert list(json.loads(row.routing)) == ["2", "10"]


def test_a_step_that_was_done_again_has_what_its_own_attempt_wrote(routed):
    write(routed, 1, 0, [(step, {"1": one([step, 0])}) for step in (1, 2)], torn='{"step": 3, "lay')
    write(routed, 2, 0, [(step, {"1": one([0, step])}) for step in (3, 4)])
    found = {(row.step, row.attempt): row.routing for row in rows_of(routed)}
    assert found[3, 1] is None
    assert [json.loads(found[key])["1"]["load"] for key in ((1, 1), (3, 2), (4, 2))] == [[1, 0], [0, 3], [0, 4]]


def test_runs_without_experts_have_no_such_column(routed, tmp_path):
    write_steps(tmp_path / "steps.parquet", rows_of(routed))
    assert "routing" not in pd.read_parquet(tmp_path / "steps.parquet")


def test_the_table_keeps_it_as_text(routed, tmp_path):
    write(routed, 1, 0, [(1, {"1": one([5, 3], 0.1)})])
    write_steps(tmp_path / "steps.parquet", rows_of(routed))
    column = pd.read_parquet(tmp_path / "steps.parquet")["routing"]
    assert json.loads(column[0]) == {"1": one([5, 3], 0.1)}
    assert column[1:].isna().all()
