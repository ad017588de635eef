"""The profiles, as Snakemake combines them."""

from pathlib import Path

import pytest
import yaml

from megaboa.calls.defaults import profile_resources
from megaboa.plan.places import AUTO
from megaboa.scheduler.slurm.partitions import NAMES

PROFILES = Path(__file__).parents[1] / "profiles"


def read(name):
    return yaml.safe_load((PROFILES / name / "config.yaml").read_text())


def test_the_default_profile_holds_only_what_must_hold_everywhere():
    triggers = ["mtime", "params", "input", "software-env"]
    assert read("default") == {"nolock": True, "rerun-incomplete": True, "rerun-triggers": triggers}


@pytest.mark.parametrize("name", ["local", "slurm"])
def test_one_failed_run_stops_no_other_and_nothing_is_retried_blindly(name):
    profile = read(name)
    assert profile["keep-going"] is True
    assert profile.get("retries", 0) == 0


def test_slurm_is_reachable_at_the_root():
    link = PROFILES.parent / "slurm"
    assert link.is_symlink() and (link / "config.yaml").samefile(PROFILES / "slurm" / "config.yaml")
    profile = read("slurm")
    assert profile["executor"] == "slurm" and profile["slurm-status-command"] == "squeue"


def test_slurm_keeps_runs_alive_and_an_outage_loses_none():
    profile = read("slurm")
    assert profile["slurm-requeue"] is True and profile["retries"] == 0
    seconds = profile["slurm-status-attempts"] / profile["max-status-checks-per-second"]
    assert seconds >= 3600


def test_three_names_are_found_unless_somebody_fills_them_in():
    text = (PROFILES / "slurm" / "config.yaml").read_text()
    resources = read("slurm")["default-resources"]
    assert {name for name, value in resources.items() if value == AUTO} == set(NAMES)
    filled = yaml.safe_load(text.replace(": auto", ": lab"))["default-resources"]
    assert profile_resources(filled) == {name: str(value) for name, value in filled.items()}


def test_this_machine_lets_one_run_at_a_time_onto_its_gpus():
    assert read("local")["resources"] == ["gpu_machine=1"]
