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
    assert KNOWN["gpu"] == limits.Limits("gpu", 3, limits.Largest(96, 1000000, 8))
    assert KNOWN["short"] == limits.Limits("short", 3, limits.Largest(8, 16000, 0), most_nodes=2, most_seconds=120)
    assert KNOWN["days"] == limits.Limits("days", most_seconds=36 * 3600)


@pytest.mark.parametrize(
    ("asked", "key", "limit", "certain"),
    [
        (replace(FINE, nodes=4, spares=1), "resources.nodes", "partition gpu has 3 nodes", True),
        (replace(FINE, cores=97), "resources.cpus_per_rank times gpus_per_node", "more than 96 processors", True),
        (replace(FINE, mem_mb=1000001), "resources.mem_mb_per_rank times gpus_per_node", "more than 1000000 MB", True),
        (replace(FINE, gpus=9), "resources.gpus_per_node", "more than 8 GPUs", True),
        (replace(FINE, where=Where("nope", None)), "resources.partition", "SLURM has days, gpu, short", False),
        (replace(FINE, where=Where("gpu,nope", None)), "resources.partition", "SLURM has days, gpu, short", False),
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
        replace(FINE, where=Where("nope", None, cluster="other")),
    ],
)
def test_what_is_granted_or_can_not_be_compared_is_not_refused(asked):
    assert limits.of_request(asked, KNOWN) == [] == limits.of_request(replace(asked, where=Where("x", None)), {})


def test_cloud_nodes_that_are_powered_down_count_and_may_be_of_any_size():
    """sinfo lists n1 of n1,c[1-8], scontrol all nine."""
    cloud = "PartitionName=mixed MaxNodes=UNLIMITED MaxTime=UNLIMITED State=UP TotalNodes=9"
    known = limits.parse(cloud, "mixed|1|8|16000|(null)")
    assert known["mixed"] == limits.Limits("mixed", 9)
    asked = replace(FINE, where=Where("mixed", None), nodes=4)
    assert limits.of_request(asked, known) == []
    (one,) = limits.of_request(replace(asked, nodes=10), known)
    assert one.certain and one.limit == "partition mixed has 9 nodes"


@pytest.mark.parametrize(
    ("fields", "asked", "limit"),
    [
        ("MaxCPUsPerNode=6", {"cores": 7}, "partition p lets a job have 6 processors on a node"),
        ("MaxMemPerNode=9000", {"mem_mb": 9001}, "partition p lets a job have 9000 MB on a node"),
        ("MaxMemPerCPU=1000", {"mem_mb": 8001}, "partition p lets a job have 8000 MB on a node"),
        ("MaxCPUsPerNode=6 MaxMemPerCPU=1000", {"mem_mb": 6001}, "partition p lets a job have 6000 MB on a node"),
        ("MaxMemPerNode=UNLIMITED", {"mem_mb": 16000}, None),
    ],
)
def test_limits_of_a_node_s_share_are_not_certain(fields, asked, limit):
    known = limits.parse(f"PartitionName=p TotalNodes=1 {fields}", "p|1|8|16000|(null)")
    found = limits.of_request(replace(SHORT, where=Where("p", None), **asked), known)
    assert [(one.limit, one.certain) for one in found] == ([(limit, False)] if limit else [])


def test_of_several_partitions_one_that_may_grant_a_request_counts():
    known = limits.parse("PartitionName=p TotalNodes=1\nPartitionName=q TotalNodes=9 MaxNodes=1 MaxTime=00:01:00", "")
    found = limits.of_request(replace(SHORT, where=Where("p,q", None), nodes=2), known)
    assert [one.certain for one in found] == [False, False]


@pytest.mark.parametrize(
    ("gres", "gpus"),
    [
        ("gpu:tesla:no_consume:8", 8),
        ("gpu:no_consume:8", 8),
        ("gpu:1g.10gb:7(S:0),gpu:h100:1(S:1)", 8),
        ("craynetwork:4,gpu:8", 8),
        ("gpu:h100", 1),
        ("gpu", 1),
        ("mps:gpu:100", 0),
    ],
)
def test_gpus_of_a_node(gres, gpus):
    assert limits.parse("PartitionName=p TotalNodes=1", f"p|1|8|16000|{gres}")["p"].largest.gpus == gpus


def test_silence_is_not_an_answer(unreachable_slurm):
    with pytest.raises(UnreachableError):
        limits.excesses([FINE])
