"""Equal, different, and what is only another time."""

import json

import pytest

from megaboa.bundle.compare import WITHOUT_TIMES, compare
from megaboa.observe.steps import step_rows, write_steps
from megaboa.records import Step

RUN = "results/tiny/runs/a"


def steps(path, loss=5.0, attempt=1, seconds=0.1):
    step = Step(step=1, attempt=attempt, time=1.0, seconds=seconds, loss=loss, tokens=8, grad_norm=1.0, lr=1e-3)
    write_steps(path, step_rows([step]))
    return path.read_bytes()


def verdict(name, ours, theirs):
    [one] = compare({name: ours}, {} if theirs is None else {name: theirs}, ["*"])
    return one.verdict


def test_steps_are_compared_to_the_last_bit_and_without_times(tmp_path):
    name, path = f"{RUN}/metrics/steps.parquet", tmp_path / "steps.parquet"
    ours = steps(path)
    assert verdict(name, ours, steps(path)) == "equal"
    assert verdict(name, ours, steps(path, seconds=0.2, attempt=2)) == WITHOUT_TIMES
    assert verdict(name, ours, steps(path, loss=5.000000000000001)) == "different"
    assert verdict(name, ours, b"PAR1 torn") == "different"
    assert verdict(name, ours, None) == "missing"


@pytest.mark.parametrize(
    ("theirs", "expected"),
    [
        ("run\tstep_seconds\na\t0.2\n", WITHOUT_TIMES),
        ("run\tstep_seconds\nb\t0.1\n", "different"),
        ("run\na\n", "different"),
        ("run\tstep_seconds\na\t0.1\n", "equal"),
    ],
)
def test_figures_data(theirs, expected):
    name = "results/tiny/report/data/step_time.tsv"
    ours = b"run\tstep_seconds\na\t0.1\n"
    assert verdict(name, ours, theirs.encode()) == expected


def test_manifests_are_compared_by_what_they_say_was_made():
    ours = {"identity": "x", "iteration": 3, "world_size": 1, "store": "/a"}
    for change, expected in (({"store": "/b", "identity": "y"}, "equal"), ({"iteration": 4}, "different")):
        theirs = json.dumps({**ours, **change}).encode()
        assert verdict(f"{RUN}/train.json", json.dumps(ours).encode(), theirs) == expected
    assert verdict(f"{RUN}/run.json", b"{}", b"{} ") == "different"


def test_exports_are_compared_without_their_card():
    ours = {"iteration": 3, "digest": "1", "files": {"README.md": "1", "model.safetensors": "2"}}
    for files, expected in (({"README.md": "9"}, "equal"), ({"model.safetensors": "9"}, "different")):
        theirs = {**ours, "digest": "9", "files": ours["files"] | files}
        assert verdict(f"{RUN}/export.json", json.dumps(ours).encode(), json.dumps(theirs).encode()) == expected


def test_only_what_is_asked_for_is_compared():
    found = compare({"a.tsv": b"", "b.json": b""}, {"a.tsv": b""}, ["*.tsv"])
    assert [(one.name, one.good) for one in found] == [("a.tsv", True)]
