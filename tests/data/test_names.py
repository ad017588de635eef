"""Names of the files of a corpus."""

import pytest

from megaboa.data.names import file_stem, file_stems


@pytest.mark.parametrize(("key", "stem"), [("a", "c_a"), ("a.b", "c_a_b"), ("ä-x", "c__x")])
def test_the_names_of_the_files_of_several_keys(key, stem):
    assert file_stem("c", [key, "other"], key) == stem
    assert file_stem("c", [key], key) == "c"


def test_one_key_leaves_the_name_of_the_corpus_as_it_is():
    assert file_stems("c", "a.b") == file_stems("c", ["a.b"]) == ["c"]
    assert file_stems("c", ["a.b", "x"]) == ["c_a_b", "c_x"]
