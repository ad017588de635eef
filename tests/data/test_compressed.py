"""Files that may be compressed, whole and cut short."""

import os
import tracemalloc

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from making import packed

from megaboa.data.compressed import unpacked
from megaboa.errors import InputError

CONTENT = os.urandom(50_000) + b"lines\n" * 300_000


@pytest.mark.parametrize("end", ["gz", "zst"])
def test_the_content_comes_back_and_the_place_in_the_file_is_known(tmp_path, end):
    path = packed(tmp_path / f"a.{end}", CONTENT)
    with unpacked(str(path), end) as (stream, done):
        first = stream.read(10)
        assert 0 < done() <= path.stat().st_size
        assert first + stream.read() == CONTENT
        assert done() == path.stat().st_size


@pytest.mark.parametrize("end", ["gz", "zst"])
def test_nothing_packed_is_nothing(tmp_path, end):
    with unpacked(str(packed(tmp_path / f"a.{end}", b"")), end) as (stream, _):
        assert stream.read() == b""


@pytest.mark.parametrize("end", ["gz", "zst"])
@given(data=st.data())
def test_wherever_it_is_cut_it_is_never_taken_for_complete(tmp_path_factory, end, data):
    path = packed(tmp_path_factory.mktemp("cut") / f"a.{end}", b"some text\n" * 50)
    whole = path.read_bytes()
    path.write_bytes(whole[: data.draw(st.integers(1, len(whole) - 1))])
    with pytest.raises(InputError, match="truncated"), unpacked(str(path), end) as (stream, _):
        stream.read()


@pytest.mark.parametrize("end", ["gz", "zst"])
def test_little_of_a_file_is_inflated_at_a_time(tmp_path, end):
    """20 kB may stand for 512 MiB."""
    path = tmp_path / f"a.{end}"
    if end == "zst":
        with zstandard.open(path, "wb") as stream:
            for _ in range(512):
                stream.write(bytes(1 << 20))
    else:
        packed(path, bytes(256 << 20))
    tracemalloc.start()
    try:
        with unpacked(str(path), end) as (stream, _):
            assert stream.read(10) == bytes(10)
        assert tracemalloc.get_traced_memory()[1] < 70 << 20
    finally:
        tracemalloc.stop()
