"""megaboa.calls.dry_run: why a job would run."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from ordinary_user import as_ordinary_user
from snakemake.io import IOCache
from snakemake.persistence import MetadataRecord
from snakemake.persistence.file import FilePersistence

from megaboa.calls import dry_run
from megaboa.calls.dry_run import reason

NO_REASON = {
    **dict.fromkeys(("forced", "noio", "nooutput"), False),
    **{name: set() for name in ("missing_output", "incomplete_output", "updated_input", "updated_input_run")},
    "is_provenance_triggered": lambda: False,
}


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({"missing_output": {"x/train.json"}, "updated_input_run": {"x/data.json"}}, "not made yet"),
        ({"updated_input": {"x/run.json", "x/data.json"}, "updated_input_run": {"x/data.json"}}, "run.json changed"),
        ({"updated_input_run": {"x/data.json"}, "updated_input": {"x/data.json"}}, "after merge_corpus"),
        ({"is_provenance_triggered": lambda: True}, "its input files, parameters or command changed"),
        ({"noio": True}, "always runs"),
        ({"incomplete_output": {"x"}}, "its last call was cut off"),
    ],
)
def test_why_a_job_runs_in_a_few_words(found, said):
    assert why(found, ["x/run.json", "x/data.json"], ["x/run.json", "x/data.json"]) == said


@pytest.mark.parametrize(
    ("updated", "recorded", "now", "said"),
    [
        ({"t/new"}, ["t/a"], ["t/a", "t/new"], "new is new"),
        ({"t/n1", "t/n2", "t/a"}, ["t/a"], ["t/a", "t/n1", "t/n2"], "a changed; n1, n2 are new"),
        (set(), ["t/a", "t/b"], ["t/a"], "b is gone"),
        (set(), ["t/a", __file__], ["t/a"], "test_dry_run.py is no longer used"),
        ({"preview/run.json"}, ["runs/run.json"], ["preview/run.json"], "run.json changed"),  # of the plan
        ({"t/a"}, None, ["t/a", "t/b"], "a changed"),  # nothing was recorded
        (
            set(),
            ["results/e/models/a/source.json"],
            ["results/e/models/b/source.json"],
            "model b is new; model a is gone",
        ),
        ({"results/e/runs/a/run.json"}, ["results/e/data/c.json"], ["results/e/data/c.json"], "run.json changed"),
        (set(), ["results/e/runs/a/metrics/x.json", "results/e/runs/a/y"], [], "run a is gone"),
        (
            {"results/e/preview/runs/a/run.json"},
            ["results/e/runs/a/run.json"],
            ["results/e/preview/runs/a/run.json"],
            "run.json changed",
        ),
        (
            {"results/e/data/c.json"},
            ["results/e/data/c.json", "results/e/data/d/x.json"],
            ["results/e/data/c.json"],
            "c.json changed; corpus d is gone",
        ),
    ],
)
def test_inputs_that_changed_are_told_from_new_and_removed_ones(updated, recorded, now, said):
    assert why({"updated_input": updated, "is_provenance_triggered": lambda: True}, recorded, now) == said


def why(found, recorded, now):
    before = [SimpleNamespace(rule=SimpleNamespace(name=name)) for name in ("merge_corpus", "image")]
    dag = SimpleNamespace(
        reason=lambda job: SimpleNamespace(**{**NO_REASON, **found}),
        job_dependencies=lambda job: before,
        needrun=lambda job: job is before[0],
        workflow=SimpleNamespace(persistence=SimpleNamespace(input=lambda path: recorded)),
    )
    return reason(dag, SimpleNamespace(input=now, output=["x/out.json"]))


@pytest.mark.parametrize(
    ("asked", "targets", "rules", "said"),
    [
        ({}, [], [], "its last call was cut off"),  # Snakemake forces what a killed call has left
        ({}, [], ["train"], "forced"),  # -F or -R train
        ({"forcerun": ["x/train.json"]}, [], [], "forced"),
        ({"forcerun": ["y/train.json"]}, ["x/train.json"], [], "its last call was cut off"),
        ({"forcetargets": True}, ["x/train.json"], [], "forced"),
    ],
)
def test_what_the_user_did_not_force_is_not_called_forced(asked, targets, rules, said):
    settings = SimpleNamespace(**{"forcerun": [], "forcetargets": False, **asked})
    dag = SimpleNamespace(
        reason=lambda job: SimpleNamespace(**{**NO_REASON, "forced": True}),
        workflow=SimpleNamespace(dag_settings=settings),
        targetfiles=targets,
        forcerules=rules,
    )
    assert reason(dag, SimpleNamespace(rule="train", output=["x/train.json"])) == said


SETTINGS = SimpleNamespace(max_checksum_file_size=0)
DAG = SimpleNamespace(workflow=SimpleNamespace(iocache=IOCache(1), dag_settings=SETTINGS))


@pytest.fixture
def planning(monkeypatch):
    for name in ("__init__", "save_iocache"):
        monkeypatch.setattr(FilePersistence, name, getattr(FilePersistence, name))  # and puts it back
    dry_run.with_or_without_writing()


def test_snakemake_plans_in_a_folder_where_it_cannot_write(planning, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    FilePersistence()._write_record("results/a.json", MetadataRecord(rule="made"))  # by its owner
    Path(".snakemake", "iocache").rmdir()
    for place in (Path(".snakemake"), tmp_path):
        place.chmod(0o555)
    with as_ordinary_user(tmp_path):
        looking = FilePersistence(dag=DAG, path=None)
        looking.save_iocache()
        assert not looking.path.is_relative_to(tmp_path) and looking._read_record("results/a.json").rule == "made"


def test_snakemake_plans_on_a_full_disk(planning, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path(".snakemake/iocache").mkdir(parents=True)
    Path(".snakemake/iocache/latest.pkl").symlink_to("/dev/full")
    FilePersistence(dag=DAG).save_iocache()
