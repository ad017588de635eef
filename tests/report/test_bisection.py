"""The walk from a good value to a bad one."""

import itertools

import pytest
from called import called

from megaboa.files import write_json
from megaboa.records import BaselineCheck, Checks, Counts, read, write
from megaboa.report.bisection import failing, mark_of, next_to_try, reasons, suspects


def walk(marks_of):
    marks = {0: "good", len(marks_of) - 1: "bad"}
    while (number := next_to_try(marks)) is not None:
        assert number not in marks
        marks[number] = marks_of[number]
    return marks, suspects(marks)


@pytest.mark.parametrize("count", [3, 4, 7, 20])
def test_the_first_bad_one_is_found_in_as_many_steps_as_a_list_can_be_halved(count):
    for first in range(1, count):
        marks, found = walk(["good"] * first + ["bad"] * (count - first))
        assert found.is_one and found.bad == first
        assert len(marks) - 2 <= (count - 1).bit_length()


@pytest.mark.parametrize("between", list(itertools.product(["good", "bad", "untold", "broken"], repeat=3)))
def test_what_is_neither_good_nor_bad_stays_a_suspect(between):
    marks_of = ["good", *between, "bad"]
    _, found = walk(marks_of)
    assert marks_of[found.good] == "good" and marks_of[found.bad] == "bad"
    assert {marks_of[number] for number in found.rest} <= {"untold", "broken"}


def check(quantity, state):
    values = {"run": "a", "limit": 0.02, "detail": f"why {quantity}"}
    return BaselineCheck(kind="baseline", name=quantity, state=state, quantity=quantity, **values)


def checks(path, *found):
    write(path, Checks(state="FAIL", counts=Counts(), checks=tuple(check(*one) for one in found)))
    return read(Checks, path)


def test_what_the_last_fails_decides(tmp_path):
    last = checks(tmp_path / "a.json", ("step_seconds", "FAIL"), ("loss.tail_mean", "PASS"), ("memory", "NOT_RUN"))
    assert failing(last) == ["step_seconds"] and reasons(last, failing(last)) == ["step_seconds: why step_seconds"]
    marks = {
        "good": [("step_seconds", "PASS"), ("loss.tail_mean", "FAIL")],
        "bad": [("step_seconds", "PASS"), ("step_seconds", "FAIL"), ("step_seconds", "NOT_RUN")],
        "untold": [("step_seconds", "PASS"), ("step_seconds", "NOT_RUN")],
    }
    for mark, found in marks.items():
        assert mark_of(checks(tmp_path / "b.json", *found), ["step_seconds"]) == mark
    assert mark_of(checks(tmp_path / "c.json"), ["step_seconds"]) == "untold"


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--key", "image.path", "--values", "a", "b"], "give three or more"),
        (["--key", "image.path", "--values", "a", "b", "a"], "each once"),
        (["--key", "sweep.grid", "--values", "a", "b", "c"], "is not what runs are trained with"),
    ],
)
def test_bad_arguments(tmp_path, words, why):
    path = tmp_path / "my.yaml"
    write_json(path, {})
    done = called("bisect", path, *words)
    assert done.returncode == 2 and why in done.stderr
