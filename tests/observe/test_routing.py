"""Which experts a run's tokens went to: over ranks, layers and attempts."""

import json

import pandas as pd
import pytest
from fake_runs import START, FakeExperiment, start_event, step_event, write_attempt, write_attempts

from megaboa.files import write_text
from megaboa.observe.routing import add_routing
from megaboa.observe.steps import read_events, step_rows, write_steps
from megaboa.paths import RunStore


@pytest.fixture
def store(tmp_path):
    path = FakeExperiment(tmp_path).plan_run("moe")
    write_attempts(path, [start_event(1), start_event(2, resumed_from=2)])
    write_attempt(path, 1, [step_event(number, START + number) for number in (1, 2, 3)])
    write_attempt(path, 2, [step_event(number, START + 9 + number) for number in (3, 4)])
    return RunStore(path)


def write(store, attempt, rank, lines, torn=""):
    text = "".join(json.dumps({"step": step, "layers": layers}) + "\n" for step, layers in lines)
    write_text(store.attempt(attempt).routing / f"{rank}.jsonl", text + torn)


def rows_of(store):
    return add_routing(step_rows(read_events(store)), store)


def one(load, *margins):
    return {"load": load, "margins": list(margins)}


def test_ranks_of_a_layer_are_summed_and_layers_of_other_ranks_put_beside_it(store):
    write(store, 1, 0, [(1, {"2": one([5, 3], 0.1, 0.4)})])
    write(store, 1, 1, [(1, {"2": one([1, 7], 0.2)})])
    write(store, 1, 2, [(1, {"10": one([4, 4], 0.3)})])
    [row, *_] = rows_of(store)
    assert json.loads(row["routing"]) == {"2": one([6, 10], 0.1, 0.2, 0.4), "10": one([4, 4], 0.3)}
    assert list(json.loads(row["routing"])) == ["2", "10"]


def test_a_step_that_was_done_again_has_what_its_own_attempt_wrote(store):
    write(store, 1, 0, [(step, {"1": one([step, 0])}) for step in (1, 2)], torn='{"step": 3, "lay')
    write(store, 2, 0, [(step, {"1": one([0, step])}) for step in (3, 4)])
    found = {(row["step"], row["attempt"]): row["routing"] for row in rows_of(store)}
    assert found[3, 1] is None
    assert [json.loads(found[key])["1"]["load"] for key in ((1, 1), (3, 2), (4, 2))] == [[1, 0], [0, 3], [0, 4]]


def test_runs_without_experts_have_no_such_column(store, tmp_path):
    write_steps(tmp_path / "steps.parquet", rows_of(store))
    assert "routing" not in pd.read_parquet(tmp_path / "steps.parquet")


def test_the_table_keeps_it_as_text(store, tmp_path):
    write(store, 1, 0, [(1, {"1": one([5, 3], 0.1)})])
    write_steps(tmp_path / "steps.parquet", rows_of(store))
    column = pd.read_parquet(tmp_path / "steps.parquet")["routing"]
    assert json.loads(column[0]) == {"1": one([5, 3], 0.1)}
    assert column[1:].isna().all()
