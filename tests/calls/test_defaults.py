"""megaboa.calls.defaults: account, partitions and cores that a call leaves open."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from snakemake.resources import Resources

from megaboa.calls.defaults import profile_resources, use_this_machine
from megaboa.errors import InputError
from megaboa.plan import places
from megaboa.scheduler.answers import UnreachableError
from megaboa.scheduler.slurm import partitions
from megaboa.scheduler.slurm.partitions import Association, Partition


def test_what_a_profile_says_by_name():
    raw = SimpleNamespace(raw="lab")
    assert profile_resources({"slurm_account": raw, "runtime": 120}) == {"slurm_account": "lab", "runtime": "120"}
    assert profile_resources(None) == profile_resources({}) == {}


@pytest.fixture
def cluster(monkeypatch, tmp_path):
    """Of two partitions with GPUs and one without; the site's file is yet to be written."""
    found = (Partition("all", 2, ("4 a100",), "1:00"), Partition("h100", 1, ("8 h100",), "2:00"), Partition("cpu", 9))
    monkeypatch.setattr(partitions, "ask", lambda known_account: partitions.Cluster((Association("0123"),), found))
    monkeypatch.setattr(places, "PROFILES", tmp_path)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    (tmp_path / "slurm").mkdir()
    for name in (*partitions.ACCOUNT_VARIABLES, partitions.PARTITION_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "slurm" / "site.yaml"


def of_a_profile(**values):
    words = [f"{name}={value}" for name, value in values.items()]
    return Resources.parse(words, allow_expressions=True, defaults="full")


def in_a_rule(resources, name):
    arguments = {"wildcards": {}, "input": [], "attempt": 1, "threads": 1, "rulename": "train", "async_run": None}
    return resources[name].evaluate(**arguments).value


def test_a_workflow_around_this_one_has_its_own_site(cluster):
    cluster.write_text("slurm_account: clone\n")
    assert places.said() == {"slurm_account": "clone"}
    Path("profiles", "slurm").mkdir(parents=True)
    assert places.said() == {}
    Path("profiles", "slurm", "site.yaml").write_text("slurm_account: mine\n")
    assert places.said() == {"slurm_account": "mine"}


def test_what_the_profile_leaves_open_is_found_and_goes_to_all_rules(cluster, monkeypatch):
    """Words that Snakemake would take for Python's, or for numbers, stay names."""
    monkeypatch.setenv("SBATCH_PARTITION", "all")
    given = of_a_profile(
        slurm_account="auto", slurm_partition="auto", gpu_partition="auto", gpu_option="auto", runtime=120
    )
    found = {"slurm_account": "0123", "slurm_partition": "cpu", "gpu_partition": "all", "gpu_option": "gpus-per-node"}
    assert profile_resources(given).items() >= found.items()
    assert {name: in_a_rule(given, name) for name in found} == found
    in_a_job = Resources.parse(given.args, allow_expressions=True)
    assert {name: in_a_rule(in_a_job, name) for name in found} == found
    assert profile_resources(in_a_job).items() >= found.items()
    assert profile_resources(of_a_profile(slurm_account="mine"))["slurm_account"] == "mine", "what is said, is taken"


def test_a_choice_that_slurm_leaves_ends_the_call_with_the_lines_to_paste(cluster):
    with pytest.raises(SystemExit) as ended:
        profile_resources(of_a_profile(slurm_account="auto", gpu_partition="auto"))
    said = str(ended.value)
    assert "site.yaml" in said and "SBATCH_PARTITION" in said and "megaboa site" in said
    assert "slurm_account:" not in said
    first = said.splitlines()[1].strip()
    assert first == 'gpu_partition: "all"  # 2 nodes of 4 a100, at most 1:00'
    cluster.write_text(f"{first}\n")
    assert profile_resources(of_a_profile(slurm_account="auto", gpu_partition="auto"))["gpu_partition"] == "all"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("gpu_partition: [", "can't be read"),
        ("- gpu_partition", "takes a line for each of slurm_account"),
        ("gpu: x", "takes a line for each of slurm_account"),
        ("gpu_partition: 0123", "gpu_partition: 83 is not a name: put it in quotes"),
        ("gpu_partition: [a, b]", "is not a name"),
    ],
)
def test_a_broken_file_of_the_site_is_named(cluster, text, why):
    cluster.write_text(text)
    with pytest.raises(InputError, match=rf"site\.yaml.*{why}"):
        profile_resources(of_a_profile(gpu_partition="auto"))


@pytest.mark.parametrize("text", ["", "# only words\n", "gpu_partition:\n", "gpu_partition: auto\n"])
def test_a_file_that_leaves_a_name_open_is_as_none(cluster, text):
    cluster.write_text(text)
    with pytest.raises(SystemExit, match="SLURM leaves you a choice"):
        profile_resources(of_a_profile(gpu_partition="auto"))


def test_where_slurm_cannot_be_asked_names_are_said_by_the_user(cluster, monkeypatch):
    def ask(known_account):
        raise UnreachableError("sinfo isn't there")

    monkeypatch.setattr(partitions, "ask", ask)
    with pytest.raises(SystemExit, match=r"gpu_partition can't be found.* \(sinfo isn't there"):
        profile_resources(of_a_profile(gpu_partition="auto"))
    cluster.write_text("{gpu_partition: mine}")
    found = profile_resources(of_a_profile(gpu_partition="auto", gpu_option="auto"))
    assert (found["gpu_partition"], found["gpu_option"]) == ("mine", "gpus-per-node")


def test_an_account_that_is_known_may_be_missing_from_the_accounting(cluster, monkeypatch):
    asked = []
    found = partitions.Cluster(None, (Partition("gpu", 1, ("8 h100",)),))
    monkeypatch.setattr(partitions, "ask", lambda known_account: asked.append(known_account) or found)
    profile_resources(of_a_profile(slurm_account="mine", gpu_partition="auto"))
    profile_resources(of_a_profile(gpu_partition="auto", slurm_account="auto"))
    monkeypatch.setenv("SLURM_ACCOUNT", "mine")
    profile_resources(of_a_profile(gpu_partition="auto", slurm_account="auto"))
    assert asked == [True, False, True]


@pytest.mark.parametrize(
    ("cores", "jobs", "given", "expected"),
    [
        (None, None, {}, {"_cores": len(os.sched_getaffinity(0)), "gpu_machine": 1}),
        (2, None, {"_cores": 2}, {"_cores": 2, "gpu_machine": 1}),
        (None, None, {"gpu_machine": 4}, {"_cores": len(os.sched_getaffinity(0)), "gpu_machine": 4}),
        (None, 200, {"_cores": None}, {"_cores": None}),  # a cluster's
    ],
)
def test_a_call_without_cores_has_this_machine_and_runs_take_turns_on_its_gpus(cores, jobs, given, expected):
    settings, limits = SimpleNamespace(cores=cores, nodes=jobs), dict(given)
    use_this_machine(settings, limits)
    assert limits == expected and settings.cores == expected["_cores"]
