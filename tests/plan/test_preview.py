"""What a call writes: a dry run touches nothing that a job reads."""

import errno
from pathlib import Path

import pytest

from megaboa import files
from megaboa.calls.configuration import looks_only
from megaboa.calls.plan_files import write_plan
from megaboa.files import read_json
from megaboa.plan.shared import Shared
from megaboa.run import submitted


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.setenv(submitted.VARIABLE, "")
    return tmp_path / "results"


def write(plan, results, tmp_path, looks, mine=True):
    return write_plan(plan, Shared(plan, results), [tmp_path / "small.yaml"], looks, mine, "snakemake")


def contents(results):
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in results.rglob("*.*") if path.is_file()}


def test_before_the_first_call_a_dry_run_writes_the_plan_where_users_look(plan_of, results, tmp_path):
    assert write(plan_of(training__train_iters=10), results, tmp_path, looks=True) == ({}, [])
    assert write(plan_of(training__train_iters=20), results, tmp_path, looks=True) == ({}, [])
    assert read_json(results / "small/runs/run/run.json")["training"]["train_iters"] == 20
    assert not (results / "small" / "calls").exists()


def test_after_it_a_dry_run_changes_no_file_that_was_there(plan_of, results, tmp_path):
    _, (config,) = write(plan_of(training__train_iters=10), results, tmp_path, looks=False)
    assert config.read_bytes() == (tmp_path / "small.yaml").read_bytes()
    before = contents(results)
    preview, none = write(plan_of(training__train_iters=20), results, tmp_path, looks=True)
    small = results / "small"
    assert preview[str(small / "runs/run/run.json")] == str(small / "preview/runs/run/run.json")
    assert str(small / "plan.tsv") in preview and str(small / "specs/models/dense.json") not in preview and none == []
    assert read_json(small / "preview/runs/run/run.json")["training"]["train_iters"] == 20
    assert {path: before[path] for path in before} == {
        path: seen for path, seen in contents(results).items() if "preview" not in path.parts
    }
    assert write(plan_of(training__train_iters=10), results, tmp_path, looks=True) == ({}, []), "nothing differs"
    assert not (small / "preview").exists()


def test_a_dry_run_shows_as_changed_what_replaced_texts_make_again(plan_of, results, tmp_path, monkeypatch, capsys):
    plan = plan_of("tokenizers: {bpe: {train_on: text}}\ncorpora: {text: {source: python-stdlib}}\n")
    write(plan, results, tmp_path, looks=False)
    name = "specs/corpora/text.json"
    monkeypatch.setattr("megaboa.calls.snakemake_records.check", lambda *_: [name])
    preview, _ = write(plan, results, tmp_path, looks=True)
    small = results / "small"
    assert preview == {str(small / name): str(small / "preview" / name)}
    assert read_json(small / "preview" / name) == read_json(small / name)
    assert "from the last call's" not in capsys.readouterr().err, "the plan is the same"


def test_the_preview_of_an_archive_lies_elsewhere(plan_of, results, tmp_path, monkeypatch, capsys):
    write(plan_of(training__train_iters=10), results, tmp_path, looks=False)
    before = contents(results)
    monkeypatch.setattr("megaboa.calls.plan_files.closed", lambda folder: folder)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    preview, _ = write(plan_of(training__train_iters=20), results, tmp_path, looks=True, mine=False)
    changed = Path(preview[str(results / "small/runs/run/run.json")])
    assert changed.parts[-4].startswith("megaboa-preview-") and changed.is_relative_to(tmp_path)
    assert read_json(changed)["training"]["train_iters"] == 20 and contents(results) == before
    assert capsys.readouterr().err.rstrip().endswith("files differ from the last call's")


def test_the_preview_on_a_full_disk_lies_elsewhere(plan_of, results, tmp_path, monkeypatch):
    write(plan_of(training__train_iters=10), results, tmp_path, looks=False)
    write_bytes = files.write_bytes

    def full(path, data, **options):
        if path.is_relative_to(results):
            raise OSError(errno.ENOSPC, "No space left on device")
        write_bytes(path, data, **options)

    monkeypatch.setattr(files, "write_bytes", full)
    preview, _ = write(plan_of(training__train_iters=20), results, tmp_path, looks=True)
    changed = Path(preview[str(results / "small/runs/run/run.json")])
    assert not changed.is_relative_to(results) and read_json(changed)["training"]["train_iters"] == 20


def test_nothing_differs_from_the_last_call_where_there_was_none(plan_of, results, tmp_path, capsys):
    preview, _ = write(plan_of(), results, tmp_path, looks=True, mine=False)
    assert str(results / "small" / "plan.tsv") in preview and capsys.readouterr().err == ""


def test_a_call_writes_the_plan_and_forgets_what_was_looked_at(plan_of, results, tmp_path):
    write(plan_of(training__train_iters=10), results, tmp_path, looks=False)
    write(plan_of(training__train_iters=20), results, tmp_path, looks=True)
    write(plan_of(training__train_iters=30), results, tmp_path, looks=False)
    assert read_json(results / "small/runs/run/run.json")["training"]["train_iters"] == 30
    assert not (results / "small/preview").exists()
    assert len(list((results / "small" / "calls").iterdir())) == 2


def test_while_somebody_else_works_a_look_is_possible_and_a_call_writes_nothing(plan_of, results, tmp_path):
    write(plan_of(training__train_iters=10), results, tmp_path, looks=False)
    before = contents(results)
    assert write(plan_of(training__train_iters=20), results, tmp_path, looks=False, mine=False) == ({}, [])
    assert contents(results) == before
    preview, _ = write(plan_of(training__train_iters=20), results, tmp_path, looks=True, mine=False)
    assert str(results / "small/runs/run/run.json") in preview


def test_snakemakes_other_ways_to_look():
    assert looks_only(True, ["snakemake"]) and looks_only(False, ["snakemake", "--dag"])
    assert not looks_only(False, ["snakemake", "--cores", "2", "report"])
