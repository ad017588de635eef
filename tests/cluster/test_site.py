"""The workflow on a cluster as its user sees it: the profile, several hosts, and the plan."""

from __future__ import annotations

import contextlib
import re
import sys

import pytest
from clone import copy_repository
from lab import USER
from site_clone import ENVIRONMENT, SHORT, SITE_FILE

pytestmark = [pytest.mark.slow, pytest.mark.walk]


@contextlib.contextmanager
def no_site_file(clone):
    file = clone.path / SITE_FILE
    chosen = file.read_text()
    file.unlink()
    try:
        yield file
    finally:
        file.write_text(chosen)


@contextlib.contextmanager
def partitions(lab, **states):
    """Each in the state that is named, and up again afterwards."""

    def update(name, state):
        lab.run(["scontrol", "update", f"PartitionName={name}", f"State={state}"], user="root")

    try:
        for name, state in states.items():
            update(name, state)
        yield
    finally:
        for name in states:
            update(name, "UP")


def test_the_default_experiment_on_two_hosts(clone):
    """By the profile as it is in a clone, on a cluster that leaves one choice. Every stage is a job of SLURM's; of the
    layouts one is here, and the others are those of test_starting_ranks.py.
    """
    config = clone.default_on_two_hosts(["dp1", "tp2-sp"])
    others = dict.fromkeys(("cpu", "low", "lowcancel", "short"), "INACTIVE")
    with no_site_file(clone), partitions(clone.lab, **others):
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
    with no_site_file(clone) as file:
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


def test_auto_is_what_slurm_shows_of_the_partition(clone):
    """The login host has no GPU, and doesn't count. Jobs take what the call found."""
    kernels = clone.path / "kernels"
    (kernels / "transformer_engine").mkdir(parents=True)
    (kernels / "transformer_engine" / "__init__.py").touch()
    output = clone.snakemake("-n", env={"PYTHONPATH": str(kernels)})
    assert "device: auto is cuda: nodes of partition gpu have 2 GPUs" in output and "runs on cuda" in output
    assert "cp2 is INVALID: training.precision: fp32 with parallel.cp: 2 on GPUs" in output
    assert "device: auto is cpu: this Python has no Transformer Engine" in clone.snakemake("-n")


def test_the_users_account_is_found(lab):
    """On a cluster that keeps accounts."""
    repository = lab.home / "clone"
    copy_repository(repository)
    for words in (
        ["add", "qos", "long", "MaxWall=2-00:00:00", "MaxTRESPerUser=gres/gpu=4"],
        ["add", "qos", "gpu_part", "MaxJobsPerUser=3", "Flags=DenyOnLimit"],
        ["add", "qos", "not_yours", "MaxWall=1"],
        ["modify", "user", USER, "set", "qos+=long"],
    ):
        lab.run(["sacctmgr", "-i", *words], user="root")
    lab.run(["scontrol", "update", "PartitionName=gpu", "QoS=gpu_part"], user="root")
    command = [sys.executable, "workflow/scripts/megaboa", "site"]
    shown = lab.run(command, cwd=repository, env=ENVIRONMENT).stdout
    assert "cluster lab: your accounts are lab" in shown and '\nslurm_account: "lab"\n' in shown
    assert "most of each job" in shown and "normal" in shown, "the limits of the account"
    assert re.search(r"^long +MaxWall 2-00:00:00; MaxTRESPU gres/gpu=4 *$", shown, re.MULTILINE), shown
    assert re.search(r"^gpu_part +MaxJobsPU 3; Flags DenyOnLimit *$", shown, re.MULTILINE), shown
    assert re.search(r"^normal +- *$", shown, re.MULTILINE) and "not_yours" not in shown
    assert '"gpu"  # 3 nodes of 2 h100, at most infinite, limits of QOS gpu_part, the default\n' in shown
    others = {"cpu": "DRAIN", "low": "INACTIVE", "lowcancel": "DOWN", "short": "DOWN"}
    with partitions(lab, **others):
        shown = lab.run(command, cwd=repository, env=ENVIRONMENT).stdout
        assert '\ngpu_partition: "gpu"\n' in shown, "the only one that is up"
    with partitions(lab, **others, gpu="DRAIN"):
        shown = lab.run(command, cwd=repository, env=ENVIRONMENT).stdout
        assert "\ngpu_partition" not in shown and '# gpu_partition: "short"' in shown, "two whose jobs wait"
        for name, said in (("low", "inactive: it takes no jobs"), ("short", "down: its jobs wait")):
            assert re.search(f'"{name}"  #.*, {said}$', shown, re.MULTILINE), shown
            submitted = lab.run(["sbatch", "--hold", f"--partition={name}", "--wrap=true"], check=False)
            assert (submitted.returncode == 0) == (name == "short"), submitted.stderr
