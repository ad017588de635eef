"""megaboa.scheduler.slurm.limits: what a partition grants no job, as SLURM 22.05 prints it."""

from dataclasses import replace

import pytest

from megaboa.scheduler.answers import Request, UnreachableError, Where
from megaboa.scheduler.slurm import limits

RULES = """\
PartitionName=gpu AllowGroups=ALL Default=YES MaxNodes=UNLIMITED MaxTime=UNLIMITED MinNodes=0 State=UP TotalNodes=3
PartitionName=short AllowGroups=ALL Default=NO MaxNodes=2 MaxTime=00:02:00 MinNodes=0 State=UP TotalNodes=3
PartitionName=days AllowGroups=ALL Default=NO MaxNodes=UNLIMITED MaxTime=1-12:00:00 MinNodes=0 State=UP TotalNodes=0
"""
NODES = """\
CLUSTER: lab
gpu|2|64|250000|gpu:h100:4(S:0-1)
gpu|1|96|1000000|gpu:h100:8,craynetwork:4
short|3|8|16000|(null)
"""
KNOWN = limits.parse(RULES, NODES)
FINE = Request(Where("gpu", "lab"), nodes=3, cores=96, mem_mb=1000000, seconds=10**9, gpus=8)
SHORT = Request(Where("short", "lab"), nodes=1, cores=1, mem_mb=4000, seconds=120)


def test_partitions_as_scontrol_and_sinfo_show_them():
    assert KNOWN["gpu"] == limits.Partition("gpu", 3, 96, 1000000, 8)
    assert KNOWN["short"] == limits.Partition("short", 3, 8, 16000, 0, most_nodes=2, most_seconds=120)
    assert KNOWN["days"] == limits.Partition("days", most_seconds=36 * 3600)


@pytest.mark.parametrize(
    ("asked", "key", "limit", "certain"),
    [
        (replace(FINE, nodes=4, spares=1), "resources.nodes", "partition gpu has 3 nodes", True),
        (replace(FINE, cores=97), "resources.cpus_per_rank times gpus_per_node", "more than 96 processors", True),
        (replace(FINE, mem_mb=1000001), "resources.mem_mb_per_rank times gpus_per_node", "more than 1000000 MB", True),
        (replace(FINE, gpus=9), "resources.gpus_per_node", "more than 8 GPUs", True),
        (replace(FINE, where=Where("nope", None)), "resources.partition", "SLURM has days, gpu, short", True),
        (replace(FINE, where=Where("gpu,nope", None)), "resources.partition", "SLURM has days, gpu, short", True),
        (replace(SHORT, seconds=180), "resources.runtime", "partition short allows 2m, unless a QOS", False),
        (replace(SHORT, nodes=3), "resources.nodes", "partition short lets a job have 2", False),
        (
            replace(SHORT, where=Where("days", None), seconds=48 * 3600),
            "resources.runtime",
            "partition days allows 36h",
            False,
        ),
    ],
)
def test_what_is_too_much_is_named_with_its_limit(asked, key, limit, certain):
    (one,) = limits.of_request(asked, KNOWN)
    assert (one.key, one.certain) == (key, certain) and limit in one.limit


def test_spares_are_named():
    (one,) = limits.of_request(replace(FINE, nodes=4, spares=1), KNOWN)
    assert str(one).startswith("resources.nodes is 3, with 1 spare_nodes, and partition gpu has 3 nodes: lower it")


@pytest.mark.parametrize(
    "asked",
    [
        FINE,
        SHORT,
        replace(SHORT, where=Where("short,gpu", None), nodes=3, seconds=10**6),  # one of two grants it
        replace(SHORT, where=Where("days", None), nodes=99, cores=999),  # nodes that come and go aren't listed
        replace(SHORT, where=Where(None, None), nodes=99),
    ],
)
def test_what_is_granted_or_can_not_be_compared_is_not_refused(asked):
    assert limits.of_request(asked, KNOWN) == [] == limits.of_request(replace(asked, where=Where("x", None)), {})


def test_silence_is_not_an_answer(unreachable_slurm):
    with pytest.raises(UnreachableError):
        limits.excesses([FINE])
