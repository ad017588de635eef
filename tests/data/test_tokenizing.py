"""From records to the files of a corpus: what is taken, and that the way there changes nothing."""

import itertools
import os
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from making import TEXTS, build, documents, jsonl, make, packed, sentences, specification

from megaboa.data import encoder as encoders
from megaboa.data import jobs, tokenizing
from megaboa.data.encoder import Encoder
from megaboa.data.shards import divide
from megaboa.data.sources import file_of
from megaboa.data.tokenizing import length_histogram
from megaboa.errors import InputError

MANY = sentences(400)


@pytest.mark.parametrize("append_eod", [True, False])
def test_a_corpus_holds_its_documents(loaded, bpe, tmp_path, append_eod):
    source = jsonl(tmp_path / "a.jsonl", TEXTS)
    manifest = make(specification(tmp_path, source, bpe, append_eod=append_eod))
    found = documents(manifest.datasets[0])
    if append_eod:
        assert all(ids.pop() == loaded.eos for ids in found)
    encoder = Encoder(loaded, False, None)
    assert [encoder.decode(ids) for ids in found] == TEXTS
    assert (manifest.documents, manifest.dtype) == (len(TEXTS), "uint16")


@pytest.mark.parametrize(("documents", "characters"), [(1, 1 << 30), (7, 1 << 30), (1 << 30, 1), (1 << 30, 100)])
def test_batches_change_nothing(encoder, tmp_path, monkeypatch, documents, characters):
    path = jsonl(tmp_path / "a.jsonl", MANY)
    whole = build(tmp_path / "whole", [path], encoder)
    monkeypatch.setattr(tokenizing, "BATCH_DOCUMENTS", documents)
    monkeypatch.setattr(tokenizing, "BATCH_CHARACTERS", characters)
    assert build(tmp_path / "batches", [path], encoder) == whole


def test_the_encoder_changes_nothing(loaded, encoder, tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [*MANY, *encoders.HARD_TEXTS])
    slow = Encoder(loaded, True, None, "tokenizers")
    assert slow.name != encoder.name
    assert build(tmp_path / "slow", [path], slow, 2)[1] == build(tmp_path / "fast", [path], encoder, 3)[1]


@pytest.mark.parametrize("kind", ["jsonl", "txt"])
@pytest.mark.parametrize("block", [3, 1000])
def test_packing_changes_nothing(encoder, tmp_path, monkeypatch, kind, block):
    for module in ("tokenizing", "readers", "shards"):
        monkeypatch.setattr(f"megaboa.data.{module}.BLOCK", block)
    plain = jsonl(tmp_path / f"a.{kind}", MANY)
    _, files = build(tmp_path / "plain", [plain], encoder, separator="\n")
    for end, shards in itertools.product(("gz", "zst"), (1, 4)):
        path = packed(tmp_path / f"a.{kind}.{end}", plain.read_bytes())
        assert build(tmp_path / end, [path], encoder, shards, separator="\n")[1] == files


RECORDS = st.lists(
    st.one_of(
        st.builds(lambda n: MANY[n], st.integers(0, 399)),
        st.text(st.characters(blacklist_categories=["Cs"]), max_size=30),
        st.sampled_from([b"", b"\r", b"  ", "", "   ", '{"text": "\\u0000 é"}'.encode()]),
    ),
    max_size=25,
)


@settings(max_examples=60)
@given(
    records=RECORDS,
    ends=st.sampled_from([b"\n", b"\r\n"]),
    closed=st.booleans(),
    shards=st.integers(1, 7),
    end=st.sampled_from(["jsonl", "jsonl.gz", "jsonl.zst"]),
    block=st.integers(1, 10),
    deduplicate=st.booleans(),
)
def test_whatever_the_records_the_way_changes_nothing(
    encoder, tmp_path_factory, records, ends, closed, shards, end, block, deduplicate
):
    folder = tmp_path_factory.mktemp("c")
    content = jsonl(folder / "a.jsonl", ["first", *records]).read_bytes().replace(b"\n", ends)
    content = content if closed else content.removesuffix(ends)
    (folder / "a.jsonl").write_bytes(content)
    _, files = build(folder / "whole", [folder / "a.jsonl"], encoder, deduplicate=deduplicate)
    texts = ["first", *(r if isinstance(r, str) else "\0 é" for r in records if isinstance(r, str) or b"u0000" in r)]
    texts = [text for text in texts if text.strip()]
    texts = list(dict.fromkeys(texts)) if deduplicate else texts
    assert files["c.bin"] == np.array([t for text in texts for t in encoder.expected(text)], "<u2").tobytes()
    with pytest.MonkeyPatch.context() as patch:
        for module in ("tokenizing", "readers", "shards"):
            patch.setattr(f"megaboa.data.{module}.BLOCK", block)
        path = packed(folder / f"b.{end}", content)
        assert build(folder / "cut", [path], encoder, shards, deduplicate=deduplicate)[1] == files


@settings(max_examples=40)
@given(
    st.lists(st.sampled_from(["a", "世", "\n", "\n\n", "\n\n\n", "-=", "ab\r\n", "-", "="]), max_size=60),
    st.sampled_from(["\n\n", "-=", "\r\n", "aba", "世"]),
    st.integers(1, 7),
    st.sampled_from(["txt", "txt.gz", "txt.zst"]),
)
def test_text_with_separators_is_divided_as_python_does_it(encoder, tmp_path_factory, pieces, separator, shards, end):
    folder, text = tmp_path_factory.mktemp("t"), "x" + "".join(pieces)
    path = packed(folder / f"a.{end}", text.encode())
    with pytest.MonkeyPatch.context() as patch:
        for module in ("tokenizing", "readers", "shards"):
            patch.setattr(f"megaboa.data.{module}.BLOCK", 2)
        _, files = build(folder, [path], encoder, shards, separator=separator)
    expected = [token for t in text.split(separator) if t.strip() for token in encoder.expected(t)]
    assert files["c.bin"] == np.array(expected, "<u2").tobytes()


def test_the_limit_counts_records_that_are_used_and_ends_the_work(encoder, tmp_path):
    path = jsonl(tmp_path / "a.jsonl", ["", "one", "two", "three", b"not JSON"])
    facts, _ = build(tmp_path, [path], encoder, limit=2)
    assert facts.documents == 2 and facts.bad.records == 0


def test_large_vocabularies_take_four_bytes(loaded, tmp_path):
    path = jsonl(tmp_path / "a.jsonl", MANY[:5])
    encoder = Encoder(replace(loaded, size=70_000), True, None)
    for deduplicate in (False, True):
        facts, files = build(tmp_path / str(deduplicate), [path], encoder, deduplicate=deduplicate)
        expected = np.array([token for text in MANY[:5] for token in encoder.expected(text)], "<i4")
        assert facts.dtype == "int32" and files["c.bin"] == expected.tobytes()


BAD = [
    (b'{"text": "cut', "not a line of JSON"),
    (b'{"body": "x"}', "no key 'text'; set the corpus's `text_key` to one of ['body']"),
    (b'{"text": 7}', "'text' holds int, not a string"),
    (b'{"text": "\xff"}', "not a line of JSON"),
    (b'{"text": "\\udc00"}', "half a character"),
    (b"\0" * 4096, "not a line of JSON"),
    (b'{"text": "' + b"x" * (1 << 20) + b'"}', "longer than max_document_mb allows (1 MiB)"),
]


@pytest.mark.parametrize(("line", "said"), BAD, ids=[said[:12] for _, said in BAD])
@pytest.mark.parametrize("shards", [1, 3])
def test_a_bad_record_ends_the_job_in_a_sentence_or_is_skipped_and_counted(encoder, tmp_path, line, said, shards):
    path = jsonl(tmp_path / "a.jsonl", ["good", line, "", "good too"])
    with pytest.raises(InputError) as error:
        build(tmp_path / "error", [path], encoder, shards, max_document_mb=1)
    remedy = "fix or remove the record, or set corpora.c.on_bad_record to `skip`"
    assert str(error.value).startswith(f"{path}:2: ") and str(error.value).endswith(remedy)
    assert said in str(error.value)
    assert "\n" not in str(error.value) and len(str(error.value)) < 500
    facts, files = build(tmp_path / "skip", [path], encoder, shards, max_document_mb=1, on_bad_record="skip")
    assert facts.bad.records == 1 and facts.datasets[0].dropped == {"blank": 1}
    (sample,) = facts.bad.samples
    assert sample.startswith(f"{path}:2: ") and said in sample
    assert files["c.bin"] == np.array([t for x in ("good", "good too") for t in encoder.expected(x)], "<u2").tobytes()


def test_of_many_bad_records_all_are_counted_and_few_are_shown(encoder, tmp_path):
    path = jsonl(tmp_path / "a.jsonl", ["good", *[b"{"] * 50])
    for shards in (1, 4):
        facts, _ = build(tmp_path, [path], encoder, shards, on_bad_record="skip")
        assert facts.bad.records == 50 and len(facts.bad.samples) == tokenizing.BAD_SAMPLES
        assert [sample.split(": ")[0] for sample in facts.bad.samples] == [f"{path}:{line}" for line in range(2, 7)]


def test_of_a_bad_record_far_behind_the_byte_is_named(encoder, tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizing, "COUNTED_LINES", 17)
    path = jsonl(tmp_path / "a.jsonl", ["good", b"{", b"{"])
    facts, _ = build(tmp_path, [path], encoder, 1, on_bad_record="skip")
    assert [sample.split(": ")[0] for sample in facts.bad.samples] == [f"{path}:2", f"{path}, byte 19"]


def test_a_source_that_changes_before_it_is_read_ends_the_job(encoder, bpe, tmp_path):
    spec = specification(tmp_path, jsonl(tmp_path / "a.jsonl", TEXTS), bpe)
    listing = jobs.list_sources(spec, 1)
    jsonl(tmp_path / "a.jsonl", [*TEXTS, "one more"])
    with pytest.raises(InputError, match=r"a\.jsonl has changed since the corpus's files were listed: start again"):
        jobs.make_shard(spec, listing, 0, 1)


def test_a_file_that_changes_while_it_is_read_is_noticed(encoder, tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizing, "BATCH_DOCUMENTS", 5)
    path = jsonl(tmp_path / "a.jsonl", MANY)
    files = [file_of(path, "jsonl")]
    options = tokenizing.Options.of(specification(tmp_path, path, ""))
    with pytest.raises(InputError, match="has changed since the corpus's files were listed"):
        tokenizing.tokenize_shard(
            options, files, divide(files, 1, None)[0], encoder, tmp_path, lambda *_: os.utime(path, (1, 1))
        )


@given(st.lists(st.integers(1, 2**31 - 1), max_size=20))
def test_lengths_are_counted_by_powers_of_two(lengths):
    found = length_histogram(np.array(lengths, "<i4"))
    assert {n: count for n, count in enumerate(found.tolist()) if count} == Counter(n.bit_length() - 1 for n in lengths)
