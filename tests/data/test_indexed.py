"""The files of an indexed dataset, byte for byte as megatron-core writes them, and as it reads them."""

import base64
import json
import struct
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megaboa.data import indexed
from megaboa.data.indexed import Index, in_pieces, token_dtype, write_index
from megaboa.index_file import HEADER_BYTES, Header

# megatron-core runs in a process of its own, for it may be imported into this one only behind the CPU backend.
MEGATRON = """
import base64, json, sys, tempfile
from pathlib import Path
import torch
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, IndexedDatasetBuilder
out = Path(tempfile.mkdtemp())

def build(vocab_size, documents):
    builder = IndexedDatasetBuilder(str(out / "x.bin"), dtype=DType.optimal_dtype(vocab_size))
    for ids in documents:
        builder.add_item(torch.tensor(ids, dtype=torch.int64))
        builder.end_document()
    builder.finalize(str(out / "x.idx"))
    return [base64.b64encode((out / name).read_bytes()).decode() for name in ("x.bin", "x.idx")]

def read(prefix, numbers):
    data = IndexedDataset(prefix)
    pointers = [int(data.index.sequence_pointers[number]) for number in numbers]
    return [len(data), [data[number].tolist() for number in numbers], pointers]

for line in sys.stdin:
    what, *arguments = json.loads(line)
    print("ANSWER", json.dumps({"build": build, "read": read}[what](*arguments)), flush=True)
"""


@pytest.fixture(scope="module")
def megatron():
    """A function that calls megatron-core."""
    process = subprocess.Popen(
        [sys.executable, "-c", MEGATRON],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )

    def call(*question):
        process.stdin.write(json.dumps(question) + "\n")
        process.stdin.flush()
        for line in process.stdout:
            if line.startswith("ANSWER "):
                return json.loads(line.removeprefix("ANSWER "))
        raise AssertionError("megatron-core ended")

    yield call
    process.stdin.close()
    process.wait(timeout=30)


def write(folder, vocab_size, documents, piece=1 << 20):
    """The bytes of the two files."""
    dtype = token_dtype(vocab_size)
    tokens = np.array([token for ids in documents for token in ids], dtype)
    lengths = np.array([len(ids) for ids in documents], np.int64)
    (folder / "x.bin").write_bytes(tokens.tobytes())
    assert write_index(folder / "x.idx", dtype, lambda: in_pieces(lengths, piece)) == len(documents)
    return [(folder / name).read_bytes() for name in ("x.bin", "x.idx")]


@st.composite
def corpora(draw, shortest=0):
    vocab_size = draw(st.sampled_from([1, 512, 65499, 65500, 65536, 152064, 2**31 - 1]))
    ids = st.integers(0, vocab_size - 1)
    return vocab_size, draw(st.lists(st.lists(ids, min_size=shortest, max_size=20), max_size=12))


@pytest.mark.slow
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(corpora(), st.integers(1, 5))
def test_every_byte_is_megatrons(megatron, tmp_path, corpus, piece):
    assert write(tmp_path, *corpus, piece) == [base64.b64decode(file) for file in megatron("build", *corpus)]


@pytest.mark.slow
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(corpora(shortest=1).filter(lambda corpus: corpus[1]))
def test_megatron_reads_what_was_written(megatron, tmp_path, corpus):
    write(tmp_path, *corpus)
    count, documents, _ = megatron("read", str(tmp_path / "x"), list(range(len(corpus[1]))))
    assert (count, documents) == (len(corpus[1]), corpus[1])


@pytest.mark.slow
@pytest.mark.parametrize("vocab_size", [512, 152064])
def test_over_two_to_the_31_tokens_and_two_to_the_32_bytes(megatron, tmp_path, vocab_size):
    """A .bin without contents, but for its last document."""
    dtype = token_dtype(vocab_size)
    lengths = np.array([2**31 - 1, 2**30, 7, 2**31 - 1, 2**20, 5])
    assert write_index(tmp_path / "x.idx", dtype, lambda: in_pieces(lengths, 2)) == 6
    begin = int(lengths[:-1].sum()) * dtype.itemsize
    with (tmp_path / "x.bin").open("wb") as stream:
        stream.truncate(begin)
        stream.seek(begin)
        stream.write(np.arange(1, 6, dtype=dtype).tobytes())
    assert begin > 2**33 and (tmp_path / "x.bin").stat().st_blocks * 512 < 1 << 20
    index = Index.open(tmp_path / "x.idx")
    assert index.problems() == [] and index.bytes == (tmp_path / "x.bin").stat().st_size
    assert int(index.pointers[-1]) == begin
    assert index.tokens(np.memmap(tmp_path / "x.bin", dtype, "r"), 5).tolist() == [1, 2, 3, 4, 5]
    seventh = int(lengths[:2].sum()) * dtype.itemsize
    assert megatron("read", str(tmp_path / "x"), [2, 5]) == [6, [[0] * 7, [1, 2, 3, 4, 5]], [seventh, begin]]


def test_the_layout_of_the_two_files(tmp_path):
    tokens, index = write(tmp_path, 512, [[1, 2, 511], [7]])
    assert tokens == struct.pack("<4H", 1, 2, 511, 7)
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 2, 3)
    assert index == header + struct.pack("<2i", 3, 1) + struct.pack("<2q", 0, 6) + struct.pack("<3q", 0, 1, 2)


@pytest.mark.parametrize(("vocab_size", "dtype"), [(512, np.uint16), (65499, np.uint16), (65500, np.int32)])
def test_the_type_of_a_token(vocab_size, dtype):
    assert token_dtype(vocab_size) == dtype


@given(corpora(shortest=1), st.integers(1, 5))
def test_an_index_that_was_written_has_no_problems(tmp_path_factory, corpus, piece):
    folder = tmp_path_factory.mktemp("x")
    write(folder, *corpus)
    before, indexed.PIECE = indexed.PIECE, piece
    try:
        index = Index.open(folder / "x.idx")
        assert index.problems() == []
    finally:
        indexed.PIECE = before
    assert index.bytes == (folder / "x.bin").stat().st_size
    data = np.fromfile(folder / "x.bin", index.dtype)
    assert [index.tokens(data, n).tolist() for n in range(len(index.lengths))] == corpus[1]


LENGTHS, POINTERS = HEADER_BYTES, HEADER_BYTES + 4 * 4
DOCUMENTS = POINTERS + 4 * 8


@pytest.mark.parametrize(
    ("offset", "content", "said"),
    [
        (POINTERS + 16, struct.pack("<q", 999), "the pointer of document 2 is wrong"),
        (POINTERS, struct.pack("<q", 2), "the pointer of document 0 is wrong"),
        (LENGTHS + 4, struct.pack("<i", 4), "the pointer of document 2 is wrong"),
        (LENGTHS + 12, struct.pack("<i", 0), "document 3 has no tokens"),
        (LENGTHS + 12, struct.pack("<i", -1), "document 3 has no tokens"),
        (DOCUMENTS + 8, struct.pack("<q", 2), "its list of documents is not that of one sequence per document"),
    ],
)
@pytest.mark.parametrize("piece", [1, 2, 1 << 20])
def test_damage_is_named(tmp_path, monkeypatch, offset, content, said, piece):
    _, index = write(tmp_path, 512, [[1, 2], [3], [4, 5, 6], [7]])
    (tmp_path / "x.idx").write_bytes(index[:offset] + content + index[offset + len(content) :])
    monkeypatch.setattr(indexed, "PIECE", piece)
    assert said in Index.open(tmp_path / "x.idx").problems()


def test_a_list_of_documents_that_is_too_short_is_named(tmp_path):
    (tmp_path / "x.idx").write_bytes(Header("uint16", 0, 0).pack())
    assert Index.open(tmp_path / "x.idx").problems() == [
        "its list of documents is not that of one sequence per document"
    ]


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda index: index[:-1], r"x\.idx has \d+ bytes instead of \d+"),
        (lambda index: index + b"\0", "bytes instead of"),
        (lambda index: index[:20], "is not a Megatron index"),
        (lambda index: b"", "is not a Megatron index"),
        (lambda index: b"X" + index[1:], "is not a Megatron index"),
        (lambda index: index[:9] + b"\x02" + index[10:], "unknown version 2 or type 8"),
        (lambda index: index[:17] + b"\x06" + index[18:], "unknown version 1 or type 6"),
        (lambda index: index[:18] + b"\xff" * 8 + index[26:], "bytes instead of"),
    ],
)
def test_what_is_no_index_is_refused(tmp_path, damage, said):
    _, index = write(tmp_path, 512, [[1, 2], [3]])
    (tmp_path / "x.idx").write_bytes(damage(index))
    with pytest.raises(ValueError, match=said):
        Index.open(tmp_path / "x.idx")
