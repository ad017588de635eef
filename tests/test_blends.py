"""megaboa.blends: which documents a split has."""

from __future__ import annotations

import made
import pytest

from megaboa.blends import bounds_of, files_held_out
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
