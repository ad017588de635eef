"""Which files a source is, in which order, and what a user hears of a source that can't be read."""

import datasets
import pytest
from making import jsonl

from megaboa.data import hub, sources, stream
from megaboa.data.documents import Format
from megaboa.data.pairs import require_unchanged
from megaboa.data.readers import Records, documents, whole
from megaboa.data.sources import (
    STDLIB,
    file_of,
    file_stem,
    file_stems,
    files,
    fingerprint,
    listing,
    paths,
)
from megaboa.errors import InputError
from megaboa.records import TextSpec

OPTIONS = {"name": "c", "text_key": "text", "separator": None, "limit": None, "max_document_mb": 128}
OPTIONS |= {"split": "train", "subset": None, "revision": None, "on_bad_record": "error"}


def found(source, **changes):
    return files(TextSpec(**{**OPTIONS, "source": source, **changes}))


def texts(source, **changes):
    return list(documents(found(source, **changes), Format()))


def names(source, **changes):
    return [file.path.rsplit("/", 1)[-1] for file in found(source, **changes)]


def dataset(*values):
    return datasets.Dataset.from_dict({"text": list(values)})


def test_a_glob_goes_by_sorted_path_and_a_list_by_its_own_order(tmp_path):
    for name in ("c", "a", "b"):
        (tmp_path / f"{name}.txt").write_text(name)
    every = str(tmp_path / "*.txt")
    assert names(every) == ["a.txt", "b.txt", "c.txt"]
    assert names([str(tmp_path / "b.txt"), every]) == ["b.txt", "a.txt", "b.txt", "c.txt"]


def test_a_glob_may_descend_and_mix_kinds(tmp_path):
    (tmp_path / "x" / "y").mkdir(parents=True)
    jsonl(tmp_path / "x" / "a.jsonl.zst", ["first"])
    (tmp_path / "x" / "y" / "b.txt").write_text("second")
    dataset("third").to_parquet(tmp_path / "x" / "y" / "c.parquet")
    dataset("fourth").save_to_disk(tmp_path / "z")
    assert texts(str(tmp_path / "**")) == ["first", "second", "third", "fourth"]


def test_a_file_whose_name_looks_like_a_pattern_is_found(tmp_path):
    assert texts(str(jsonl(tmp_path / "part[1].jsonl", ["here"]))) == ["here"]


def test_the_kind_goes_by_the_name(tmp_path):
    kinds = {
        **{f"a.{end}": ("jsonl", None) for end in ("jsonl", "json", "ndjson")},
        **{"a.txt": ("text", None), "a.parquet": ("parquet", None), "a.arrow": ("arrow", None)},
        **{"a.b.jsonl.gz": ("jsonl", "gz"), "a.txt.zst": ("text", "zst")},
    }
    for name, kind in kinds.items():
        assert sources.kind_of(tmp_path / name) == kind
    for name in ("a.csv", "a", "a.gz", "a.parquet.gz", "a.arrow.zst"):
        with pytest.raises(InputError, match=r"unknown kind of file; known are \.jsonl"):
            sources.kind_of(tmp_path / name)


def test_a_saved_dataset_its_splits_and_a_glob_of_them(tmp_path):
    dataset("1", "2").save_to_disk(tmp_path / "plain-1", num_shards=2)
    dataset("3").save_to_disk(tmp_path / "plain-2")
    datasets.DatasetDict({"train": dataset("a"), "test": dataset("b")}).save_to_disk(tmp_path / "splits")
    assert texts(str(tmp_path / "plain-1")) == ["1", "2"]
    assert texts(str(tmp_path / "plain-*")) == ["1", "2", "3"]
    assert texts(str(tmp_path / "splits")) == ["a"]
    assert texts(str(tmp_path / "splits"), split="test") == ["b"]
    assert len(paths(str(tmp_path / "splits"))) == 2, "the plan watches all splits"
    with pytest.raises(InputError, match=r"has no split 'dev'; set `split` to one of \['train', 'test'\]"):
        found(str(tmp_path / "splits"), split="dev")


def test_a_saved_dataset_with_picked_rows_says_how_to_mend_it(tmp_path):
    dataset("1", "2", "3").save_to_disk(tmp_path / "d")
    state = tmp_path / "d" / "state.json"
    state.write_text(
        state.read_text().replace('"_format_type"', '"_indices_files": [{"filename": "i"}], "_format_type"')
    )
    with pytest.raises(InputError, match=r"call flatten_indices\(\)"):
        found(str(tmp_path / "d"))


def test_what_is_not_there_or_unknown_is_refused_in_a_sentence(tmp_path):
    with pytest.raises(InputError, match=r"no such file; give a file, a glob, a folder"):
        found(str(tmp_path / "*.jsonl"))
    with pytest.raises(InputError, match=r"a folder without state\.json; give a glob of the files in it"):
        found(str(tmp_path))


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.txt.zst", "a.parquet", "a.arrow"])
def test_an_empty_file_that_is_none_of_its_kind_is_refused(tmp_path, name):
    (tmp_path / name).touch()
    with pytest.raises(InputError, match=rf"{name}: empty, .* copy it again"):
        found(str(tmp_path / name))


def test_the_standard_library_is_itself_and_nothing_else():
    listed = found(STDLIB)
    names = {file.path.rsplit("/", 1)[-1] for file in listed}
    assert {"argparse.py", "dataclasses.py", "typing.py"} <= names
    assert not [f for f in listed if {"site-packages", "test", "tests", "__pycache__"} & set(f.path.split("/"))]
    assert listed == found(STDLIB) and paths(STDLIB) == []


def test_the_fingerprint_follows_the_content_and_not_the_place(tmp_path):
    for folder in ("one", "other"):
        (tmp_path / folder).mkdir()
        jsonl(tmp_path / folder / "a.jsonl", ["x"])

    def prints():
        return [fingerprint(listing(found(str(tmp_path / f / "*.jsonl")), tmp_path / "sums")) for f in ("one", "other")]

    assert prints()[0] == prints()[1]
    jsonl(tmp_path / "other" / "a.jsonl", ["y"])
    assert prints()[0] != prints()[1]


def test_the_checksum_of_a_large_file_is_remembered_until_it_changes(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "REMEMBERED_BYTES", 1)
    path = jsonl(tmp_path / "a.jsonl", ["x"])
    first = listing(found(str(path)), tmp_path / "sums", threads=2)
    with monkeypatch.context() as patch:
        patch.setattr(sources, "file_digest", None)
        assert listing(found(str(path)), tmp_path / "sums") == first
    jsonl(path, ["other"])
    assert listing(found(str(path)), tmp_path / "sums")[0].sha256 != first[0].sha256
    (remembered,) = (tmp_path / "sums").iterdir()
    remembered.write_text("torn")
    assert listing(found(str(path)), tmp_path / "sums")[0].sha256 != first[0].sha256


def test_a_file_that_changed_or_went_after_it_was_listed_is_noticed(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", ["x"])
    file = file_of(path, "jsonl")
    require_unchanged(file)
    jsonl(path, ["longer"])
    with pytest.raises(InputError, match="has changed since the corpus's files were listed: start again"):
        require_unchanged(file)
    path.unlink()
    with pytest.raises(InputError, match="it was there when the corpus's files were listed"):
        require_unchanged(file)


@pytest.fixture
def dataset_folder(tmp_path, monkeypatch):
    """A folder that the hub's client reads as a dataset with three files."""
    for number in range(3):
        dataset(*(f"{number}.{row}" for row in range(4))).to_parquet(tmp_path / "hub" / f"train-{number}.parquet")
    monkeypatch.setattr(stream, "_commit", lambda name, revision: "0123456789abcdef")
    monkeypatch.setattr(hub, "is_id", lambda name: True)
    return tmp_path / "hub"


def test_a_dataset_of_the_hub_streams_file_by_file(dataset_folder):
    listed = found(f"hf:{dataset_folder}")
    assert [file.kind for file in listed] == ["stream"] * 3 and len({file.sha256 for file in listed}) == 3
    assert listed[0].path == f"hf:{dataset_folder}@0123456789ab /train 1 of 3"
    assert texts(f"hf:{dataset_folder}") == [f"{number}.{row}" for number in range(3) for row in range(4)]
    records = list(Records(listed[1], whole(1, listed[1]), Format()))
    assert records == [(row, [f"1.{row}"]) for row in range(4)]
    assert paths(f"hf:{dataset_folder}") == []
    require_unchanged(listed[0])


def test_an_unknown_split_of_a_dataset_of_the_hub_is_named(dataset_folder):
    with pytest.raises(InputError, match=r"corpus source hf:.*: Bad split: dev"):
        found(f"hf:{dataset_folder}", split="dev")


def test_without_a_network_a_dataset_of_the_hub_is_one_clear_sentence(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(InputError) as error:
        found("hf:owner/name", revision="v1")
    said = str(error.value)
    assert said.startswith("corpus source hf:owner/name at revision 'v1': the hub can't be reached from here (")
    assert said.endswith("save it with `load_dataset(...).save_to_disk(folder)`, and name that folder as the source")
    with pytest.raises(InputError, match=r"not a Hugging Face id \(`hf:owner/name`\)"):
        found("hf:nonsense")


@pytest.mark.parametrize(("key", "stem"), [("a", "c_a"), ("a.b", "c_a_b"), ("ä-x", "c__x")])
def test_the_names_of_the_files_of_several_keys(key, stem):
    assert file_stem("c", [key, "other"], key) == stem
    assert file_stem("c", [key], key) == "c"


def test_one_key_leaves_the_name_of_the_corpus_as_it_is():
    assert file_stems("c", "a.b") == file_stems("c", ["a.b"]) == ["c"]
    assert file_stems("c", ["a.b", "x"]) == ["c_a_b", "c_x"]
