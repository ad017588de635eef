"""A filter of the user's: what it keeps, what is said of the rest, and in which version it counts."""

import json
from dataclasses import replace
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from making import documents, jsonl, make, packed, payload, sentences, specification

from megaboa.data import filters, jobs
from megaboa.data.encoder import Encoder
from megaboa.errors import InputError

KEEP = """\
def keep(record):
    if record["score"] < 3:
        return "low score"
    return record["language"] == "en"
"""
RECORDS = [
    {"text": text, "score": number % 5, "language": "de" if number % 7 == 0 else "en"}
    for number, text in enumerate(sentences(70))
]
KEPT = [one["text"] for one in RECORDS if one["score"] >= 3 and one["language"] == "en"]
LOW = sum(one["score"] < 3 for one in RECORDS)


@pytest.fixture
def judge(tmp_path):
    def write(code=KEEP):
        path = tmp_path / "mine.py"
        path.write_text(code)
        return str(path)

    return write


def verified(spec, manifest, shards=1):
    return jobs.verify_corpus(spec, jobs.list_sources(spec, 1), manifest, lambda *_: [])


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.zst", "parquet"])
@pytest.mark.parametrize("shards", [1, 3])
def test_it_decides_about_whole_records_whatever_the_file_and_the_shards(loaded, bpe, tmp_path, judge, kind, shards):
    source = tmp_path / f"a.{kind}"
    if kind == "parquet":
        # An image next to the text is no text, and no reason to drop the row.
        rows = [one | {"image": b"\xff\xd8"} for one in RECORDS]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), source)
    else:
        jsonl(source, RECORDS)
    spec = specification(tmp_path, source, bpe, filter=judge())
    manifest = make(spec, shards)
    encoder = Encoder(loaded, True, None)
    assert documents(manifest.datasets[0]) == [encoder.expected(text) for text in KEPT]
    assert manifest.filtered.reasons == {"low score": LOW, "dropped": len(RECORDS) - LOW - len(KEPT)}
    assert manifest.filtered.records == len(RECORDS) - len(KEPT)
    assert verified(spec, manifest).compared == len(KEPT)


def test_what_it_dropped_is_shown_with_its_place(bpe, tmp_path, judge):
    source = jsonl(tmp_path / "a.jsonl", RECORDS)
    manifest = make(specification(tmp_path, source, bpe, filter=judge()))
    shown = manifest.filtered.samples["low score"]
    assert len(shown) == filters.SAMPLES
    assert shown[0] == f"{source}:1: {' '.join(RECORDS[0]['text'][: filters.SHOWN].split())}"
    assert manifest.filter.path == judge() and len(manifest.filter.sha256) == 64


def test_a_text_file_is_a_record_with_its_text(loaded, bpe, tmp_path, judge):
    source = packed(tmp_path / "a.txt", b"one\n\ntwo\n\nthree")
    code = "def keep(record):\n    return 't' not in record['text'] or 'a t'\n"
    manifest = make(specification(tmp_path, source, bpe, separator="\n\n", filter=judge(code)))
    assert documents(manifest.datasets[0]) == [Encoder(loaded, True, None).expected("one")]
    assert manifest.filtered.reasons == {"a t": 2}


def test_another_version_is_another_corpus_and_the_same_one_is_found_again(bpe, tmp_path, judge):
    source = jsonl(tmp_path / "a.jsonl", RECORDS)
    plain = specification(tmp_path, source, bpe)
    spec = replace(plain, filter=judge())
    first = make(spec)
    assert jobs.list_sources(plain, 1).folder != jobs.list_sources(spec, 1).folder
    assert jobs.make_shard(spec, jobs.list_sources(spec, 1), 0, 1).folder is None
    moved = tmp_path / "moved.py"
    moved.write_text(KEEP)
    assert jobs.list_sources(replace(spec, filter=str(moved)), 1).identity["filter"] == first.filter.sha256
    judge(KEEP + "# version 2\n")
    second = make(spec)
    assert second.filter.sha256 != first.filter.sha256 and payload(second) == payload(first)
    assert Path(second.datasets[0].prefix).parent != Path(first.datasets[0].prefix).parent


def test_records_that_are_dropped_dont_count_toward_the_limit(bpe, tmp_path, judge):
    source = jsonl(tmp_path / "a.jsonl", RECORDS)
    assert make(specification(tmp_path, source, bpe, filter=judge(), limit=5)).documents == 5


def test_many_reasons_become_one(bpe, tmp_path, judge):
    source = jsonl(tmp_path / "a.jsonl", [{"text": text, "n": n} for n, text in enumerate(sentences(200))])
    manifest = make(
        specification(tmp_path, source, bpe, filter=judge("keep = lambda record: not record['n'] or f'{record}'"))
    )
    reasons = manifest.filtered.reasons
    assert len(reasons) == filters.REASONS + 1 and reasons[filters.FURTHER] == 199 - filters.REASONS


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("def keep(record):\n    return record['stars'] > 3\n", "keep() raised KeyError: 'stars', at {source}:1"),
        ("def keep(record):\n    raise ValueError('no')\n", "keep() raised ValueError: no, at {source}:1"),
        ("def keep(record):\n    pass\n", "keep() returned None, and neither True, False, nor the reason"),
        ("def keep(record):\n    return ''\n", "keep() returned '', and neither True, False, nor the reason"),
        ("import nowhere\ndef keep(record):\n    return True\n", "can't be imported (ModuleNotFoundError: No module"),
        ("def keep(record):\n    return False\n", "it drops all of the text, 70 records"),
    ],
)
def test_a_mistake_of_its_own_is_one_sentence_and_leaves_no_corpus(bpe, tmp_path, judge, code, said):
    source = jsonl(tmp_path / "a.jsonl", RECORDS)
    spec = specification(tmp_path, source, bpe, filter=judge(code))
    with pytest.raises(InputError) as caught:
        make(spec)
    message = str(caught.value)
    assert message.startswith("corpora.c.filter: ") and said.format(source=source) in message and "\n" not in message
    assert not Path(jobs.list_sources(spec, 1).folder).exists()


def test_a_change_between_the_jobs_is_noticed(bpe, tmp_path, judge):
    source = jsonl(tmp_path / "a.jsonl", RECORDS)
    spec = specification(tmp_path, source, bpe, filter=judge())
    listing = jobs.list_sources(spec, 1)
    judge("def keep(record):\n    return True\n")
    with pytest.raises(InputError, match=r"corpora.c.filter: .*mine.py was changed after .* listed: call again"):
        jobs.make_shard(spec, listing, 0, 1)


def test_a_filter_that_decides_by_more_than_the_record_is_noticed(bpe, tmp_path, judge):
    source = jsonl(tmp_path / "a.jsonl", RECORDS)
    state = tmp_path / "state"
    code = f"import os\ndef keep(record):\n    return not os.path.exists({json.dumps(str(state))}) or 'now'\n"
    spec = specification(tmp_path, source, bpe, filter=judge(code))
    manifest = make(spec)
    state.touch()
    with pytest.raises(InputError, match=r"the filter has kept it, and it drops it now \(now\): let it decide by the"):
        verified(spec, manifest)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("def keeps(record):\n    return True\n", "has no function keep(record)"),
        ("def keep(record:\n", "line 1: is not valid Python"),
        (None, "there is no file"),
        (KEEP, None),
        ("from other import good as keep\n", None),
    ],
)
def test_the_plan_reads_it_and_runs_nothing_of_it(tmp_path, code, said):
    path = tmp_path / "f.py"
    if code is not None:
        path.write_text(code)
    found = filters.problem(str(path))
    assert found is None if said is None else said in found
