"""Whatever stands in a capture, an analysis comes out, and it is JSON that any reader takes."""

import json
import sqlite3
import tempfile
from pathlib import Path

from as_written import analyse, compare
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import ALL_REDUCE, GEMM, SEND, Story

from megaboa.layout import Layout
from megaboa.observe.traces.analysis import Expected
from megaboa.records import Analysis, parse
from megaboa.report.profiles import FIGURES

NAMES = st.sampled_from(
    [GEMM, ALL_REDUCE, SEND, "ProfilerStep#3", "ProfilerStep#4", "train_step", "optimizer_step", "x"]
)
TIMES = st.integers(0, 40)
NUMBERS = st.one_of(st.integers(-5, 60), st.integers(), st.floats())
ANYTHING = st.one_of(st.none(), st.booleans(), NUMBERS, st.text(max_size=3), st.lists(TIMES))
CATEGORIES = st.sampled_from(["kernel", "gpu_memcpy", "cuda_runtime", "user_annotation", "cpu_op", "other"])


@st.composite
def sane(draw):
    arguments = {"correlation": draw(st.integers(0, 5)), "bytes": draw(st.integers(0, 4096))}
    if draw(st.booleans()):
        arguments["stream"] = draw(st.integers(7, 9))
    event = {"ph": "X", "cat": draw(CATEGORIES), "name": draw(NAMES), "ts": draw(TIMES), "dur": draw(TIMES), "tid": 1}
    return {**event, "args": arguments}


STRANGE = st.fixed_dictionaries(
    {"ph": st.just("X"), "cat": CATEGORIES}, optional=dict.fromkeys(("ts", "dur", "name", "tid", "args"), ANYTHING)
)
HEADS = st.fixed_dictionaries(
    {},
    optional=dict.fromkeys(("distributedInfo", "deviceProperties", "baseTimeNanoseconds", "schemaVersion"), ANYTHING),
)


def analysed(*documents):
    with tempfile.TemporaryDirectory() as folder:
        for number, document in enumerate(documents):
            (Path(folder) / f"rank-{number}.json").write_text(json.dumps(document))
        return analyse([Path(folder)], Expected(ranks=[0, 1], steps=[3, 5], layout=Layout(2, pp=2), microbatches=4))


@settings(max_examples=150)
@given(st.lists(sane(), max_size=30), st.lists(sane(), max_size=12))
def test_every_trace_gives_a_document_that_is_json(one, other):
    found = analysed({"traceEvents": one}, {"traceEvents": other})
    again = json.loads(json.dumps(found, allow_nan=False))
    assert again["form"] == 1 and 1 <= len(again["summary"]) <= 10
    for row in again["budget"]:
        assert row["wall"] > 0
        if row["compute"] is not None:
            parts = row["compute"] + row["exposed"] + (row["copies_exposed"] or 0.0) + row["idle"]
            assert abs(parts - row["wall"]) < 1e-9
    json.dumps(compare(again, again), allow_nan=False)


@settings(max_examples=150)
@given(st.lists(st.one_of(STRANGE, sane(), ANYTHING), max_size=15), HEADS)
def test_what_makes_no_sense_is_left_out(events, head):
    json.dumps(analysed({**head, "traceEvents": events}), allow_nan=False)


def test_text_in_a_column_of_numbers_is_named(tmp_path):
    story = Story()
    story.kernel(GEMM, 0, 10)
    path = story.nsys(tmp_path)
    connection = sqlite3.connect(path)
    connection.execute("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET start = 'soon'")
    connection.commit()
    connection.close()
    (finding,) = [f for f in analyse([path])["findings"] if f["level"] == "error"]
    assert finding["code"] == "malformed" and "soon" in finding["text"]


def test_figures_of_a_single_kernel_are_drawn_or_left_out():
    event = {"ph": "X", "cat": "kernel", "name": GEMM, "ts": 0, "dur": 5, "args": {"stream": 7, "correlation": 1}}
    spans = [{"ph": "X", "cat": "user_annotation", "name": "train_step", "ts": at, "dur": 5} for at in (0, 10)]
    document = analysed({"traceEvents": [event, *spans]})
    drawn = {name for name, make in FIGURES.items() if make(parse(Analysis, document, "analysis.json")) is not None}
    assert {"ranks", "classes"} <= drawn
