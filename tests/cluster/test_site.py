"""The workflow on a cluster as its user sees it: the profile, several hosts, and the plan."""

from __future__ import annotations

import pytest
from site_clone import PROFILE, SHORT

pytestmark = [pytest.mark.slow, pytest.mark.walk]


def test_the_default_experiment_on_two_hosts(clone):
    """Of its layouts those with the most to say to each other; the others are those of test_starting_ranks.py."""
    config = clone.default_on_two_hosts(["dp1", "tp2-sp", "moe-dp1", "moe-ep2"])
    clone.snakemake("--configfile", config, timeout=1500)
    checks = clone.json("tiny", "report", "checks.json")
    assert checks["state"] == "PASS", checks
    for run in ("tp2-sp", "moe-ep2"):
        (start,) = clone.starts("tiny", run)
        assert len(start["nodes"]) == 2 and start["job"]
    logs = list((clone.path / "logs" / "slurm").rglob("*.log"))
    assert not [path for path in logs if "summarize" in str(path) or "report" in str(path)], "chores wait in no queue"


def test_a_dry_run_tells_what_would_be_submitted(clone):
    config = clone.experiment("dry", {"wide": f"{SHORT}, resources.nodes: 2, resources.gpus_per_node: 4"})
    output = clone.snakemake("-n", "--configfile", config)
    assert "1 job, 2 nodes x 4 ranks" in output


def test_a_profile_that_is_not_filled_in_says_what_to_do(clone):
    profile = clone.path / PROFILE
    filled = profile.read_text()
    profile.write_text(filled.replace("slurm_account: lab", "slurm_account: CHANGE_ME"))
    try:
        output = clone.snakemake("-n", code=1)
    finally:
        profile.write_text(filled)
    assert "profiles/slurm/config.yaml" in output and "slurm_account" in output and "sacctmgr" in output
