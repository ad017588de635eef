"""What text a source gives, in which order, and what a user hears of a source that can't be read."""

import gzip
import itertools
import json

import pytest

from megaboa.data.errors import InputError
from megaboa.data.sources import STDLIB, documents, files, fingerprint


def jsonl(path, *records, compress=False):
    text = "".join((record if isinstance(record, str) else json.dumps(record)) + "\n" for record in records)
    path.write_bytes(gzip.compress(text.encode()) if compress else text.encode())
    return str(path)


def test_a_json_lines_file_gives_a_document_per_line(tmp_path):
    source = jsonl(tmp_path / "a.jsonl", {"text": "one"}, "", {"text": "zwei\nZeilen", "id": 7}, {"text": "  \n"})
    assert list(documents(source)) == ["one", "zwei\nZeilen"]


def test_a_compressed_file_gives_the_same(tmp_path):
    plain = jsonl(tmp_path / "a.jsonl", {"body": "ä"}, {"body": "b"})
    packed = jsonl(tmp_path / "a.jsonl.gz", {"body": "ä"}, {"body": "b"}, compress=True)
    assert list(documents(plain, "body")) == list(documents(packed, "body")) == ["ä", "b"]


def test_a_text_file_is_one_document_and_a_glob_goes_by_sorted_path(tmp_path):
    for name in ("c", "a", "b"):
        (tmp_path / f"{name}.txt").write_text(f"{name}1\n{name}2\n")
    assert list(documents(str(tmp_path / "*.txt"))) == ["a1\na2\n", "b1\nb2\n", "c1\nc2\n"]
    assert list(documents(str(tmp_path / "b.txt"))) == ["b1\nb2\n"]


def test_a_glob_may_descend_and_mix_kinds(tmp_path):
    (tmp_path / "x" / "y").mkdir(parents=True)
    jsonl(tmp_path / "x" / "a.jsonl", {"text": "first"})
    (tmp_path / "x" / "y" / "b.txt").write_text("second")
    assert list(documents(str(tmp_path / "**" / "*.*"))) == ["first", "second"]


def test_a_file_whose_name_looks_like_a_pattern_is_found(tmp_path):
    source = jsonl(tmp_path / "part[1].jsonl", {"text": "here"})
    assert list(documents(source)) == ["here"]


def test_the_limit_counts_documents_with_text_and_reads_no_further(tmp_path):
    source = jsonl(tmp_path / "a.jsonl", {"text": ""}, {"text": "1"}, {"text": "2"}, "this is not JSON")
    assert list(documents(source, limit=2)) == ["1", "2"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"text": "cut off', ["a.jsonl:2", "not a line of JSON"]),
        ('["text"]', ["a.jsonl:2", "list", "'text'"]),
        ('{"content": "x", "id": 1}', ["a.jsonl:2", "no key 'text'", "text_key", "['content', 'id']"]),
        ('{"text": 5}', ["a.jsonl:2", "'text' holds int, not a string"]),
        ('{"text": null}', ["a.jsonl:2", "NoneType"]),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, said):
    source = jsonl(tmp_path / "a.jsonl", {"text": "good"}, line)
    with pytest.raises(InputError) as error:
        list(documents(source))
    assert all(part in str(error.value) for part in said), error.value


def test_a_json_line_that_is_not_utf8_is_named(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "gr\xfcn"}\n')
    with pytest.raises(InputError, match=r"a\.jsonl:1: not a line of JSON"):
        list(documents(str(tmp_path / "a.jsonl")))


def test_a_text_file_that_is_not_utf8_is_named(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"gr\xfcn")
    with pytest.raises(InputError, match=r"a\.txt: not UTF-8 text \(byte 2\)"):
        list(documents(str(tmp_path / "a.txt")))


def test_a_missing_file_an_unknown_kind_and_an_empty_source_are_refused(tmp_path):
    with pytest.raises(InputError, match="no such file"):
        list(documents(str(tmp_path / "*.jsonl")))
    (tmp_path / "a.csv").write_text("x")
    with pytest.raises(InputError, match=r"a\.csv: unknown kind of file; known are \.jsonl"):
        list(documents(str(tmp_path / "a.csv")))
    source = jsonl(tmp_path / "a.jsonl", {"text": " "})
    with pytest.raises(InputError, match="there is no text in it"):
        list(documents(source))


def test_the_standard_library_is_itself_and_nothing_else():
    paths = files(STDLIB)
    names = {path.name for path in paths}
    assert {"argparse.py", "dataclasses.py", "typing.py"} <= names
    assert not [path for path in paths if {"site-packages", "test", "tests", "__pycache__"} & set(path.parts)]
    assert paths == files(STDLIB)
    texts = list(documents(STDLIB, limit=50))
    assert len(texts) == 50
    assert texts == list(itertools.islice(documents(STDLIB), 50))


def test_the_fingerprint_follows_the_content_and_not_the_place(tmp_path):
    for folder in ("one", "other"):
        (tmp_path / folder).mkdir()
        jsonl(tmp_path / folder / "a.jsonl", {"text": "x"})
    one, other = (fingerprint(str(tmp_path / folder / "*.jsonl")) for folder in ("one", "other"))
    assert one == other
    jsonl(tmp_path / "other" / "a.jsonl", {"text": "y"})
    assert fingerprint(str(tmp_path / "other" / "*.jsonl")) != one
