"""The files of an indexed dataset, byte for byte as megatron-core writes them."""

import base64
import json
import struct
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megaboa.data.indexed import IndexedWriter, token_dtype

# megatron-core runs in a process of its own, for it may be imported into this one only behind the CPU backend.
BUILDER = """
import base64, json, sys, tempfile
from pathlib import Path
import torch
from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder
out = Path(tempfile.mkdtemp())
for line in sys.stdin:
    vocab_size, documents = json.loads(line)
    builder = IndexedDatasetBuilder(str(out / "x.bin"), dtype=DType.optimal_dtype(vocab_size))
    for ids in documents:
        builder.add_item(torch.tensor(ids, dtype=torch.int64))
        builder.end_document()
    builder.finalize(str(out / "x.idx"))
    files = [base64.b64encode((out / name).read_bytes()).decode() for name in ("x.bin", "x.idx")]
    print("FILES", json.dumps(files), flush=True)
"""


@pytest.fixture(scope="module")
def megatron():
    """A function that gives the two files of megatron-core's own builder."""
    process = subprocess.Popen(
        [sys.executable, "-c", BUILDER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )

    def build(vocab_size, documents):
        process.stdin.write(json.dumps([vocab_size, documents]) + "\n")
        process.stdin.flush()
        for line in process.stdout:
            if line.startswith("FILES "):
                return [base64.b64decode(part) for part in json.loads(line.removeprefix("FILES "))]
        raise AssertionError("megatron-core's builder ended")

    yield build
    process.stdin.close()
    process.wait(timeout=30)


def write(folder, vocab_size, documents):
    with IndexedWriter(folder / "x", token_dtype(vocab_size)) as writer:
        for ids in documents:
            writer.add(ids)
    assert writer.documents == len(documents)
    assert writer.tokens == sum(map(len, documents))
    return [(folder / name).read_bytes() for name in ("x.bin", "x.idx")]


@st.composite
def corpora(draw):
    vocab_size = draw(st.sampled_from([1, 512, 65499, 65500, 65536, 152064, 2**31 - 1]))
    ids = st.integers(0, vocab_size - 1)
    return vocab_size, draw(st.lists(st.lists(ids, max_size=20), max_size=12))


@pytest.mark.slow
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(corpora())
def test_every_byte_is_megatrons(megatron, tmp_path, corpus):
    assert write(tmp_path, *corpus) == megatron(*corpus)


def test_the_layout_of_the_two_files(tmp_path):
    tokens, index = write(tmp_path, 512, [[1, 2, 511], [7]])
    assert tokens == struct.pack("<4H", 1, 2, 511, 7)
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 2, 3)
    assert index == header + struct.pack("<2i", 3, 1) + struct.pack("<2q", 0, 6) + struct.pack("<3q", 0, 1, 2)


def test_offsets_pass_four_gigabytes(tmp_path):
    """Lengths are 32 bits wide, offsets are not: simulated by the length of a file that is not written."""
    with IndexedWriter(tmp_path / "x", np.dtype(np.int32)) as writer:
        writer._lengths.extend([2**30, 2**30, 5])
    index = (tmp_path / "x.idx").read_bytes()
    offsets = np.frombuffer(index, dtype="<i8", count=3, offset=34 + 3 * 4)
    assert offsets.tolist() == [0, 2**32, 2**33]


@pytest.mark.parametrize(("vocab_size", "dtype"), [(512, np.uint16), (65499, np.uint16), (65500, np.int32)])
def test_the_type_of_a_token(vocab_size, dtype):
    assert token_dtype(vocab_size) == dtype


@pytest.mark.parametrize("ids", [[65536], [-1], [1, 70000, 2]])
def test_an_id_that_does_not_fit_is_refused_and_leaves_no_index(tmp_path, ids):
    with (
        pytest.raises(ValueError, match="does not fit uint16"),
        IndexedWriter(tmp_path / "x", token_dtype(512)) as writer,
    ):
        writer.add(ids)
    assert not (tmp_path / "x.idx").exists()
