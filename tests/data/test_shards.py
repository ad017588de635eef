"""How a corpus's files are divided."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaboa.data.documents import Format
from megaboa.data.readers import Records
from megaboa.data.shards import BLOCK, Part, can_be_cut, divide, overlaps_itself
from megaboa.records import SourceFile


def file(path, kind, packed=None, size=1):
    return SourceFile(path=path, kind=kind, packed=packed, size=size)


KINDS = [
    ("jsonl", None),
    ("jsonl", "gz"),
    ("text", None),
    ("text", "zst"),
    ("source", None),
    ("parquet", None),
    ("stream", None),
]
FILES = st.lists(
    st.builds(lambda kind, size: file("f", *kind, size=size), st.sampled_from(KINDS), st.integers(0, 50)), max_size=8
)


@given(FILES, st.integers(1, 12), st.sampled_from([None, "\n\n", "--x"]))
def test_every_byte_of_every_file_belongs_to_exactly_one_part(files, shards, separator):
    parts = list(itertools.chain(*divide(files, shards, separator)))
    for number, file in enumerate(files):
        mine = sorted((part.begin, part.end, part.turn, part.turns) for part in parts if part.file == number)
        if can_be_cut(file, separator):
            ends = [0, *(end for _, end, _, _ in mine)]
            assert [begin for begin, *_ in mine] == ends[:-1] and ends[-1] == file.size
        elif file.size:
            assert mine == [(0, file.size, turn, len(mine)) for turn in range(len(mine))]


@given(FILES, st.integers(1, 12))
def test_a_shard_reads_its_files_in_order(files, shards):
    for parts in divide(files, shards, None):
        assert [part.file for part in parts] == sorted({part.file for part in parts})


def test_a_large_packed_file_is_read_in_turns_and_a_small_one_by_one_shard():
    files = [file("a", "jsonl", "gz", 10), file("b", "jsonl", "gz", 1000)]
    parts = divide(files, 4, None)
    assert [part for shard in parts for part in shard if part.file == 0] == [Part(0, 0, 10)]
    assert [part.turn for shard in parts for part in shard if part.file == 1] == [0, 1, 2, 3]


def test_one_document_is_never_divided():
    assert [len(parts) for parts in divide([file("a", "text", None, 1000)], 5, None)] == [1, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("separator", "overlaps"), [("\n", False), ("\n\n", True), ("abc", False), ("aba", True), ("<|eot|>", False)]
)
def test_separators_that_overlap_themselves(separator, overlaps):
    assert overlaps_itself(separator) == overlaps


@given(st.integers(1, 5), st.sampled_from([0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 7]))
def test_turns_share_out_every_record(turns, records):
    one = file("f", "stream")
    found = []
    for turn in range(turns):
        part = Part(0, 0, 1, turn, turns)
        found += [position for position, _ in Records(one, part, Format())._mine((n, "") for n in range(records))]
    assert sorted(found) == list(range(records))
