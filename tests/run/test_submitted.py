"""megaboa.run.submitted: what a call's jobs train, whatever is planned after it."""

import os

import pytest

from megaboa.files import write_json
from megaboa.paths import RunFolder
from megaboa.run import submitted
from megaboa.run.inputs import UnusableInputError


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.delenv(submitted.VARIABLE, raising=False)
    return tmp_path / "results" / "my"


def line(name, lr):
    return {"name": name, "run": {"optimizer": {"lr": lr}}, "launch": {"nodes": 1}, "profile": {"tool": "none"}}


def call(results, config, *runs):
    """A call; the environment of its jobs is set."""
    copies = submitted.record(results, [config], runs, "snakemake")
    submitted.submit_from(copies[0])
    return copies[0]


def test_a_job_reads_what_was_submitted_and_not_what_the_files_say_later(results, tmp_path):
    config = tmp_path / "my.yaml"
    config.write_text("lr: 1")
    kept = call(results, config, line("a", 1), line("b", 2))
    config.write_text("lr: 3")
    run = results / "runs" / "b"
    write_json(run / "run.json", {"optimizer": {"lr": 3}})
    found = submitted.folder_of(run)
    assert found.run.optimizer == {"lr": 2} and found.launch.nodes == 1 and found.profile.tool == "none"
    assert kept.read_text() == "lr: 1" and kept.name == "my.yaml"
    assert RunFolder(run).run.optimizer == {"lr": 3}


def test_the_same_call_again_is_kept_once_and_another_beside_it(results, tmp_path):
    config = tmp_path / "my.yaml"
    config.write_text("lr: 1")
    first = call(results, config, line("a", 1))
    assert call(results, config, line("a", 1)) == first
    assert call(results, config, line("a", 2)) != first
    assert len(list((results / "calls").iterdir())) == 2


def test_two_files_of_one_name_are_both_kept(results, tmp_path):
    paths = [tmp_path / folder / "my.yaml" for folder in ("x", "y")]
    for path in paths:
        path.parent.mkdir()
        path.write_text(path.parent.name)
    assert [copy.read_text() for copy in submitted.record(results, paths, [], "snakemake")] == ["x", "y"]


def test_outside_a_job_the_files_count_and_in_a_job_of_another_experiment_too(results, tmp_path):
    run = tmp_path / "results" / "other" / "runs" / "a"
    write_json(run / "run.json", {"optimizer": {"lr": 5}})
    assert submitted.folder_of(run).run.optimizer == {"lr": 5}
    config = tmp_path / "my.yaml"
    config.write_text("")
    call(results, config, line("a", 1))
    assert submitted.folder_of(run).run.optimizer == {"lr": 5}
    submitted.submit_from(config)  # a configuration that no call has kept
    assert submitted.VARIABLE not in submitted.os.environ


def test_who_insists_may_begin_again(results, tmp_path):
    run = results / "runs" / "a"
    write_json(run / "run.json", {"optimizer": {"lr": 5}})
    assert not submitted.folder_of(run).may_restart and submitted.folder_of(run, restart=True).may_restart
    config = tmp_path / "my.yaml"
    config.write_text("")
    call(results, config, line("a", 1))
    assert not submitted.folder_of(run).may_restart and submitted.folder_of(run, restart=True).may_restart
    call(results, config, {**line("a", 1), "restart": True})
    assert submitted.folder_of(run).may_restart


def test_a_run_that_the_call_does_not_know_is_an_error(results, tmp_path):
    config = tmp_path / "my.yaml"
    config.write_text("")
    call(results, config, line("a", 1))
    with pytest.raises(UnusableInputError, match="no run 'new'"):
        submitted.folder_of(results / "runs" / "new")


def test_the_last_call_is_the_last_that_was_made_also_where_it_submits_what_an_earlier_one_did(tmp_path):
    results = tmp_path / "results" / "my"
    assert submitted.last(results) == submitted.Submitted([], "snakemake")
    config = tmp_path / "my.yaml"
    for time, text in enumerate(("a: 1", "a: 2", "a: 1")):
        config.write_text(text)
        [copy] = submitted.record(results, [config], [], f"snakemake {time}")
        os.utime(copy.parents[2] / "command.txt", (time, time))
        assert submitted.last(results) == submitted.Submitted([copy], f"snakemake {time}")
        assert copy.read_text() == text
    assert len(list((results / "calls").iterdir())) == 2
