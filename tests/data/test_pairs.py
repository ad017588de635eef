"""Existing tokens by name: prefixes, patterns, weights, and files of these, as Megatron's options take them."""

import json

import numpy as np
import pytest
from indexed_files import write_indexed

from megaboa.data import pairs, sources
from megaboa.errors import InputError


@pytest.fixture
def ab(tmp_path):
    for name in ("a", "b"):
        write_indexed(tmp_path / name, [[1, 2], [3]])
    return tmp_path


def named(value, split="train"):
    return [(pair.prefix.rpartition("/")[2], pair.weight) for pair in pairs.pairs_of(value, split)]


def test_a_prefix_with_or_without_an_ending(ab):
    for ending in ("", ".bin", ".idx"):
        assert named(f"{ab}/a{ending}") == [("a", None)]


def test_several_prefixes_and_a_pattern(ab):
    assert named([f"{ab}/b", f"{ab}/a"]) == [("b", None), ("a", None)]
    for ending in ("", ".bin", ".idx"):
        assert named(f"{ab}/*{ending}") == [("a", None), ("b", None)]


def test_weights_as_megatron_writes_them_are_those_that_megatron_reads(ab):
    from megatron.core.datasets.utils import get_blend_from_list

    words = f"0.3 {ab}/a 7e-1 {ab}/b"
    assert named(words) == named([0.3, f"{ab}/a", 0.7, f"{ab}/b"]) == [("a", 0.3), ("b", 0.7)]
    prefixes, weights = get_blend_from_list(words.split())
    assert [(pair.prefix, pair.weight) for pair in pairs.pairs_of(words)] == list(zip(prefixes, weights, strict=True))


def test_a_prefix_may_have_spaces(tmp_path):
    write_indexed(tmp_path / "my text", [[1]])
    assert named(f"{tmp_path}/my text") == [("my text", None)]


def test_a_file_of_weights_and_prefixes(ab):
    file = ab / "blend.txt"
    file.write_text(f"30 {ab}/a\n70 {ab}/b\n")
    assert named(str(file)) == [("a", 30), ("b", 70)]


def test_a_file_with_a_list_for_each_split(ab):
    file = ab / "splits.json"
    file.write_text(json.dumps({"train": ["1", f"{ab}/a"], "valid": f"{ab}/b", "test": None}))
    assert named(str(file)) == [("a", 1.0)]
    assert named(str(file), "valid") == [("b", None)]
    with pytest.raises(InputError, match=r"splits\.json names nothing for 'test'"):
        pairs.pairs_of(str(file), "test")
    with pytest.raises(InputError, match=r"has no list for 'dev': set `split` to one of train, valid, test"):
        pairs.pairs_of(str(file), "dev")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("{0}/c", "there is neither {0}/c.bin nor {0}/c.idx: name a prefix"),
        ("{0}/half", "there is no {0}/half.idx, and Megatron reads .bin and .idx together: copy both"),
        ("{0}/c*", "no file matches {0}/c*.idx: check the pattern"),
        (["{0}/a", "{0}/a"], "names {0}/a twice: name it once, with the sum of its weights"),
        (["0.3", "{0}/a", "{0}/b"], "must be prefixes alone, or weights and prefixes in turn, as in `0.3 a 0.7 b`"),
        ("0 {0}/a 1 {0}/b", "the weight of {0}/a is 0, and must be above 0"),
        ("0.5 {0}/*", "2 files match {0}/*.idx, and one weight is given: name each with its own"),
        ("{0}/broken.json", "{0}/broken.json isn't valid JSON"),
    ],
)
def test_what_is_wrong_is_one_sentence(ab, given, said):
    (ab / "half.bin").write_bytes(b"12")
    (ab / "broken.json").write_text("{")
    value = given.format(ab) if isinstance(given, str) else [word.format(ab) for word in given]
    with pytest.raises(InputError) as error:
        pairs.pairs_of(value)
    assert str(error.value).startswith(said.format(ab)) and "\n" not in str(error.value)


def test_a_pair_under_source_is_told_where_it_belongs(ab):
    for source in (f"{ab}/a", f"{ab}/a.bin"):
        with pytest.raises(InputError, match=rf"tokens in Megatron's format are named by `megatron: {ab}/a`"):
            sources.files_of(source, None)


def test_files_are_listed_bin_and_idx_in_turn(ab):
    found = pairs.files(pairs.pairs_of([f"{ab}/a", f"{ab}/b"]))
    assert [(file.path.rpartition("/")[2], file.kind) for file in found] == [
        ("a.bin", "bin"),
        ("a.idx", "idx"),
        ("b.bin", "bin"),
        ("b.idx", "idx"),
    ]
    assert found[0].size == 3 * np.dtype(np.uint16).itemsize
