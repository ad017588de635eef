"""The profiles, as Snakemake combines them."""

from pathlib import Path

import pytest
import yaml

PROFILES = Path(__file__).parents[1] / "profiles"


def read(name):
    return yaml.safe_load((PROFILES / name / "config.yaml").read_text())


def test_the_default_profile_holds_only_what_must_hold_everywhere():
    assert read("default") == {"nolock": True, "rerun-incomplete": True}


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
