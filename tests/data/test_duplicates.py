"""Which documents are the first of their kind."""

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaboa.data.duplicates import first_ones


def hashes(values):
    digests = b"".join(hashlib.blake2b(str(value).encode(), digest_size=16).digest() for value in values)
    return np.frombuffer(digests, "V16")


def pieces(values, size):
    return lambda: iter([hashes(values[begin : begin + size]) for begin in range(0, len(values), size)])


@given(st.lists(st.integers(0, 20), max_size=80), st.integers(1, 30), st.integers(1, 100))
def test_the_first_of_equal_ones_is_kept_however_the_work_is_divided(values, size, at_once):
    kept = first_ones(pieces(values, size), at_once)
    assert kept.tolist() == [value not in values[:number] for number, value in enumerate(values)]


@pytest.mark.parametrize("half", [0, 8])
def test_half_a_hash_is_not_enough_to_be_equal(half):
    one, other = bytearray(16), bytearray(16)
    other[half] = 1
    found = first_ones(lambda: iter([np.frombuffer(bytes(one + other + one), "V16")]))
    assert found.tolist() == [True, True, False]
