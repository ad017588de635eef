"""Tokenizing documents, in the library and through the scripts."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import megaboa
from megaboa.data import corpus, tokenizer
from megaboa.data.errors import InputError
from megaboa.files import write_json

SCRIPTS = Path(megaboa.__file__).parents[1]
TEXTS = [f"Satz Nummer {number}: äöü {'wort ' * (number % 7)}" for number in range(60)]


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.train(TEXTS, 280, folder)
    return tokenizer.find(folder)


def read(prefix):
    """The documents of a corpus, by the offsets of its index."""
    index = prefix.with_name(prefix.name + ".idx").read_bytes()
    count = int(np.frombuffer(index, dtype="<u8", count=1, offset=18)[0])
    lengths = np.frombuffer(index, dtype="<i4", count=count, offset=34)
    offsets = np.frombuffer(index, dtype="<i8", count=count, offset=34 + 4 * count)
    tokens = prefix.with_name(prefix.name + ".bin").read_bytes()
    return [
        np.frombuffer(tokens, "<u2", length, offset).tolist() for length, offset in zip(lengths, offsets, strict=True)
    ]


@pytest.mark.parametrize("append_eod", [True, False])
def test_a_corpus_holds_its_documents(reference, tmp_path, append_eod):
    seen = corpus.tokenize(iter(TEXTS), reference, append_eod, tmp_path / "c")
    words = tokenizer.load(reference)
    found = read(tmp_path / "c")
    if append_eod:
        assert all(ids.pop() == words.eos_token_id for ids in found)
    assert [words.decode(ids) for ids in found] == TEXTS
    tokens = sum(map(len, found)) + (len(found) if append_eod else 0)
    assert seen == {"documents": len(TEXTS), "tokens": tokens, "dtype": "uint16"}


def test_batches_change_nothing(reference, tmp_path, monkeypatch):
    corpus.tokenize(iter(TEXTS), reference, True, tmp_path / "one")
    monkeypatch.setattr(corpus, "BATCH_DOCUMENTS", 7)
    corpus.tokenize(iter(TEXTS), reference, True, tmp_path / "other")
    for end in ("bin", "idx"):
        assert (tmp_path / f"one.{end}").read_bytes() == (tmp_path / f"other.{end}").read_bytes()


def test_batches_are_bounded_and_lose_nothing(monkeypatch):
    monkeypatch.setattr(corpus, "BATCH_DOCUMENTS", 4)
    monkeypatch.setattr(corpus, "BATCH_CHARACTERS", 10)
    texts = ["a", "b", "c", "d", "e", "x" * 50, "f", "12345", "67890", "g"]
    found = list(corpus.batches(texts))
    assert found == [["a", "b", "c", "d"], ["e", "x" * 50], ["f", "12345", "67890"], ["g"]]


def test_long_work_shows_how_far_it_is(reference, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(corpus, "SECONDS_BETWEEN_LINES", 0)
    corpus.tokenize(iter(TEXTS), reference, True, tmp_path / "c")
    assert "c: 60 documents" in capsys.readouterr().err


def test_a_tokenizer_without_an_end_of_text_token(reference, tmp_path):
    words = tokenizer.load(reference)
    words.eos_token = None
    words.save_pretrained(str(tmp_path))
    bare = tokenizer.find(tmp_path)
    with pytest.raises(InputError, match="no end-of-text token; set the corpus's `append_eod` to false"):
        corpus.tokenize(TEXTS, bare, True, tmp_path / "c")
    assert corpus.tokenize(TEXTS, bare, False, tmp_path / "c")["documents"] == len(TEXTS)


def script(name, folder, *arguments, **environment):
    return subprocess.run(
        [sys.executable, SCRIPTS / name, *arguments],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )


def specifications(folder, **corpus_changes):
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)
    (folder / "raw.jsonl").write_text(lines)
    text = {"source": "raw.jsonl", "text_key": "text", "limit": None}
    write_json(
        folder / "bpe.spec.json",
        {"name": "bpe", "store": "store", "train_on": {"name": "raw", **text}, "vocab_size": 280},
    )
    named = {"kind": "manifest", "manifest": "results/x/tokenizers/bpe.json"}
    spec = {"name": "raw", "store": "store", **text, "append_eod": True, "tokenizer": named, **corpus_changes}
    write_json(folder / "raw.spec.json", spec)


@pytest.mark.slow
def test_the_scripts_from_text_to_a_linked_corpus(tmp_path):
    specifications(tmp_path)
    train = ("train_tokenizer.py", tmp_path, "--spec", "bpe.spec.json", "--out", "results/x/tokenizers/bpe.json")
    encode = ("tokenize_corpus.py", tmp_path, "--spec", "raw.spec.json", "--out", "results/x/data/raw.json")
    for call in (train, encode):
        done = script(*call)
        assert done.returncode == 0, done.stderr
    out = tmp_path / "results/x/data/raw.json"
    manifest = json.loads(out.read_text())
    assert set(manifest) == {
        *("name", "datasets", "digest", "tokenizer_digest", "source", "documents", "tokens", "bytes", "dtype", "files")
    }
    assert (manifest["documents"], manifest["dtype"], manifest["bytes"]) == (60, "uint16", 2 * manifest["tokens"])
    (dataset,) = manifest["datasets"]
    documents = read(tmp_path / dataset["prefix"])
    assert documents == read(tmp_path / "results/x/data/raw")
    sizes = {f"raw.{end}": (tmp_path / f"results/x/data/raw.{end}").stat().st_size for end in ("bin", "idx")}
    assert (dataset["key"], dataset["documents"], dataset["sizes"]) == ("text", 60, sizes)
    assert (dataset["tokens"], dataset["largest_token"]) == (manifest["tokens"], max(map(max, documents)))
    assert (tmp_path / "results/x/data/raw.bin").is_symlink()

    # Again: the payload stays, the manifest is written anew and the same.
    payload = (tmp_path / "results/x/data/raw.bin").resolve()
    written, text = payload.stat().st_mtime_ns, out.read_text()
    out.unlink()
    assert script(*encode).returncode == 0
    assert (payload.stat().st_mtime_ns, out.read_text()) == (written, text)

    # Another text under the same name: another payload, and the old one is left alone.
    with (tmp_path / "raw.jsonl").open("a") as stream:
        stream.write('{"text": "one more"}\n')
    assert script(*encode).returncode == 0
    assert json.loads(out.read_text())["documents"] == 61
    assert (tmp_path / "results/x/data/raw.bin").resolve() != payload
    assert payload.stat().st_mtime_ns == written


@pytest.mark.slow
def test_a_mistake_ends_in_one_sentence_and_no_manifest(tmp_path):
    specifications(tmp_path, text_key="content", tokenizer={"kind": "path", "path": "nobody/no-such-tokenizer"})
    arguments = ("--spec", "raw.spec.json", "--out", "out.json")
    done = script("tokenize_corpus.py", tmp_path, *arguments, HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path / "hub"))
    assert done.returncode == 1
    assert done.stderr.startswith("error: corpora.raw.tokenizer: 'nobody/no-such-tokenizer' is not in the local cache")
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "out.json").exists()

    spec = json.loads((tmp_path / "bpe.spec.json").read_text())
    write_json(tmp_path / "bpe.spec.json", {**spec, "vocab_size": 5000})
    done = script("train_tokenizer.py", tmp_path, "--spec", "bpe.spec.json", "--out", "out.json")
    assert done.returncode == 1
    assert "tokenizers.bpe.vocab_size: 5000, but the text of corpus 'raw' yields only" in done.stderr
    assert not (tmp_path / "out.json").exists()
