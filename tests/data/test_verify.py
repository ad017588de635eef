"""What verification finds."""

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import datasets
import numpy as np
import pytest
from making import documents, jsonl, make, packed, sentences, specification
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from megaboa import commands
from megaboa.data import jobs, verify
from megaboa.data.documents import Format
from megaboa.errors import InputError
from megaboa.files import file_digest, read_json
from megaboa.records import CorpusFacts, read, write

TEXTS = [*sentences(120), "ends", "same", "same"]


def corpus(folder, bpe, source, shards=1, **changes):
    spec = specification(folder, source, bpe, **changes)
    return spec, jobs.list_sources(spec, 1), make(spec, shards)


def check(spec, listing, manifest, sample=verify.DOCUMENTS):
    """All that is wrong, and how many documents were compared."""
    facts = read(CorpusFacts, Path(listing.folder) / jobs.FACTS)
    encoder = jobs.encoder_of(spec, listing, "tokenizers")
    verdict = verify.check_corpus(Format.of(spec), listing, manifest, facts, encoder, lambda *_: [], sample)
    assert verdict.decoded <= verdict.documents
    return verdict.problems, verdict.documents


SOURCES = {
    "jsonl": lambda folder: jsonl(folder / "a.jsonl", TEXTS),
    "jsonl.gz": lambda folder: jsonl(folder / "a.jsonl.gz", TEXTS),
    "txt": lambda folder: packed(folder / "a.txt", "-=".join(TEXTS).encode()),
    "txt.zst": lambda folder: packed(folder / "a.txt.zst", "-=".join(TEXTS).encode()),
    "parquet": lambda folder: (
        datasets.Dataset.from_dict({"text": TEXTS}).to_parquet(folder / "a.parquet") and folder / "a.parquet"
    ),
}


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("deduplicate", [False, True])
def test_a_sound_corpus_of_any_kind_is_sound(bpe, tmp_path, kind, deduplicate):
    made = corpus(tmp_path, bpe, SOURCES[kind](tmp_path), 3, separator="-=", deduplicate=deduplicate)
    assert check(*made) == ([], len(TEXTS) - deduplicate)
    problems, compared = check(*made, sample=10)
    assert problems == [] and compared == 10


def test_text_whose_separator_overlaps_itself_is_sound(bpe, tmp_path):
    path = packed(tmp_path / "a.txt", ("\n\n".join(text.replace("\n", "") for text in TEXTS) + "\n\n\n").encode())
    assert check(*corpus(tmp_path, bpe, path, 4, separator="\n\n")) == ([], len(TEXTS))


def test_several_files_and_keys_are_sound(bpe, tmp_path):
    for number in range(4):
        records = [{"q": f"q {number} {n}", "a": f"a {number} {n}" if n % 2 else ""} for n in range(10)]
        jsonl(tmp_path / f"{number}.jsonl", records)
    assert check(*corpus(tmp_path, bpe, tmp_path / "*.jsonl", 3, text_key=["q", "a"])) == ([], 40 + 20)


def test_every_file_has_its_share_of_the_sample(bpe, tmp_path):
    for number, count in enumerate((10, 90)):
        jsonl(tmp_path / f"{number}.jsonl", [f"{number} {n}" for n in range(count)])
    spec, listing, manifest = corpus(tmp_path, bpe, tmp_path / "*.jsonl")
    facts = read(CorpusFacts, Path(listing.folder) / jobs.FACTS)
    origins = np.fromfile(f"{manifest.datasets[0].prefix}.origins", "<i8")
    by_file = facts.datasets[0].by_file
    picked = dict(verify.pick(by_file, listing.files, Format.of(spec), origins, 20, "seed"))
    assert {file: len(wanted) for file, wanted in picked.items()} == {0: 2, 1: 18}
    assert picked == dict(verify.pick(by_file, listing.files, Format.of(spec), origins, 20, "seed"))


@pytest.fixture(scope="module")
def sound(bpe, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sound")
    return corpus(folder, bpe, jsonl(folder / "a.jsonl", TEXTS), 2)


@pytest.fixture
def made(sound, tmp_path):
    """A corpus of one's own to damage."""
    spec, listing, manifest = sound
    shutil.copytree(listing.folder, tmp_path / "copy")
    source = shutil.copy2(listing.files[0].path, tmp_path / "a.jsonl")
    prefix = str(tmp_path / "copy" / "c")
    listing = replace(listing, folder=str(tmp_path / "copy"), files=(replace(listing.files[0], path=str(source)),))
    return [spec, listing, with_dataset(manifest, prefix=prefix)]


def with_dataset(manifest, **changes):
    return replace(manifest, datasets=(replace(manifest.datasets[0], **changes),))


def rewritten(made, ending, change):
    """Change a file, and its checksum, as a job that goes wrong would do."""
    dataset = made[2].datasets[0]
    path = Path(f"{dataset.prefix}.{ending}")
    content = bytearray(path.read_bytes())
    path.write_bytes(change(content) or content)
    made[2] = with_dataset(made[2], sha256={**dataset.sha256, path.name: file_digest(path)})


def test_a_flipped_token_is_found_even_outside_the_sample(made):
    path = Path(f"{made[2].datasets[0].prefix}.bin")
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    assert f"{path} was changed after it was written" in check(*made, sample=1)[0]


def test_a_token_that_was_written_wrong_is_found(made):
    number = 7
    begin = sum(map(len, documents(made[2].datasets[0])[:number])) * 2

    def flip(content):
        content[begin] ^= 1

    rewritten(made, "bin", flip)
    (problem,) = check(*made)[0]
    assert problem.startswith(f"document {number} of ") and f"a.jsonl:{number + 1})" in problem
    assert problem.endswith("its tokens aren't those of the source's text")


def test_a_missing_end_of_document_is_found(made):
    end = len(documents(made[2].datasets[0])[0]) * 2 - 2

    def flip(content):
        content[end] ^= 1

    rewritten(made, "bin", flip)
    (problem,) = check(*made)[0]
    assert problem.startswith("document 0 of ") and "doesn't begin and end with the special tokens" in problem


def test_swapped_documents_are_found(made):
    ids = documents(made[2].datasets[0])
    one, other = next(
        (n, n + 1) for n in range(len(ids) - 1) if len(ids[n]) == len(ids[n + 1]) and ids[n] != ids[n + 1]
    )
    ids[one], ids[other] = ids[other], ids[one]
    rewritten(made, "bin", lambda _: np.array([token for document in ids for token in document], "<u2").tobytes())
    problems = check(*made)[0]
    assert [problem.split(" of ")[0] for problem in sorted(problems)] == sorted(
        [f"document {one}", f"document {other}"]
    )


def test_a_wrong_pointer_is_found(made):
    count = made[2].documents

    def shift(content):
        content[34 + 4 * count + 8 * 5] ^= 2

    rewritten(made, "idx", shift)
    problems = verify.check_index(made[2].datasets[0], "uint16")
    assert problems[0].endswith("c.idx: the pointer of document 5 is wrong")


@pytest.mark.parametrize(("ending", "said"), [("bin", "bytes of .bin by its index: "), ("idx", " bytes instead of ")])
def test_a_truncated_file_is_found(made, ending, said):
    rewritten(made, ending, lambda content: content[:-2])
    assert any(said in problem for problem in verify.check_index(made[2].datasets[0], "uint16"))


@pytest.mark.parametrize("ending", ["bin", "idx"])
def test_a_missing_file_is_found(made, ending):
    Path(f"{made[2].datasets[0].prefix}.{ending}").unlink()
    (problem,) = verify.check_index(made[2].datasets[0], "uint16")
    assert "No such file" in problem and f"c.{ending}" in problem


@pytest.mark.parametrize(("key", "value"), [("documents", 3), ("tokens", 3)])
def test_a_manifest_of_something_else_is_found(made, key, value):
    made[2] = with_dataset(made[2], **{key: value})
    assert f"instead of {value}" in check(*made)[0][0]
    assert any("type: uint16 instead of int32" in p for p in verify.check_index(made[2].datasets[0], "int32"))


def test_origins_that_lead_elsewhere_are_found(made):
    path = Path(f"{made[2].datasets[0].prefix}.origins")
    path.write_bytes((np.fromfile(path, "<i8") + 1).tobytes())
    assert any("there is no such record in the source" in problem for problem in check(*made)[0])


def test_a_source_that_changed_is_found(made):
    jsonl(Path(made[1].files[0].path), ["another text"])
    with pytest.raises(InputError, match=r"a\.jsonl has changed since the corpus's files were listed"):
        check(*made)


def test_a_tokenizer_that_can_t_be_turned_back_is_no_reason_to_refuse(tmp_path):
    words = Tokenizer(models.BPE())
    words.normalizer, words.pre_tokenizer = normalizers.NFC(), pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.train_from_iterator(
        ["caf\u00e9 and"], trainers.BpeTrainer(initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    )
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="a").save_pretrained(str(tmp_path / "nfc"))
    source = jsonl(tmp_path / "a.jsonl", ["cafe\u0301 and " * 30_000, "short"])
    problems, compared = check(*corpus(tmp_path, tmp_path / "nfc", source))
    assert (problems, compared) == ([], 2)


@pytest.mark.slow
def test_the_script_reads_the_corpus_as_training_does(sound):
    spec, listing, manifest = sound
    folder = Path(listing.folder).parent
    for name, content in {"spec": spec, "sources": listing, "manifest": manifest}.items():
        write(folder / f"{name}.json", content)
    command = [sys.executable, commands.MEGABOA, "verify-corpus", "--out", str(folder / "out.json")]
    command += [
        part for name in ("spec", "sources", "manifest") for part in (f"--{name}", str(folder / f"{name}.json"))
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "its index is sound, 123 documents are those of the source" in done.stdout
    result = read_json(folder / "out.json")
    assert (result["compared"], result["decoded_exactly"]) == (123, 123)

    write(folder / "manifest.json", with_dataset(manifest, tokens=1))
    (folder / "out.json").unlink()
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and not (folder / "out.json").exists()
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: corpus c is not what its source says: ") and last.endswith("and call again")
