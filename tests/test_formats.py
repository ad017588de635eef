"""megaboa.formats: counts and sizes as people read them."""

import pytest

from megaboa import formats


@pytest.mark.parametrize(
    ("number", "text"),
    [
        *((None, "-"), (0.25, "0.25"), (7.3, "7.3"), (950, "950"), (999.6, "1k"), (12_345, "12.3k"), (999_600, "1M")),
        *((12, "12"), (1500, "1.5k"), (774e6, "774M"), (999.4e6, "999M"), (999.9e6, "1B")),
        *((4.56e6, "4.56M"), (2e9, "2B"), (7.5e13, "75T"), (9.999e14, "1e+15"), (2.1e21, "2.1e+21")),
    ],
)
def test_counts(number, text):
    assert formats.count(number) == text


def test_one_is_singular():
    assert [formats.counted(number, "run") for number in (0, 1, 12_000)] == ["0 runs", "1 run", "12,000 runs"]


@pytest.mark.parametrize(
    ("number", "text"),
    [
        *((0, "0 B"), (950, "950 B"), (5e3, "5 kB"), (999_600, "1 MB"), (12.3e6, "12.3 MB")),
        *((2.5e9, "2.5 GB"), (3e12, "3 TB"), (4.56e12, "4.56 TB"), (2e18, "2e+03 PB")),
    ],
)
def test_sizes(number, text):
    assert formats.size(number) == text


def test_columns_of_a_table_are_aligned():
    rows = [("run", "steps", "why"), ("a", "10,000"), ("longer", "1", "no")]
    assert formats.aligned(rows) == ["run     steps   why", "a       10,000", "longer  1       no"]
    assert formats.aligned(rows, right={"steps"})[1:] == ["a       10,000", "longer       1  no"]


def test_some_names_of_many():
    names = ["a", "b", "c", "d"]
    assert formats.some_of(names) == "a, b, c and 1 more" and formats.some_of(names[:3]) == "a, b, c"
    assert formats.some_of(names, 2, "; ") == "a; b and 2 more" and formats.some_of([]) == ""
