"""Whatever a log is, and wherever it ends: no exception, and no number that was not printed."""

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from log_texts import LOGS, START, events_of, rows_of, step_line, summary_of

from megaboa.observe.logs.reader import Count

TEXTS = {path.stem: path.read_bytes() for path in LOGS}
# Pieces that the reader knows, put together wrongly.
WORDS = st.sampled_from(
    [
        *(b"iteration ", b" 7/ 9 |", b"lm loss: ", b"1.5E+00", b"NAN |", b"1e+ |", b"|", b":", b"\n", b"\r"),
        *(b"\x1b[31m", b"step: 3 ", b"loss: 2,1 ", b"mfu: 3%", b"GiB(", b"global_step=", b"[", b"]", b"0: ", b"[rank"),
        *(b"Step Time : 1.2.3s GPU utilization: ", b"MODEL_TFLOP/s/GPU", b"max reserved: 1..2", b"parameters"),
        *(b"[Rank 0] (after 1 iterations) memory (MB) |", b"validation loss at ", b" value: ", b"training loop"),
        *(b"seq_length: 99999999999999999999999", b"\xff\x00", b"Starting training loop"),
        *(b"number of nan iterations: 0 |", b"iteration 99999999999999999999999/1 |"),
    ]
)


def seen(text: bytes) -> set[tuple[int, tuple[tuple[str, str], ...]]]:
    """Every step with its fields; NaN is equal to itself."""
    return {(step, tuple((name, str(number)) for name, number in fields.items())) for step, fields in rows_of(text)}


@given(st.lists(st.one_of(WORDS, st.binary(max_size=20)), max_size=60).map(b"".join))
@example(b"iteration 1/1 | a: 1 | number of nan iterations: 0 |\niteration 0/1 | a: 1e |\n")
@settings(max_examples=1500, deadline=None)
def test_no_bytes_raise(text):
    count = Count()
    events_of(text, count)
    assert count.lines == count.understood + count.torn + count.unknown and count.unknown >= 0
    json.dumps(summary_of(text), allow_nan=False)


@pytest.mark.parametrize("name", TEXTS)
def test_a_log_cut_at_any_byte_has_no_wrong_number(name):
    text = TEXTS[name]
    whole = seen(text)
    for cut in range(0, len(text), 1 if len(text) < 3000 else 13):
        assert seen(text[:cut]) <= whole, text[:cut][-200:]


@given(st.data())
@settings(max_examples=400, deadline=None)
def test_a_log_cut_at_any_byte_with_another_behind_it_has_no_wrong_number(data):
    names = st.sampled_from([name for name in TEXTS if "bar" not in name])
    first, second = TEXTS[data.draw(names)], TEXTS[data.draw(names)]
    cut = data.draw(st.integers(0, len(first)))
    allowed = seen(first) | seen(second)
    steps = {step for step, _ in allowed}
    for step, fields in seen(first[:cut] + second):
        # A field that was cut off is missing, and never changed.
        assert any(step == other and set(fields) <= set(known) for other, known in allowed), (step, fields)
        assert step in steps


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 15)), min_size=1, max_size=6))
@settings(max_examples=200, deadline=None)
def test_any_restarts_count_every_step_once(attempts):
    """Attempts that go on at a step that was reached, as runs do."""
    text, reached, printed = "", 0, 0
    for count, back in attempts:
        first = max(reached - back, 0) + 1
        text += START + "".join(step_line(step, total=1000) for step in range(first, first + count))
        printed += count
        reached = first + count - 1
    steps = summary_of(text)["steps"]
    assert (steps["printed"], steps["last"]) == (reached, reached)
    assert steps["printed"] + steps["replayed"] + steps["copies"] == printed
    assert steps["copies"] == 0
