"""megaboa.blends: which documents a split and a validation set have."""

from __future__ import annotations

import made
import pytest

from megaboa.blends import bounds_of, documents_of_set, files_held_out, told_apart
from megaboa.records import Corpus, TextRead


def corpus(*documents: int) -> Corpus:
    files = (("a-en", documents[0]), *((f"b-{number}", count) for number, count in enumerate(documents[1:])))
    sources = tuple(TextRead(path=f"x/{n}.jsonl", kind="jsonl", size=1, sha256="0", documents=d) for n, d in files)
    return made.corpus(made.dataset(documents=sum(documents)), sources=sources)


def test_a_split_takes_documents_in_order() -> None:
    assert bounds_of("90,10,0", 700) == [(0, 630), (630, 700), (700, 700)]
    assert bounds_of("8,1,1", 5) == [(0, 4), (4, 4), (4, 5)]


@pytest.mark.parametrize(
    ("documents", "split", "said"),
    [
        ((400, 300), "90,10,0", "documents 630 to 699 of 700, which are of 1 of its 2 files (b-0.jsonl)"),
        ((400, 300, 50), "90,5,5", "documents 675 to 711 of 750, which are of 2 of its 3 files (b-0.jsonl, b-1.jsonl)"),
        ((10, 20), "0.1,99,0", None),  # all files have a share
        ((400,), "90,10,0", None),
        ((400, 300), "90,0,10", None),
        ((1,) * 60, "90,10,0", None),  # a file is a document
    ],
)
def test_a_share_of_some_files_alone_is_said(documents: tuple[int, ...], split: str, said: str | None) -> None:
    found = files_held_out({"multi": corpus(*documents)}, {"blend": {"multi": 1.0}, "split": split})
    assert [said in text for text in found] == [True] * (said is not None)
    assert not files_held_out({"multi": corpus(*documents)}, {"blend_per_split": {"train": {"multi": 1.0}}})


@pytest.mark.parametrize(
    ("paths", "is_said"),
    [
        ([f"x/part-{number:05}-of-00100.jsonl" for number in range(100)], False),
        (["x/1.jsonl", "x/2.jsonl"], False),
        ([f"x/{language}/{number}.jsonl" for language in ("en", "eo") for number in range(50)], True),
        (["x/en.jsonl", "x/eo.jsonl"], True),
        ([f"x/{chr(97 + number) * 8}.jsonl" for number in range(20)], False),  # such as random names
    ],
)
def test_nothing_is_said_of_equal_shards(paths: list[str], is_said: bool) -> None:
    sources = tuple(TextRead(path=path, kind="jsonl", size=1, sha256="0", documents=50) for path in paths)
    found = made.corpus(made.dataset(documents=50 * len(paths)), sources=sources)
    assert bool(files_held_out({"multi": found}, {"blend": {"multi": 1.0}, "split": "98,1,1"})) == is_said


@pytest.mark.parametrize(
    ("data", "held_out", "documents"),
    [
        ({"blend": {"a": 1.0, "b": 2.0}, "split": "98,1,1"}, {}, "a held out by 98,1,1"),
        ({"blend": {"a": 1.0}}, {}, "a held out by its recipe's split"),
        ({"blend": {"b": 1.0}, "split": "98,1,1"}, {}, "all of a"),
        ({"blend": {"b": 1.0}, "split": "98,1,1"}, {"a": "90,10,0"}, "a held out by 90,10,0"),
        ({"blend_per_split": {"train": {"b": 1.0}}}, {"a": "90,10,0"}, "a held out by 90,10,0"),
    ],
)
def test_what_a_validation_set_consists_of(data: dict, held_out: dict[str, str], documents: str) -> None:
    assert documents_of_set(data, {"a": 3.0}, held_out) == documents


def test_blends_in_other_units_are_the_same_documents() -> None:
    one, other = ({"a": 1.0, "b": 3.0}, {"a": 2.0, "b": 6.0})
    assert documents_of_set({}, one, {}) == documents_of_set({}, other, {}) == "all of a:0.25,b:0.75"


def test_only_sets_of_different_documents_have_other_names() -> None:
    sets = {
        "one": {"a": ("all of a",), "b": ("all of b",)},
        "two": {"a": ("a held out by 98,1,1", "all of a"), "b": ("all of b",)},
    }
    assert told_apart(sets) == {
        "one": {"a": "a (all of a)"},
        "two": {"a": "a (a held out by 98,1,1, and before all of a)"},
    }
