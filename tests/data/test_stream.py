"""Datasets of the hub, played by a folder that `load_dataset` streams."""

import pytest
from making import jsonl, make, payload, specification

from megaboa.data import shards, stream
from megaboa.errors import InputError


@pytest.fixture
def hub(tmp_path, monkeypatch):
    (tmp_path / "hub").mkdir()
    for number in range(2):
        jsonl(tmp_path / "hub" / f"train-{number}.jsonl", [f"document {number} {row}" for row in range(50)])
    monkeypatch.setattr(stream, "_commit", lambda name, revision: revision or "c0ffee")
    return tmp_path / "hub"


def test_a_stream_gives_the_corpus_of_its_files_whatever_the_number_of_shards(hub, bpe, tmp_path, monkeypatch):
    files = make(specification(tmp_path / "files", hub / "*.jsonl", bpe))
    monkeypatch.setattr(shards, "BLOCK", 7)
    monkeypatch.setattr("megaboa.data.readers.BLOCK", 7)
    monkeypatch.setattr("megaboa.data.tokenizing.BLOCK", 7)
    for count in (1, 2, 5):
        streamed = make(specification(tmp_path / str(count), f"hf:{hub}", bpe), count)
        assert payload(streamed) == payload(files)
        assert [file.documents for file in streamed.sources] == [50, 50]


def test_the_commit_is_part_of_the_identity(hub, bpe, tmp_path):
    one = make(specification(tmp_path, f"hf:{hub}", bpe, revision="1" * 40))
    other = make(specification(tmp_path, f"hf:{hub}", bpe, revision="2" * 40))
    assert one.datasets[0].prefix != other.datasets[0].prefix


def test_a_stream_that_breaks_off_is_one_sentence(hub, bpe, tmp_path, monkeypatch):
    def broken(*_):
        class Shards:
            num_shards = 1

            def shard(self, **_):
                yield {"text": "one"}
                raise TimeoutError("the hub is silent")

        return Shards()

    monkeypatch.setattr(stream, "_open", broken)
    with pytest.raises(
        InputError, match=r"1 of 1: the stream broke off \(TimeoutError: the hub is silent\); call again"
    ):
        make(specification(tmp_path, f"hf:{hub}", bpe))
