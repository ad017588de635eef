import pytest

from megaboa.files import write_json
from megaboa.results import RunFolder
from megaboa.run.inputs import UnusableInputError, check_documents, check_nodes, empty_splits


def test_several_nodes_are_refused_before_anything_starts(tmp_path):
    write_json(tmp_path / "launch.json", {"nodes": 2})
    with pytest.raises(UnusableInputError, match=r"resources\.nodes is 2, but here is 1 \(laptop\).*--nodes=2"):
        check_nodes(RunFolder(tmp_path), ["laptop"])


def test_as_many_nodes_as_asked_for_or_more_will_do(tmp_path):
    write_json(tmp_path / "launch.json", {"nodes": 2})
    check_nodes(RunFolder(tmp_path), ["n1", "n2"])
    check_nodes(RunFolder(tmp_path), ["n1", "n2", "n3"])


@pytest.mark.parametrize(
    ("split", "documents", "empty"),
    [
        ("98,1,1", 200, []),
        ("98,1,1", 20, ["validation", "test"]),
        ("98,1,1", 60, ["validation"]),  # from 58.8 to 59.4: both are rounded to 59
        ("100,0,0", 1, []),
        ("1,1,0", 1, ["training"]),
        ("0.9,0.05,0.05", 20, []),
    ],
)
def test_empty_splits(split, documents, empty):
    assert empty_splits(split, documents) == empty


def test_the_message_names_corpus_split_and_remedy(tmp_path):
    folder = tmp_path / "results" / "e" / "runs" / "r"
    write_json(folder / "run.json", {"data": {"blend": {"text": 1.0}, "split": "98,1,1"}})
    write_json(tmp_path / "results" / "e" / "data" / "text.json", {"documents": 20})
    said = r"corpus 'text' has 20 documents.*data\.split.*validation.*larger share"
    with pytest.raises(UnusableInputError, match=said):
        check_documents(RunFolder(folder))
