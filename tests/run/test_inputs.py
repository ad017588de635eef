import os
from dataclasses import replace
from pathlib import Path

import made
import pytest
from indexed_files import write_indexed

from megaboa.data.pairs import files, pairs_of
from megaboa.data.sources import listing
from megaboa.files import file_digest, write_json
from megaboa.paths import RunFolder
from megaboa.records import Corpus, DataIndex, Sources, read, write
from megaboa.run.inputs import (
    UnusableInputError,
    check_data,
    check_documents,
    check_image,
    check_index,
    check_nodes,
    check_weights,
    empty_splits,
)


def test_several_nodes_are_refused_before_anything_starts(tmp_path):
    write_json(tmp_path / "launch.json", {"nodes": 2})
    with pytest.raises(UnusableInputError, match=r"resources\.nodes is 2, but here is 1 \(laptop\).*--nodes=2"):
        check_nodes(RunFolder(tmp_path), ["laptop"])


def test_as_many_nodes_as_asked_for_or_more_will_do(tmp_path):
    write_json(tmp_path / "launch.json", {"nodes": 2})
    check_nodes(RunFolder(tmp_path), ["n1", "n2"])
    check_nodes(RunFolder(tmp_path), ["n1", "n2", "n3"])


@pytest.mark.parametrize(
    ("split", "documents", "empty"),
    [
        ("98,1,1", 200, []),
        ("98,1,1", 20, ["validation", "test"]),
        ("98,1,1", 60, ["validation"]),  # from 58.8 to 59.4: both are rounded to 59
        ("100,0,0", 1, []),
        ("1,1,0", 1, ["training"]),
        ("0.9,0.05,0.05", 20, []),
        ("1", 1, []),
        ("9,1", 4, ["validation"]),
    ],
)
def test_empty_splits(split, documents, empty):
    assert empty_splits(split, documents) == empty


def corpus(root, name, documents=20, largest=9, **changes):
    """A corpus of one dataset, as the library writes it, and its manifest with some entries changed."""
    prefix = root / "store" / name
    prefix.parent.mkdir(exist_ok=True)
    tokens = write_indexed(prefix, [[1, largest]] * documents)
    sizes = {f"{name}.{end}": (root / "store" / f"{name}.{end}").stat().st_size for end in ("bin", "idx")}
    dataset = {"prefix": str(prefix), "documents": documents, "tokens": tokens, "sizes": sizes}
    manifest = root / "results" / "e" / "data" / f"{name}.json"
    write(manifest, made.corpus(made.dataset(**{**dataset, "largest_token": largest, **changes})))
    return prefix


def run_of(root, data, recipe=None, vocab_size=10, **launch):
    folder = root / "results" / "e" / "runs" / "r"
    write_json(folder / "run.json", {"data": data, "model": {"name": "m", "init": "scratch", "recipe": recipe}})
    write_json(folder / "launch.json", launch)
    write(root / "results" / "e" / "models" / "m" / "source.json", made.source(vocab_size=vocab_size))
    return RunFolder(folder)


ONE = {"blend": {"text": 1.0}, "split": "80,10,10"}


def test_corpora_that_are_as_their_manifests_say_will_do(tmp_path):
    corpus(tmp_path, "text")
    check_data(run_of(tmp_path, ONE))


def test_a_file_that_was_cut_off(tmp_path):
    prefix = corpus(tmp_path, "text")
    with open(f"{prefix}.bin", "r+b") as stream:
        stream.truncate(70)
    said = r"run r: corpora\.text: .*text\.bin has 70 bytes, and its manifest says 80\. Make the corpus again: remove "
    with pytest.raises(UnusableInputError, match=said):
        check_data(run_of(tmp_path, ONE))


def test_a_file_that_is_gone(tmp_path):
    prefix = corpus(tmp_path, "text")
    Path(f"{prefix}.idx").unlink()
    with pytest.raises(UnusableInputError, match=r"corpora\.text: .*text\.idx is missing"):
        check_data(run_of(tmp_path, ONE))


@pytest.mark.parametrize(
    ("offset", "value", "said"),
    [
        (0, b"X", r"text\.idx is not a Megatron index"),
        (9, b"\x02", r"text\.idx: unknown version 2 or type 8"),
        (17, b"\x07", r"text\.idx: unknown version 1 or type 7"),
        (17, b"\x04", "has the token type int32, and its manifest says uint16"),
        (18, b"\x13", "has the number of sequences 19, and its manifest says 20"),
        (26, b"\x13", "has the number of documents 18, and its manifest says 20"),
    ],
)
def test_an_index_of_something_else(tmp_path, offset, value, said):
    prefix = corpus(tmp_path, "text")
    with open(f"{prefix}.idx", "r+b") as stream:
        stream.seek(offset)
        stream.write(value)
    with pytest.raises(UnusableInputError, match=said):
        check_data(run_of(tmp_path, ONE))


def test_tokens_that_the_model_does_not_know(tmp_path):
    corpus(tmp_path, "text", largest=12)
    said = r"corpora\.text: .*text\.bin holds token 12, and the vocabulary of the model 'm' is 12.*text\.tokenizer"
    with pytest.raises(UnusableInputError, match=said):
        check_data(run_of(tmp_path, ONE, vocab_size=12))
    check_data(run_of(tmp_path, ONE, vocab_size=13))
    check_data(run_of(tmp_path, ONE, recipe="r.py", vocab_size=1))  # its vocabulary is the index job's business


def test_corpora_of_every_split_and_validation_set_are_looked_at(tmp_path):
    corpus(tmp_path, "text")
    data = {
        "blend_per_split": {"train": {"text": 1.0}, "valid": {"other": 1.0}},
        "validation_sets": {"far": {"law": 1.0}},
    }
    for name in ("other", "law"):
        corpus(tmp_path, "other")
        corpus(tmp_path, "law")
        Path(tmp_path, "store", f"{name}.bin").unlink()
        with pytest.raises(UnusableInputError, match=rf"corpora\.{name}: .*missing"):
            check_data(run_of(tmp_path, data))


def test_the_message_names_corpus_split_and_remedy(tmp_path):
    corpus(tmp_path, "text", documents=20)
    said = r"corpus 'text' has 20 documents.*data\.split.*validation.*larger share"
    with pytest.raises(UnusableInputError, match=said):
        check_data(run_of(tmp_path, {"blend": {"text": 1.0}, "split": "98,1,1"}))


def test_one_document_is_no_plural(tmp_path):
    corpus(tmp_path, "text", documents=1)
    with pytest.raises(UnusableInputError, match=r"corpus 'text' has 1 document, and with data\.split"):
        check_data(run_of(tmp_path, {"blend": {"text": 1.0}, "split": "98,1,1"}))


def test_a_split_that_the_recipe_brings_is_looked_at(tmp_path):
    corpus(tmp_path, "text", documents=20)
    run = run_of(tmp_path, {"blend": {"text": 1.0}}, recipe="r.py")
    said = r"corpus 'text' has 20 documents, and with dataset\.split '9999,8,2' none.*validation.*by data\.split"
    check_data(run)  # nobody has asked Bridge yet
    write_json(tmp_path / "results" / "e" / "preflight.json", {"runs": {"r": {"split": "9999,8,2"}}})
    with pytest.raises(UnusableInputError, match=said):
        check_data(RunFolder(run.path))
    with pytest.raises(UnusableInputError, match=said):
        check_documents(run, "9999,8,2")
    check_documents(run, "1,1,1")
    check_documents(run, None)
    per_split = run_of(tmp_path, {"blend_per_split": {"train": {"text": 1.0}}}, recipe="r.py")
    check_documents(per_split, "9999,8,2")


def test_what_is_read_whole_needs_no_share_but_text(tmp_path):
    data = {"blend_per_split": {"train": {"text": 1.0}, "valid": {"other": 1.0}}}
    corpus(tmp_path, "text", documents=1)
    corpus(tmp_path, "other", documents=1)
    check_data(run_of(tmp_path, data))
    corpus(tmp_path, "other", documents=0)
    with pytest.raises(UnusableInputError, match=r"corpus 'other' has no tokens at all.*corpora\.other\.source"):
        check_data(run_of(tmp_path, data))


def test_an_index_cache_that_was_removed(tmp_path):
    corpus(tmp_path, "text")
    index = DataIndex(name="i", cache=str(tmp_path / "cache"), samples={}, corpora=(), max_epochs=4.0)
    write(tmp_path / "results" / "e" / "data" / "indexes" / "i.json", index)
    with pytest.raises(UnusableInputError, match=r"index of its data is not in .*cache any more.*--forcerun index"):
        check_index(run_of(tmp_path, ONE, index="i"))
    (tmp_path / "cache").mkdir()
    check_index(run_of(tmp_path, ONE, index="i"))
    check_index(run_of(tmp_path, ONE))


@pytest.fixture
def pretrained(tmp_path):
    folder = run_of(tmp_path, ONE)
    write_json(folder.path / "run.json", {"data": ONE, "model": {"name": "m", "init": "pretrained"}})
    weights = tmp_path / "store" / "m" / "megatron" / "iter_0000000" / "__0_0.distcp"
    weights.parent.mkdir(parents=True)
    weights.write_bytes(bytes(100))
    files = {"megatron/iter_0000000/__0_0.distcp": 100}
    manifest = made.imported(checkpoint=str(tmp_path / "store/m/megatron"), files=files)
    write(tmp_path / "results" / "e" / "models" / "m" / "import.json", manifest)
    return RunFolder(folder.path), weights


def test_imported_weights_that_are_as_their_manifest_says_will_do(pretrained):
    check_weights(pretrained[0])


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: path.write_bytes(bytes(99)), "has 99 bytes, and its manifest says 100"),
        (lambda path: path.unlink(), "is missing"),
    ],
)
def test_imported_weights_that_were_cut_off_or_removed(pretrained, damage, said):
    folder, weights = pretrained
    damage(weights)
    with pytest.raises(UnusableInputError, match=rf"models\.m: .*__0_0\.distcp {said}.*Import the model again: remove"):
        check_weights(folder)


@pytest.fixture
def boxed(tmp_path):
    """A run whose ranks start in an image of three bytes."""
    folder = tmp_path / "runs" / "run"
    write_json(folder / "launch.json", {"image": {"runtime": "pyxis", "mounts": [], "secrets": [], "workdir": "/"}})
    image = tmp_path / "i.sqsh"
    image.write_bytes(b"abc")
    facts = {"bytes": 3, "mtime_ns": image.stat().st_mtime_ns, "sha256": file_digest(image)}
    write_json(tmp_path / "image.json", {"runtime": "pyxis", "path": str(image), "digest": "sha256:1", **facts})
    return RunFolder(folder)


def test_an_image_as_it_was_tested(boxed, tmp_path):
    check_image(boxed)
    write_json(tmp_path / "launch.json", {})
    check_image(RunFolder(tmp_path))  # no image


def test_an_image_that_is_gone(boxed, tmp_path):
    (tmp_path / "i.sqsh").unlink()
    with pytest.raises(UnusableInputError, match=r"i\.sqsh can't be read \(No such file.*--forcerun image"):
        check_image(boxed)


def test_an_image_that_was_changed(boxed, tmp_path):
    (tmp_path / "i.sqsh").write_bytes(b"abcd")
    with pytest.raises(UnusableInputError, match="has 4 bytes, and its manifest says 3"):
        check_image(boxed)


def test_an_image_that_was_replaced_by_one_of_the_same_size(boxed, tmp_path):
    image, later = tmp_path / "i.sqsh", 2_000_000_000
    os.utime(image, (later, later))
    check_image(boxed)  # the same content
    image.write_bytes(b"xyz")
    with pytest.raises(UnusableInputError, match=r"has other content than when it was tested.*--forcerun image"):
        check_image(boxed)


def given(root):
    """A corpus of files of the user's, which may have marked documents otherwise."""
    prefix = corpus(root, "text")
    write(
        root / "results" / "e" / "data" / "text.json",
        replace(read(Corpus, root / "results" / "e" / "data" / "text.json"), is_given=True),
    )
    listed = listing(files(pairs_of(str(prefix))), root / "digests")
    sources = Sources(name="text", files=tuple(listed), tokenizer=None, identity={}, folder="store/text")
    write(root / "results" / "e" / "data" / "text" / "sources.json", sources)
    return prefix


def test_files_of_the_user_that_changed_are_never_to_be_removed(tmp_path):
    prefix = given(tmp_path)
    check_data(run_of(tmp_path, ONE))
    os.utime(f"{prefix}.bin", ns=(1, 1))
    check_data(run_of(tmp_path, ONE))  # the same content
    with Path(f"{prefix}.bin").open("r+b") as stream:
        stream.write(b"\x07")
    with pytest.raises(UnusableInputError, match=r"text.bin has changed since.*The next call of Snakemake") as error:
        check_data(run_of(tmp_path, ONE))
    os.truncate(f"{prefix}.bin", 10)
    with pytest.raises(UnusableInputError, match=r"corpora.text.megatron: .*has 10 bytes, and its manifest") as cut:
        check_data(run_of(tmp_path, ONE))
    assert "remove" not in f"{error.value} {cut.value}"
