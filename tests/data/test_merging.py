"""Shards to the files of a corpus: the number of shards changes nothing, and what is said of it is so."""

import hashlib
import itertools
import os
import resource
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from making import build, documents, jsonl, make, sentences, specification

from megaboa.data.merging import first_ones
from megaboa.errors import InputError

MANY = sentences(400)


def without(facts, *names):
    return {key: value for key, value in vars(facts).items() if key not in names}


@pytest.mark.parametrize("deduplicate", [False, True])
def test_the_number_of_shards_changes_nothing(encoder, tmp_path, deduplicate):
    paths = [jsonl(tmp_path / f"{n}.jsonl", [*MANY[n::3], "again", "", "again"]) for n in range(3)]
    whole, files = build(tmp_path / "whole", paths, encoder, deduplicate=deduplicate)
    for shards in (2, 3, 4, 5, 6, 7):
        facts, cut = build(tmp_path / "cut", paths, encoder, shards, deduplicate=deduplicate)
        assert cut == files
        assert without(facts, "compared") == without(whole, "compared")


def test_more_shards_than_records_and_than_bytes_change_nothing(encoder, tmp_path):
    path = jsonl(tmp_path / "a.jsonl", ["one", "two"])
    _, files = build(tmp_path, [path], encoder)
    for shards in (9, 60):
        assert build(tmp_path, [path], encoder, shards)[1] == files


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("deduplicate", [False, True])
def test_what_is_said_of_a_corpus_is_what_plain_python_counts(encoder, tmp_path, shards, deduplicate):
    texts = [[*MANY[:50], "", "short", MANY[3]], [" "], MANY[40:90]]
    paths = [jsonl(tmp_path / f"{n}.jsonl", records) for n, records in enumerate(texts)]
    facts, files = build(tmp_path, paths, encoder, shards, deduplicate=deduplicate, min_characters=8)
    (dataset,) = facts.datasets
    long = [(n, text) for n, records in enumerate(texts) for text in records if len(text) >= 8]
    kept = [(n, t) for i, (n, t) in enumerate(long) if not deduplicate or t not in [o for _, o in long[:i]]]
    ids = [encoder.expected(text) for _, text in kept]
    tokens = Counter(itertools.chain(*ids))
    assert facts.documents == dataset.documents == len(kept)
    assert facts.tokens == dataset.tokens == tokens.total()
    assert dataset.largest_token == max(tokens)
    repeated = {"duplicate": len(long) - len(kept)} if deduplicate else {}
    assert dataset.dropped == {"blank": 2, "short": 1, **repeated}
    assert sum(dataset.lengths) == len(kept)
    assert {2**n: count for n, count in enumerate(dataset.lengths) if count} == Counter(
        1 << (len(document).bit_length() - 1) for document in ids
    )
    assert dataset.frequent == tuple(sorted(tokens.items(), key=lambda p: (-p[1], p[0]))[:20])
    assert dict(dataset.by_file) == Counter(n for n, _ in kept)
    before = [encoder.expected(text) for _, text in long]
    ratio = sum(len(text.encode()) for _, text in long) / sum(map(len, before))
    assert dataset.bytes_per_token == round(ratio, 4)
    assert dataset.sizes == {name: len(content) for name, content in files.items()}
    assert dataset.sha256 == {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}


def test_several_keys_give_a_dataset_each(encoder, bpe, tmp_path):
    records = [{"q": f"question {n}", "meta": {"answer": f"answer {n}" if n % 3 else ""}} for n in range(40)]
    source = jsonl(tmp_path / "a.jsonl", records)
    spec = specification(tmp_path, source, bpe, text_key=["q", "meta.answer"])
    manifest = make(spec, 3)
    questions, answers = manifest.datasets
    assert [dataset.prefix.rsplit("/", 1)[-1] for dataset in manifest.datasets] == ["c_q", "c_meta_answer"]
    assert [dataset.key for dataset in manifest.datasets] == ["q", "meta.answer"]
    assert documents(questions) == [encoder.expected(record["q"]) for record in records]
    assert documents(answers) == [encoder.expected(f"answer {n}") for n in range(40) if n % 3]
    assert answers.dropped == {"blank": 14} and questions.dropped == {}
    assert manifest.documents == 40 + 26


def test_a_key_without_any_text_gives_an_empty_dataset(encoder, tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [{"a": "text", "b": ""}])
    for deduplicate in (False, True):
        facts, files = build(tmp_path / str(deduplicate), [path], encoder, text_key=["a", "b"], deduplicate=deduplicate)
        assert [dataset.documents for dataset in facts.datasets] == [1, 0]
        assert files["c_b.bin"] == b"" and len(files["c_b.idx"]) == 34 + 8


def test_the_first_of_equal_documents_is_kept(encoder, tmp_path):
    path = jsonl(tmp_path / "a.jsonl", ["b", "a", "b", "c", "a"])
    facts, files = build(tmp_path, [path], encoder, deduplicate=True)
    assert files["c.bin"] == np.array([t for text in "bac" for t in encoder.expected(text)], "<u2").tobytes()
    assert facts.datasets[0].dropped == {"duplicate": 2}


@pytest.mark.parametrize("records", [[], ["", "  "], [b"", b"\r"]])
@pytest.mark.parametrize("shards", [1, 3])
def test_a_source_without_text_is_refused(encoder, tmp_path, records, shards):
    path = jsonl(tmp_path / "a.jsonl", records)
    with pytest.raises(InputError, match=r"corpora\.c\.source: there is no text in it"):
        build(tmp_path, [path], encoder, shards, deduplicate=shards == 3)


def test_empty_files_give_nothing_and_disturb_nobody(encoder, bpe, tmp_path):
    for name, texts in {"a": [], "b": ["one"], "c": [], "d": ["two"]}.items():
        jsonl(tmp_path / f"{name}.jsonl", texts)
    manifest = make(specification(tmp_path, tmp_path / "*.jsonl", bpe), 3)
    assert [source.documents for source in manifest.sources] == [0, 1, 0, 1]


def test_more_shards_than_files_can_be_open_are_merged(encoder, tmp_path):
    path = jsonl(tmp_path / "a.jsonl", MANY)
    _, files = build(tmp_path / "one", [path], encoder)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 (the folder's own handle counts too)
    resource.setrlimit(resource.RLIMIT_NOFILE, (opened + 20, hard))
    try:
        assert build(tmp_path / "many", [path], encoder, 60)[1] == files
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


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
