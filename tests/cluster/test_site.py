"""The workflow on a cluster as its user sees it: the profile, several hosts, and the plan."""

from __future__ import annotations

import sys

import pytest
from clone import copy_repository
from site_clone import ENVIRONMENT, SHORT, SITE_FILE

pytestmark = [pytest.mark.slow, pytest.mark.walk]


def test_the_default_experiment_on_two_hosts(clone):
    """Every stage of it is a job of SLURM's; of its layouts one, and the others are those of test_starting_ranks.py."""
    config = clone.default_on_two_hosts(["dp1", "tp2-sp"])
    clone.snakemake("--configfile", config, timeout=1500)
    checks = clone.json("tiny", "report", "checks.json")
    assert checks["state"] == "PASS", checks
    (start,) = clone.starts("tiny", "tp2-sp")
    assert len(start["nodes"]) == 2 and start["job"]
    logs = list((clone.path / "logs" / "slurm").rglob("*.log"))
    assert not [path for path in logs if "summarize" in str(path) or "report" in str(path)], "chores wait in no queue"


def test_a_dry_run_tells_what_would_be_submitted(clone):
    config = clone.experiment("dry", {"wide": f"{SHORT}, resources.nodes: 2, resources.gpus_per_node: 4"})
    output = clone.snakemake("-n", "--configfile", config)
    assert "1 job, 2 nodes x 4 ranks" in output


def test_the_profile_as_it_is_finds_what_slurm_leaves_no_choice_about(clone):
    """Partitions with GPUs are several here: they are listed, to be pasted, exported or written down once."""
    file = clone.path / SITE_FILE
    chosen = file.read_text()
    file.unlink()
    try:
        output = clone.snakemake("-n", code=1)
        choices = [line.strip() for line in output.splitlines() if line.startswith("  gpu_partition: ")]
        assert choices[0] == 'gpu_partition: "gpu"  # 3 nodes of 2 h100, at most infinite, the default'
        assert len(choices) == 5
        assert "slurm_account:" not in output and "slurm_partition:" not in output
        output = clone.snakemake("-n", env={"SBATCH_PARTITION": "low"})
        taken = "slurm_partition low, gpu_partition low, gpu_option gpus-per-node: for `auto`"
        assert taken in output and "jobs to do" in output
        shown = clone.megaboa("site", "--write")
        assert "it takes any account" in shown and "3 nodes of 2 h100" in shown and "they work" in shown
        written = file.read_text()
        assert written.startswith('slurm_account: "labuser"\nslurm_partition: "gpu"\n# gpu_partition: "gpu"  # 3 nodes')
        file.write_text(written.replace('# gpu_partition: "cpu"', "gpu_partition: cpu"))
        assert "gpu_partition cpu, gpu_option gpus-per-node: for `auto`" in clone.snakemake("-n")
        refused = clone.lab.run(clone.command("site", "--write"), cwd=clone.path, env=ENVIRONMENT, check=False)
        assert refused.returncode == 1 and "exists already" in refused.stderr
        assert '\ngpu_partition: "cpu"\n' in refused.stdout, "what is taken, is shown"
    finally:
        file.write_text(chosen)


def test_the_users_account_is_found(lab):
    """On a cluster that keeps accounts."""
    repository = lab.home / "clone"
    copy_repository(repository)
    command = [sys.executable, "workflow/scripts/megaboa", "site"]
    shown = lab.run(command, cwd=repository, env=ENVIRONMENT).stdout
    assert "cluster lab: your accounts are lab" in shown and '\nslurm_account: "lab"\n' in shown
    assert "most of each job" in shown and "normal" in shown, "the limits of the account"
