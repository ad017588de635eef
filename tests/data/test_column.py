"""What is counted of the documents of a text key."""

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megaboa.data.column import length_histogram


@given(st.lists(st.integers(1, 2**31 - 1), max_size=20))
def test_lengths_are_counted_by_powers_of_two(lengths):
    found = length_histogram(np.array(lengths, "<i4"))
    assert {n: count for n, count in enumerate(found.tolist()) if count} == Counter(n.bit_length() - 1 for n in lengths)
