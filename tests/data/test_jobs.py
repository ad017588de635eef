"""The jobs that make a corpus, as processes: what they leave, and what becomes of it when they are disturbed."""

import contextlib
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from making import TEXTS, documents, jsonl, make, payload, sentences, specification

import megaboa
from megaboa.data import jobs
from megaboa.errors import InputError
from megaboa.files import folder_digests, read_json, write_json
from megaboa.records import BadRecords, Corpus, CorpusSpec, ShardMade, plain, read, write

MEGABOA = Path(megaboa.__file__).parent


def command(name, *arguments):
    return [sys.executable, str(MEGABOA), name, *map(str, arguments)]


def run(folder, name, *arguments, **environment):
    return subprocess.run(
        command(name, *arguments), cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True
    )


def steps(folder, shards):
    """The jobs of a corpus, as its rules call them."""
    spec, listing = ("--spec", folder / "spec.json"), ("--sources", folder / "sources.json")
    count = ("--shards", shards)
    yield command("list-sources", *spec, "--out", folder / "sources.json")
    for shard in range(shards):
        yield command("tokenize-shard", *spec, *listing, *count, "--shard", shard, "--out", folder / f"{shard}.json")
    yield command("merge-corpus", *spec, *listing, *count, "--out", folder / "data" / "c.json")


def left(folder):
    """What lies in the store beside finished corpora, their tokenizers and lock files."""
    names = {path.name for path in (folder / "store" / "corpora" / "c").iterdir()}
    made = {name for name in names if len(name) == 12}
    return names - made - {f".{name}.lock" for name in made} - {f"{name}.tokenizer.json" for name in made}


@pytest.mark.parametrize("shards", [1, 3])
def test_the_manifest_says_what_the_corpus_is_and_what_it_was_made_of(bpe, loaded, tmp_path, shards):
    for number in range(2):
        jsonl(tmp_path / f"{number}.jsonl", TEXTS[number::2])
    spec = specification(tmp_path, tmp_path / "*.jsonl", bpe)
    manifest = make(spec, shards)
    assert [(Path(s.path).name, s.kind, s.documents) for s in manifest.sources] == [
        ("0.jsonl", "jsonl", 30),
        ("1.jsonl", "jsonl", 30),
    ]
    assert manifest.tokenizer_digest == loaded.digest and manifest.source == spec.source
    assert manifest.documents == 60 and manifest.bad == BadRecords(records=0, samples=())
    assert manifest.compared.documents >= 20 and len(manifest.encoders) == 1
    assert manifest.identity["append_eod"] is True and "files" not in manifest.identity
    assert "by_file" not in plain(manifest)["datasets"][0] and len(manifest.digest) == 64
    assert left(tmp_path) == set()


@pytest.mark.parametrize(
    ("changes", "same"),
    [
        ({"encoder": "tokenizers"}, True),
        ({"append_eod": False}, False),
        ({"prepend_bos": True}, False),
        ({"limit": 5}, False),
        ({"min_characters": 5}, False),
        ({"deduplicate": True}, False),
        ({"on_bad_record": "skip"}, False),
    ],
)
def test_the_identity_follows_what_decides_the_tokens(bpe, tmp_path, changes, same):
    spec = specification(tmp_path, jsonl(tmp_path / "a.jsonl", TEXTS), bpe)
    folders = [jobs.list_sources(replace(spec, **more), 1).folder for more in ({}, changes)]
    assert (folders[0] == folders[1]) is same


@pytest.mark.parametrize("deduplicate", [False, True])
def test_tokens_for_unknown_text_are_counted(tmp_path, deduplicate):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<unk>": 0, "known": 1, "</s>": 2}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>").save_pretrained(str(tmp_path / "words"))
    texts = ["known lost lost", "lost known known", "known known"]
    spec = specification(
        tmp_path, jsonl(tmp_path / "a.jsonl", texts), tmp_path / "words", deduplicate=deduplicate, encoder="tokenizers"
    )
    (dataset,) = make(spec).datasets
    assert (dataset.tokens, dataset.unknown) == (8 + 3, 3)


def test_work_that_is_there_is_not_done_again(bpe, tmp_path):
    spec = specification(tmp_path, jsonl(tmp_path / "a.jsonl", TEXTS), bpe)
    listing = jobs.list_sources(spec, 1)
    first = jobs.make_shard(spec, listing, 0, 2)
    written = {path: path.stat().st_mtime_ns for path in Path(first.folder).iterdir()}
    assert jobs.make_shard(spec, listing, 0, 2) == first
    assert written == {path: path.stat().st_mtime_ns for path in Path(first.folder).iterdir()}
    jobs.make_shard(spec, listing, 1, 2)
    manifest = jobs.merge_shards(spec, listing, 2)
    assert jobs.make_shard(spec, listing, 0, 2) == ShardMade(folder=None)
    assert jobs.make_shard(spec, listing, 4, 7) == ShardMade(folder=None)
    assert jobs.merge_shards(spec, listing, 2) == manifest


def test_shards_of_another_number_are_removed_by_the_merge_that_made_them_needless(bpe, tmp_path):
    spec = specification(tmp_path, jsonl(tmp_path / "a.jsonl", TEXTS), bpe)
    listing = jobs.list_sources(spec, 1)
    jobs.make_shard(spec, listing, 1, 3)
    make(spec, 2)
    assert left(tmp_path) == set()


@pytest.mark.slow
def test_the_scripts_from_text_to_a_linked_corpus(tmp_path):
    jsonl(tmp_path / "raw.jsonl", [*TEXTS, b"{"])
    text = {
        "name": "raw",
        "text_key": "text",
        "limit": None,
        "separator": None,
        "source": "raw.jsonl",
        "split": "train",
    }
    text |= {"subset": None, "revision": None, "max_document_mb": 1, "on_bad_record": "skip"}
    write_json(tmp_path / "bpe.json", {"name": "bpe", "store": "store", "train_on": text, "vocab_size": 280})
    done = run(tmp_path, "train-tokenizer", "--spec", "bpe.json", "--out", "words.json")
    assert done.returncode == 0, done.stderr
    spec = specification(tmp_path, tmp_path / "raw.jsonl", "", on_bad_record="skip")
    trained = {"kind": "manifest", "manifest": str(tmp_path / "words.json")}
    write(tmp_path / "spec.json", replace(spec, tokenizer=trained))

    def call():
        for step in steps(tmp_path, 2):
            done = subprocess.run(step, cwd=tmp_path, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
        return done.stdout

    assert "left out, as they can't be used: 1 records, the first of them:\n  " in call()
    out = tmp_path / "data" / "c.json"
    manifest = read(Corpus, out)
    assert (manifest.documents, manifest.dtype) == (60, "uint16")
    assert (tmp_path / "data" / "c.bin").is_symlink()
    assert documents(replace(manifest.datasets[0], prefix=str(tmp_path / "data" / "c"))) == documents(
        manifest.datasets[0]
    )

    # Again: the payload stays, the manifest is written again and the same.
    first = (tmp_path / "data" / "c.bin").resolve()
    written, said = first.stat().st_mtime_ns, out.read_text()
    out.unlink()
    call()
    assert (first.stat().st_mtime_ns, out.read_text()) == (written, said)

    # Another text under the same name: another payload, and the old one is left alone.
    jsonl(tmp_path / "raw.jsonl", [*TEXTS, "one more", b"{"])
    call()
    assert read_json(out)["documents"] == 61
    assert (tmp_path / "data" / "c.bin").resolve() != first and first.stat().st_mtime_ns == written
    assert left(tmp_path) == set()


@pytest.mark.slow
def test_a_mistake_ends_in_one_sentence_and_no_manifest(bpe, tmp_path):
    source = jsonl(tmp_path / "a.jsonl", ["good", {"content": "x"}])
    write(tmp_path / "spec.json", specification(tmp_path, source, "nobody/no-such-tokenizer"))
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")}
    done = run(tmp_path, "list-sources", "--spec", "spec.json", "--out", "sources.json", **offline)
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("error: corpora.c.tokenizer: 'nobody/no-such-tokenizer' is not in the local cache")

    write(tmp_path / "spec.json", specification(tmp_path, "hf:owner/name", bpe))
    done = run(tmp_path, "list-sources", "--spec", "spec.json", "--out", "sources.json", **offline)
    assert done.returncode == 1 and not (tmp_path / "sources.json").exists()
    assert done.stderr.splitlines()[-1].startswith(
        "error: corpus source hf:owner/name: the hub can't be reached from here"
    )

    write(tmp_path / "spec.json", specification(tmp_path, source, bpe))
    listing, shard, *_ = steps(tmp_path, 1)
    assert subprocess.run(listing, capture_output=True).returncode == 0
    done = subprocess.run(shard, capture_output=True, text=True)
    assert done.returncode == 1 and not (tmp_path / "0.json").exists()
    assert done.stderr == (
        f"error: {source}:2: no key 'text'; set the corpus's `text_key` to one of ['content']; "
        "fix or remove the record, or set corpora.c.on_bad_record to `skip`\n"
    )


@pytest.mark.parametrize(("megabytes", "shards_fit"), [(1, False), (6, True)])
def test_a_full_disk_is_one_sentence_leaves_nothing_and_with_more_room_it_goes_on(
    bpe, tmp_path, small_disk, megabytes, shards_fit
):
    source = jsonl(tmp_path / "a.jsonl", sentences(400) * 140)
    quiet = make(specification(tmp_path, source, bpe))
    assert 3e6 < len(payload(quiet)[0]) < 6e6
    disk = small_disk(megabytes)
    spec = specification(disk, source, bpe)
    listing = jobs.list_sources(spec, 1)
    if shards_fit:
        jobs.make_shard(spec, listing, 0, 1)
    before = folder_digests(disk)
    with pytest.raises(InputError) as error:
        if shards_fit:
            jobs.merge_shards(spec, listing, 1)
        else:
            jobs.make_shard(spec, listing, 0, 1)
    assert "the disk is full; no partial file was kept. Free some space, or set `store`" in str(error.value)
    after = {name: digest for name, digest in folder_digests(disk).items() if not name.endswith(".lock")}
    assert after == {name: digest for name, digest in before.items() if not name.endswith(".lock")}
    small_disk(64)
    assert payload(make(spec)) == payload(quiet)
    assert left(disk) == set()


@pytest.mark.slow
def test_a_disk_of_results_that_is_full_is_one_sentence_and_with_more_room_it_goes_on(bpe, tmp_path, small_disk):
    write(tmp_path / "spec.json", specification(tmp_path, jsonl(tmp_path / "a.jsonl", TEXTS), bpe))
    disk = small_disk(1)
    spec, listing = ("--spec", tmp_path / "spec.json"), ("--sources", tmp_path / "sources.json")
    jobs_of_it = [
        command("list-sources", *spec, "--out", disk / "sources.json"),
        command("tokenize-shard", *spec, *listing, "--shard", 0, "--shards", 1, "--out", disk / "0.json"),
        command("merge-corpus", *spec, *listing, "--shards", 1, "--out", disk / "c.json"),
    ]
    write(tmp_path / "sources.json", jobs.list_sources(read(CorpusSpec, tmp_path / "spec.json"), 1))
    for job in jobs_of_it:
        with contextlib.suppress(OSError):
            (disk / "filler").write_bytes(bytes(2 << 20))
        done = subprocess.run(job, capture_output=True, text=True)
        last = done.stderr.splitlines()[-1]
        assert done.returncode == 1 and "Traceback" not in done.stderr
        assert last.startswith(f"error: making {job[-1]}: the disk is full; no partial file was kept. Free some")
        (disk / "filler").unlink()
        subprocess.run(job, check=True, capture_output=True)
    assert read_json(disk / "c.json")["documents"] == len(TEXTS)


def test_a_limit_on_the_size_of_files_is_one_sentence(bpe, tmp_path):
    source = jsonl(tmp_path / "a.jsonl", sentences(400) * 140)
    write(tmp_path / "spec.json", specification(tmp_path, source, bpe))
    write(tmp_path / "sources.json", jobs.list_sources(read(CorpusSpec, tmp_path / "spec.json"), 1))
    _, shard, _ = steps(tmp_path, 1)

    def limited():
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))

    done = subprocess.run(shard, capture_output=True, text=True, preexec_fn=limited)
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1, done.stderr
    assert "files may not be that large here (`ulimit -f`); no partial file was kept" in done.stderr
    assert not list((tmp_path / "store").rglob("*.bin"))


RACE = """
import sys, time
from dataclasses import replace
from making import make
from megaboa.records import CorpusSpec, read
folder, start = sys.argv[1:]
spec = read(CorpusSpec, f"{folder}/spec.json")
time.sleep(max(0, float(start) - time.time()))
for number in range(25):
    make(replace(spec, limit=1000 + number), 3)
"""


@pytest.mark.slow
def test_several_processes_that_make_the_same_corpora_at_once_all_succeed(bpe, tmp_path):
    source = jsonl(tmp_path / "a.jsonl", TEXTS)
    spec = specification(tmp_path, source, bpe)
    write(tmp_path / "spec.json", spec)
    path = f"{os.environ['PYTHONPATH']}{os.pathsep}{Path(__file__).parent}"
    call = [sys.executable, "-c", RACE, str(tmp_path), str(time.time() + 15)]
    racers = [
        subprocess.Popen(call, env={**os.environ, "PYTHONPATH": path}, stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    said = [racer.communicate()[1] for racer in racers]
    assert [racer.returncode for racer in racers] == [0, 0, 0], said
    made = [path for path in (tmp_path / "store" / "corpora" / "c").iterdir() if len(path.name) == 12]
    assert len(made) == 25 and left(tmp_path) == set()
    quiet = payload(make(specification(tmp_path / "quiet", source, bpe), 3))
    assert {(folder / "c.bin").read_bytes() for folder in made} == {quiet[0]}


def test_what_a_killed_listing_left_is_removed_by_the_next(bpe, tmp_path):
    spec = specification(tmp_path, jsonl(tmp_path / "a.jsonl", TEXTS), bpe)
    folder = Path(make(spec, 1).datasets[0].prefix).parent
    half = folder.with_name(f".{folder.name}.tokenizer.json.1.2.tmp")
    half.write_text("{")
    assert left(tmp_path) == {half.name}
    jobs.list_sources(spec, 1)
    assert left(tmp_path) == set()


@pytest.mark.slow
def test_killed_at_random_moments_and_called_again_it_makes_the_same_corpus(bpe, tmp_path):
    source = jsonl(tmp_path / "a.jsonl", sentences(1000) * 50)
    names = ("c.bin", "c.idx")
    quiet = tmp_path / "quiet"
    write(quiet / "spec.json", specification(quiet, source, bpe, deduplicate=False))
    took = []
    for step in steps(quiet, 3):
        began = time.monotonic()
        assert subprocess.run(step, capture_output=True).returncode == 0
        took.append(time.monotonic() - began)
    expected = [(quiet / "data" / name).read_bytes() for name in names]

    chance, killed, rounds = random.Random(), 0, 0
    while killed < 20:
        folder, rounds = tmp_path / str(rounds), rounds + 1
        write(folder / "spec.json", specification(folder, source, bpe))
        for step, seconds in zip(steps(folder, 3), took, strict=True):
            tries = chance.choice([0, 1, 1, 2]) if killed < 20 else 0
            for _ in range(tries):
                process = subprocess.Popen(step, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
                time.sleep(chance.uniform(0.3, 1.05) * seconds)
                process.send_signal(signal.SIGKILL)
                killed += process.wait() == -signal.SIGKILL
            done = subprocess.run(step, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
        assert [(folder / "data" / name).read_bytes() for name in names] == expected
        assert left(folder) == set()
        manifest = read(Corpus, folder / "data" / "c.json")
        payload_folder = Path(manifest.datasets[0].prefix).parent
        assert {path.name for path in payload_folder.iterdir()} == {*names, "c.origins", jobs.FACTS}


def peak_megabytes(call):
    process = subprocess.Popen(call, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return usage.ru_maxrss / 1024


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_memory_does_not_grow_with_the_corpus(bpe, tmp_path, name):
    """Not even if no word comes twice: gigatoken remembers each."""
    peaks = []
    for megabytes in (60, 300):
        folder = tmp_path / str(megabytes)
        folder.mkdir()
        with (folder / "a.jsonl").open("w") as stream:
            for number in range(megabytes):
                words = " ".join(
                    f"{word * 2654435761 % 2**40:x}" for word in range(number * 90_000, (number + 1) * 90_000)
                )
                stream.write(json.dumps({"text": words}) + "\n")
        if name.endswith(".gz"):
            subprocess.run(["gzip", "-1", str(folder / "a.jsonl")], check=True)
        write(folder / "spec.json", specification(folder, folder / name, bpe, deduplicate=True))
        peaks.append([peak_megabytes(step) for step in steps(folder, 1)])
        (folder / name).unlink()
    for small, large in zip(*peaks, strict=True):
        assert large < 1.25 * small + 100, peaks
