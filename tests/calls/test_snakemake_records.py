"""megaboa.calls.snakemake_records: what Snakemake remembers about results that aren't those that it knows."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from snakemake.io import IOFile
from snakemake.persistence.file import FilePersistence

from megaboa.calls import snakemake_records
from megaboa.files import write_json
from megaboa.paths import ExperimentFolder
from megaboa.records import SourceFile, Sources, write


@pytest.fixture
def shared(tmp_path, monkeypatch):
    """What is asked of a plan with a corpus, on which its tokenizer is trained."""
    monkeypatch.chdir(tmp_path)
    paths = ExperimentFolder(Path("results/small"))
    paths.calls.mkdir(parents=True)
    tokenizers = {"bpe": SimpleNamespace(train_on="text"), "other": SimpleNamespace(train_on=None)}
    plan = SimpleNamespace(experiment=SimpleNamespace(tokenizers=tokenizers))
    return SimpleNamespace(folder=paths.path, paths=paths, corpora=["text"], plan=plan)


@pytest.fixture
def records(shared):
    """Snakemake's own, of an output of this experiment with a long name, and of one of another."""
    kept = FilePersistence()
    names = [f"{shared.folder}/{'long-' * 60}/train.json", "results/other/train.json"]
    for name in names:
        kept._io_write(kept._metadata_path, {"rule": "train"}, kept._get_key(IOFile(name)))
    return lambda: [name for name in names if kept._io_read(kept._metadata_path, name)]


def test_results_as_the_last_call_left_them_keep_their_records(shared, records, capsys):
    for _ in range(3):
        snakemake_records.check(shared, looks=False)
    assert len(records()) == 2 and not capsys.readouterr().err


def test_results_from_a_backup_lose_theirs(shared, records, capsys):
    snakemake_records.check(shared, looks=False)
    mark = shared.folder / snakemake_records.MARK
    backup = mark.read_text()
    snakemake_records.check(shared, looks=False)
    mark.write_text(backup)
    snakemake_records.check(shared, looks=True)
    assert len(records()) == 2, "a dry run changes nothing"
    assert "what is older than its inputs would be made again" in capsys.readouterr().err
    snakemake_records.check(shared, looks=False)
    assert records() == ["results/other/train.json"]


@pytest.mark.parametrize(
    ("size", "changed", "recorded", "noticed"),
    [
        (5, 50, 50, False),
        (4, 50, 50, True),
        (5, 40, 50, True),
        (5, 50, 0, False),  # not recorded
        (4, 200, 50, False),  # Snakemake notices a newer file
    ],
)
def test_an_older_text_of_another_size_or_time_makes_its_corpus_again(shared, capsys, size, changed, recorded, noticed):
    text, manifest, trained = Path("text.jsonl"), shared.paths.corpus("text").sources, shared.paths.tokenizer("bpe")
    text.write_bytes(bytes(size))
    os.utime(text, (changed, changed))
    read = SourceFile(path="text.jsonl", kind="jsonl", size=5, changed=recorded * 10**9)
    files = (read, SourceFile(path="gone", kind="jsonl", size=5))
    write(manifest, Sources(name="text", files=files, tokenizer=None, identity={}, folder="store"))
    write_json(trained, {})
    for path in (manifest, trained):
        os.utime(path, (100, 100))
    shown = ["specs/corpora/text.json", "specs/tokenizers/bpe.json"] if noticed else []
    assert snakemake_records.check(shared, looks=True) == shown
    assert {path.stat().st_mtime for path in (manifest, trained)} == {100}, "a dry run changes nothing"
    assert ("corpus text would be made again" in capsys.readouterr().err) == noticed
    assert snakemake_records.check(shared, looks=False) == shown
    assert {path.stat().st_mtime for path in (manifest, trained)} == {1 if noticed else 100}
