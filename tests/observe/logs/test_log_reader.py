"""What makes logs hard: colours, labels, torn lines, lines that are mixed, blocks that end in the middle of a line."""

import io
import math
import tracemalloc

import pytest
from log_texts import FIXTURES, START, events_of, rows_of, step_line, summary_of

from megaboa.observe.logs import reader
from megaboa.observe.logs.events import Note, Steps
from megaboa.observe.logs.reader import Count, read_events


def test_colours_are_no_part_of_a_line():
    plain = (FIXTURES / "torchtitan.log").read_text()
    coloured = (
        plain.replace("step:", "\x1b[31mstep:").replace("  loss:", "  \x1b[32mloss:").replace("%\n", "%\x1b[39m\n")
    )
    assert coloured != plain and rows_of(coloured) == rows_of(plain)
    found = step_line(3).replace("iteration", "\x1b[01;31m\x1b[Kiteration\x1b[m\x1b[K")  # as grep marks it
    assert rows_of(found) == rows_of(step_line(3))


@pytest.mark.parametrize(
    "label", ["[rank3]:", "[default3]:", "3: ", "  3: ", "train/3 ", "[2025-11-20T14:55:23+08:00] job/3 "]
)
def test_labels_name_the_rank(label):
    text = "".join(label + step_line(step) for step in range(1, 9))
    events = events_of(text)
    assert {event.rank for event in events} == {"3"}
    assert [step for event in events for step, _ in event.rows()] == list(range(1, 9))


def test_fields_may_come_in_any_order_and_unknown_ones_are_kept():
    line = (
        " iteration 7/ 9 | lm loss: 2.5E+00 | router/entropy: 1.25 | elapsed time per iteration (ms): 80.0 | new: 3 |\n"
    )
    assert rows_of(line) == [(7, {"loss": 2.5, "router/entropy": 1.25, "seconds": 0.08, "new": 3.0})]
    assert summary_of(line)["further"]["new"]["last"] == 3.0


def test_numbers_that_are_none():
    line = step_line(4).replace("9.500000E+00", "NAN").replace("1.250", "inf")
    ((_, fields),) = rows_of(line)
    assert math.isnan(fields["loss"]) and fields["grad_norm"] == math.inf
    summary = summary_of(step_line(3) + line)
    assert summary["not_finite_losses"] == 1 and summary["loss"]["last"] is None
    assert summary["not_finite"]["loss.last"] == "nan"


def test_a_line_that_is_still_written_is_not_read():
    count = Count()
    assert len(events_of(step_line(1) + step_line(2)[:-1], count)) == 1
    assert (count.torn, count.lines) == (1, 2)


@pytest.mark.parametrize("cut", [30, 90, 130, 200, 250, 300])
def test_of_a_line_that_was_torn_and_has_another_behind_it_only_that_is_read(cut):
    text = step_line(1) + step_line(2, loss=7.25)[:cut] + step_line(3) + step_line(4)
    rows = dict(rows_of(text))
    assert sorted(rows) == [1, 3, 4]
    assert all(fields["loss"] == 9.5 for fields in rows.values())


def test_a_torn_line_that_somebody_ended_is_counted_as_torn():
    count = Count()
    events_of(step_line(1) + step_line(2)[:160] + "\n" + step_line(3), count)
    assert (count.torn, count.understood) == (1, 2)


def test_noise_behind_a_whole_line_costs_nothing():
    assert rows_of(step_line(5)[:-1] + "srun: error: n3: task 4: Killed\n") == rows_of(step_line(5))


def test_a_memory_report_with_a_torn_peak_is_not_believed():
    line = "[Rank 0] (after 1 iterations) memory (MB) | allocated: 10.5 | max allocated: 50.5"
    line += " | reserved: 60.0 | max reserved: {}\n"
    (whole,), (torn,) = events_of(line.format("64.0")), events_of(line.format("6"))
    assert whole.values == {"allocated": 50.5 * 2**20, "reserved": 64 * 2**20}
    assert torn.values == {"allocated": 50.5 * 2**20}


@pytest.mark.parametrize("block", [1, 7, 64, 1000, 100_000])
def test_blocks_may_end_anywhere(block, monkeypatch):
    text = "".join(path.read_text() for path in sorted(FIXTURES.glob("*.log")))
    whole = [(event.layout, list(event.rows())) for event in events_of(text) if isinstance(event, Steps)]
    monkeypatch.setattr(reader, "BLOCK_BYTES", block)
    monkeypatch.setattr(reader.Lines.__init__, "__defaults__", (block,))
    rows = [row for event in events_of(text) if isinstance(event, Steps) for row in event.rows()]
    assert sorted(map(str, rows)) == sorted(str(row) for _, part in whole for row in part)


def test_a_file_without_line_feeds_is_no_log():
    count = Count()
    assert events_of(b"x" * (3 << 20) + b"\n" + step_line(1).encode(), count)
    assert (count.lines, count.understood) == (2, 1)
    assert events_of(b"iteration 1/2 | " * (1 << 18), count) == []


class Endless(io.RawIOBase):
    """So many blocks of steps."""

    def __init__(self, blocks):
        self._left = blocks

    def read(self, size):
        self._left -= 1
        return (step_line(self._left) * 200).encode() if self._left >= 0 else b""


def test_memory_does_not_grow_with_the_log():
    def peak(blocks):
        tracemalloc.start()
        try:
            assert sum(event.count for event in read_events(Endless(blocks))) == 200 * blocks
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert peak(80) < 1.2 * peak(5)


def test_a_start_between_steps_keeps_its_place():
    text = step_line(1) + step_line(2) + START + step_line(1) + step_line(2)
    kinds = ["start" if isinstance(event, Note) else event.count for event in events_of(step_line(9) + text)]
    assert kinds.index("start") > 0 and kinds[-1] != "start"
