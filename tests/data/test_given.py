"""Corpora of tokens that somebody else has written: checked, counted, and never changed."""

import os
import struct
from dataclasses import replace

import numpy as np
import pytest
from indexed_files import write_indexed
from making import specification

from megaboa.data import jobs
from megaboa.data.pairs import counted_documents
from megaboa.errors import InputError
from megaboa.records import Pair

DOCUMENTS = {"a": [[5, 6, 7], [8], [5, 5, 5, 5]], "b": [[70000, 5], [6] * 9]}


@pytest.fixture
def folder(tmp_path):
    """Two pairs of different types."""
    (tmp_path / "mine").mkdir()
    write_indexed(tmp_path / "mine" / "a", DOCUMENTS["a"])
    write_indexed(tmp_path / "mine" / "b", DOCUMENTS["b"], np.int32)
    return tmp_path / "mine"


def corpus(folder, pairs=(("a", None), ("b", None)), **changes):
    made = tuple(Pair(prefix=f"{folder}/{name}", weight=weight) for name, weight in pairs)
    changes = {"tokenizer": None, **changes}
    spec = replace(specification(folder.parent, "", ""), pairs=made, **changes)
    listing = jobs.list_sources(spec, 1)
    return spec, listing, jobs.merge_shards(spec, listing, 1)


def state(folder):
    return {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in sorted(folder.iterdir())}


def test_tokens_and_documents_are_counted_and_nothing_is_written_next_to_them(folder):
    before = state(folder)
    _, listing, manifest = corpus(folder)
    a, b = manifest.datasets
    assert (manifest.documents, manifest.tokens, manifest.is_given) == (5, 19, True)
    assert (a.key, a.documents, a.tokens, a.largest_token, a.dtype) == ("a", 3, 8, 8, "uint16")
    assert (b.key, b.documents, b.tokens, b.largest_token, b.dtype) == ("b", 2, 11, 70000, "int32")
    assert a.prefix == f"{folder}/a" and set(a.sizes) == {"a.bin", "a.idx"} == set(a.sha256)
    assert a.frequent == ((5, 5), (6, 1), (7, 1), (8, 1)) and a.bytes_per_token is None
    assert a.lengths[:3] == (1, 1, 1) and b.lengths[:4] == (0, 1, 0, 1)
    assert [source.documents for source in manifest.sources] == [3, 0, 2, 0]
    jobs.link_files(manifest, folder.parent / "results")
    assert not (folder.parent / "results").exists()
    assert state(folder) == before
    assert [path.name for path in (folder.parent / "store").rglob("*") if path.suffix in (".bin", ".idx")] == []
    assert listing.tokenizer is None


def test_a_tokenizer_gives_the_card_its_text(folder, bpe):
    _, _, manifest = corpus(folder, [("a", None)], tokenizer={"kind": "path", "path": str(bpe)})
    assert all(isinstance(text, str) for _, _, text in manifest.datasets[0].frequent)


def test_tokens_beyond_the_tokenizer_are_refused(folder, bpe):
    with pytest.raises(
        InputError, match=r"corpora.c.megatron: .*b.bin holds token 70000, and its tokenizer has 300 .*corpora.c.tok"
    ):
        corpus(folder, tokenizer={"kind": "path", "path": str(bpe)})


def test_the_digest_is_of_content_order_and_weights_and_not_of_the_place(folder, tmp_path):
    *_, here = corpus(folder)
    other = folder.rename(tmp_path / "moved")
    *_, moved = corpus(other)
    assert moved.digest == here.digest and moved.datasets[0].prefix == f"{other}/a"
    digests = {
        here.digest,
        corpus(other, [("b", None), ("a", None)])[2].digest,
        corpus(other, [("a", 1.0), ("b", 1.0)])[2].digest,
        corpus(other, [("a", 1.0), ("b", 2.0)])[2].digest,
        corpus(other, [("a", None)])[2].digest,
    }
    assert len(digests) == 5


def test_a_second_call_reads_nothing_again(folder, monkeypatch):
    corpus(folder)
    monkeypatch.setattr("megaboa.data.given._count", lambda *_: pytest.fail("counted again"))
    corpus(folder)


def cut(path, size):
    os.truncate(path, path.stat().st_size + size)


def in_index(path, offset, value):
    with path.open("r+b") as stream:
        stream.seek(offset)
        stream.write(value)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda f: cut(f / "a.bin", -2), "a.bin has 14 bytes, and {0}/a.idx is the index of 16"),
        (lambda f: cut(f / "a.bin", 2), "a.bin has 18 bytes, and {0}/a.idx is the index of 16"),
        (lambda f: cut(f / "a.idx", -8), "a.idx has 94 bytes instead of 102"),
        (lambda f: (f / "a.idx").write_bytes(b"no index"), "a.idx is not a Megatron index"),
        (lambda f: in_index(f / "a.idx", 17, b"\x07"), "a.idx: unknown version 1 or type 7 of tokens"),
        (lambda f: in_index(f / "a.idx", 34 + 12 + 8, struct.pack("<q", 4)), "a.idx: the pointer of document 1 is wro"),
        (lambda f: in_index(f / "b.bin", 0, b"\xff\xff\xff\xff"), "b.bin holds token -1, which is in no vocabulary"),
        (lambda f: in_index(f / "b.bin", 0, b"\xff\xff\xff\x7f"), "b.bin holds token 2,147,483,647, which is in no"),
    ],
)
def test_a_bin_that_is_not_that_of_its_idx_is_one_sentence(folder, spoil, said):
    spoil(folder)
    with pytest.raises(InputError) as error:
        corpus(folder)
    message = str(error.value)
    assert message.startswith("corpora.c.megatron: ") and said.format(folder) in message and "\n" not in message
    assert message.endswith("copy both files again, or write them again")
    assert not list((folder.parent / "store").rglob("facts.json"))


def test_an_empty_pair_is_refused(folder):
    write_indexed(folder / "empty", [])
    with pytest.raises(InputError, match=r"corpora.c.megatron: .*empty has no tokens: remove it"):
        corpus(folder, [("empty", None)])


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int16, np.int64])
def test_megatrons_other_types_are_read(folder, dtype):
    write_indexed(folder / "other", [[1, 2], [100]], dtype)
    (dataset,) = corpus(folder, [("other", None)])[2].datasets
    assert (dataset.dtype, dataset.tokens, dataset.largest_token) == (np.dtype(dtype).name, 3, 100)


def test_documents_of_several_sequences_are_counted_by_sequence(folder):
    """As Megatron's GPT datasets do."""
    content = (folder / "a.idx").read_bytes()
    header = content[:26] + struct.pack("<Q", 2)
    (folder / "a.idx").write_bytes(header + content[34 : 34 + 36] + struct.pack("<qq", 0, 3))
    manifest = corpus(folder, [("a", None)])[2]
    assert (manifest.documents, manifest.datasets[0].whole_documents) == (3, 1)
    assert counted_documents(manifest.datasets) == "3 sequences of 1 document"
    assert counted_documents(corpus(folder, [("b", None)])[2].datasets) == "2 documents"


def test_what_megatron_itself_has_written_is_read(tmp_path):
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    (tmp_path / "mine").mkdir()
    builder = IndexedDatasetBuilder(f"{tmp_path}/mine/m.bin", dtype=np.uint16)
    for ids in DOCUMENTS["a"]:
        builder.add_item(torch.tensor(ids))
        builder.end_document()
    builder.finalize(f"{tmp_path}/mine/m.idx")
    (dataset,) = corpus(tmp_path / "mine", [("m", None)])[2].datasets
    assert (dataset.documents, dataset.tokens) == (3, 8)


def test_verification_reads_them_as_training_does_and_notices_a_change(folder):
    from megaboa.bridge.corpus_samples import read_as_training_does

    spec, listing, manifest = corpus(folder)
    found = jobs.verify_corpus(spec, listing, manifest, read_as_training_does)
    assert (found.compared, found.digest) == (0, manifest.digest)
    with pytest.raises(InputError, match=r"^corpora.c.megatron: it is odd; it is odd: copy both"):
        jobs.verify_corpus(spec, listing, manifest, lambda dataset, size: ["it is odd"])
    os.utime(folder / "a.bin", ns=(1, 1))
    jobs.verify_corpus(spec, listing, manifest, read_as_training_does)
    in_index(folder / "a.bin", 0, b"\x07")
    with pytest.raises(InputError, match=r"a.bin has changed since the corpus's files were listed"):
        jobs.verify_corpus(spec, listing, manifest, read_as_training_does)
