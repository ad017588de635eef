"""Account and partitions: what SLURM says of them, and what follows where it leaves one choice."""

import getpass

import pytest

from megaboa.launch import partitions
from megaboa.launch.partitions import Cluster, Partition, choose, parse_partitions

# As SLURM 22.05 prints them. MIXED: nodes that differ, a partition that is down, one that is for two accounts.
ALIKE = """\
gpu|gpu*|up|infinite|3|gpu:h100:2
short|short|up|2:00|3|gpu:h100:2
"""
MIXED = """\
cpu|cpu*|up|1-00:00:00|400|(null)
a100|a100|up|2-00:00:00|10|gpu:a100:4(S:0-1)
a100|a100|up|2-00:00:00|6|gpu:a100:8(S:0-1),craynetwork:4
a100|a100|up|2-00:00:00|1|(null)
h200|h200|up|12:00:00|1|gpu:8
old|old|down|infinite|20|gpu:v100:4
"""
RULES = """\
PartitionName=cpu AllowGroups=ALL AllowAccounts=ALL Default=YES State=UP TRES=cpu=12
PartitionName=a100 AllowGroups=ALL AllowAccounts=ALL Default=NO State=UP
PartitionName=h200 AllowGroups=ALL AllowAccounts=llm,vision Default=NO State=UP
"""
NAMED = Cluster(("llm",), parse_partitions(MIXED, RULES))


def test_partitions_as_sinfo_and_scontrol_show_them():
    gpu, short = parse_partitions(ALIKE, "")
    assert gpu == Partition("gpu", 3, ("2 h100",), "infinite", default=True)
    assert str(gpu) == "3 nodes of 2 h100, at most infinite, the default" and not short.default
    cpu, a100, h200 = NAMED.partitions
    assert str(cpu) == "400 nodes without GPUs, at most 1-00:00:00, the default"
    assert str(a100) == "17 nodes of 4 a100 or 8 a100, at most 2-00:00:00"
    assert str(h200) == "1 node of 8 GPU, at most 12:00:00" and h200.accounts == {"llm", "vision"}


def test_what_there_is_one_of_is_taken():
    cluster = Cluster(("mine",), NAMED.partitions)  # h200 isn't for this account
    found = choose(cluster, {})
    assert (
        found.taken == {"slurm_account": "mine", "slurm_partition": "cpu", "gpu_partition": "a100"} and not found.left
    )


def test_a_choice_among_gpus_is_the_users():
    found = choose(NAMED, {})
    assert found.taken == {"slurm_account": "llm", "slurm_partition": "cpu"}
    assert found.left == [
        "gpu_partition: a100  # 17 nodes of 4 a100 or 8 a100, at most 2-00:00:00",
        "gpu_partition: h200  # 1 node of 8 GPU, at most 12:00:00",
    ]


def test_several_accounts_are_a_choice_too_and_limit_no_partition_yet():
    found = choose(Cluster(("llm", "mine"), NAMED.partitions), {})
    assert [line.split("  #")[0] for line in found.left] == [
        "slurm_account: llm",
        "slurm_account: mine",
        "gpu_partition: a100",
        "gpu_partition: h200",
    ]


@pytest.mark.parametrize("variable", ["SBATCH_ACCOUNT", "SLURM_ACCOUNT"])
def test_sbatchs_own_variables_decide(variable):
    found = choose(Cluster(("llm", "mine"), NAMED.partitions), {variable: "mine", "SBATCH_PARTITION": "a100"})
    assert (
        found.taken == {"slurm_account": "mine", "slurm_partition": "cpu", "gpu_partition": "a100"} and not found.left
    )
    found = choose(NAMED, {"SBATCH_PARTITION": "cpu"})
    assert found.taken["slurm_partition"] == "cpu" and "gpu_partition" not in found.taken, "it has no GPUs"


def test_without_partitions_of_processors_alone_other_jobs_go_where_sbatch_puts_them():
    found = choose(Cluster(("llm",), parse_partitions(ALIKE, "")), {})
    assert found.taken["slurm_partition"] == "gpu" and len(found.left) == 2


def test_a_cluster_that_keeps_no_accounts_takes_any():
    assert choose(Cluster(None, ()), {}, ["slurm_account"]).taken == {"slurm_account": getpass.getuser()}


def test_who_has_no_account_or_partition_is_told():
    found = choose(Cluster((), ()), {})
    assert not found.taken and [line.split(":")[0] for line in found.left] == list(partitions.NAMES)
    assert "ask those who run the cluster" in found.left[0] and "none for you" in found.left[1]


def test_only_what_is_wanted_is_answered():
    found = choose(NAMED, {}, ["slurm_partition"])
    assert found.taken == {"slurm_partition": "cpu"} and not found.left
