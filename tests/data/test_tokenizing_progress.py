"""What long work says of itself."""

import re

import pytest
from making import build, jsonl, sentences, specification

from megaboa.data import jobs, tokenizing
from megaboa.data.jobs import Progress, duration, progress_line, read_progress
from megaboa.data.shards import divide
from megaboa.data.sources import file_of
from megaboa.data.tokenizing import Options, tokenize_shard
from megaboa.files import write_json


def state(share, began=0.0, now=10.0, size=100_000_000):
    documents, tokens = int(share * 12_000), int(share * 31_000_000)
    return {
        "share": share,
        "documents": documents,
        "tokens": tokens,
        "text_bytes": share * size,
        "started": began,
        "time": now,
    }


def test_a_line_says_documents_tokens_speed_and_what_is_left():
    line = progress_line("stdlib", [state(0.25)], 1, 10.0)
    assert line == "stdlib: 25%, 3,000 documents, 7,750,000 tokens, 2 MB/s, 30 s left"
    assert progress_line("stdlib", [state(1.0)], 1, 10.0).endswith("31,000,000 tokens, 10 MB/s")


def test_the_line_of_a_corpus_adds_its_shards_up():
    line = progress_line("wiki, whole", [state(1.0), state(0.5, 2.0)], 4, 10.0)
    assert line == "wiki, whole: 38%, 18,000 documents, 46,500,000 tokens, 8 MB/s, 30 s left"


@pytest.mark.parametrize(
    ("seconds", "said"), [(0.4, "0 s"), (119, "119 s"), (150, "2 min"), (7000, "116 min"), (9000, "2.5 h")]
)
def test_durations_are_short(seconds, said):
    assert duration(seconds) == said


def test_a_shard_tells_of_itself_and_of_the_corpus(tmp_path, capsys):
    Progress("wiki", tmp_path, 0, 2, seconds=0)(1.0, 10, 100, 1000)
    Progress("wiki", tmp_path, 1, 2, seconds=0)(0.5, 5, 50, 500)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("wiki, shard 1 of 2: 100%, 10 documents, 100 tokens, ")
    assert lines[2].startswith("wiki, shard 2 of 2: 50%, 5 documents, 50 tokens, ")
    assert lines[3].startswith("wiki, whole: 75%, 15 documents, 150 tokens, ") and lines[3].endswith(" left")


def test_between_two_lines_there_is_time_but_the_last_one_always_comes(tmp_path, capsys):
    tell = Progress("wiki", tmp_path, 0, 1, seconds=1000)
    tell(0.5, 5, 50, 500)
    assert capsys.readouterr().err == ""
    tell(1.0, 10, 100, 1000)
    assert re.fullmatch(r"wiki: 100%, 10 documents, 100 tokens, \d+ MB/s\n", capsys.readouterr().err)


def test_what_other_shards_wrote_may_be_gone_or_torn(tmp_path):
    write_json(tmp_path / "0.json", state(1.0))
    (tmp_path / "1.json").write_text("{")
    (tmp_path / "2.json").symlink_to("nowhere")
    assert read_progress(tmp_path) == [state(1.0)]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst"])
@pytest.mark.parametrize("shards", [1, 3])
def test_the_share_grows_to_one(encoder, tmp_path, monkeypatch, name, shards):
    monkeypatch.setattr(tokenizing, "BATCH_DOCUMENTS", 50)
    for module in ("tokenizing", "readers", "shards"):
        monkeypatch.setattr(f"megaboa.data.{module}.BLOCK", 20)
    path = jsonl(tmp_path / name, sentences(1000))
    file = file_of(path, "jsonl", {"gz": "gz", "zst": "zst"}.get(name.split(".")[-1]))
    options, told = Options.of(specification(tmp_path, path, "")), []
    for shard, parts in enumerate(divide([file], shards, None)):
        (tmp_path / str(shard)).mkdir()
        heard = []
        tokenize_shard(options, [file], parts, encoder, tmp_path / str(shard), lambda *said, to=heard: to.append(said))
        assert [said[0] for said in heard] == sorted(said[0] for said in heard) and heard[-1][0] == 1.0
        told.append(heard[-1])
    facts, _ = build(tmp_path / "whole", [path], encoder)
    assert sum(said[1] for said in told) == 1000 and sum(said[2] for said in told) == facts.tokens


def test_work_that_a_limit_ends_is_done(encoder, tmp_path):
    path = jsonl(tmp_path / "a.jsonl", sentences(10))
    options, heard = Options.of(specification(tmp_path, path, "", limit=2)), []
    file = file_of(path, "jsonl")
    tokenize_shard(options, [file], divide([file], 1, None)[0], encoder, tmp_path, lambda *said: heard.append(said))
    assert heard[-1][:2] == (1.0, 2)
    assert jobs.SECONDS_BETWEEN_LINES == 10


def test_a_pause_between_shards_is_no_work():
    yesterday = state(1.0) | {"started": 0.0, "time": 10.0}
    now = state(0.5) | {"started": 90_000.0, "time": 90_005.0}
    assert progress_line("wiki, whole", [yesterday, now], 2, 90_005.0).endswith(" 5 s left")
