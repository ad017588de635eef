"""megaboa.launch.networks: presets are data with reasons, and a layout decides the number of connections."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from megaboa.launch import networks

TABLES = tomllib.loads(Path(networks.__file__).with_name("networks.toml").read_text())
KNOWN = re.compile(r"(NCCL|TORCH_NCCL|FI|OFI_NCCL)_[A-Z0-9_]+")


def test_there_is_a_preset_for_every_network_and_no_other():
    assert networks.names() == ("nvlink", "infiniband", "ethernet", "efa", "slingshot")


@pytest.mark.parametrize("table", TABLES)
def test_every_variable_has_a_value_and_a_reason(table):
    for name, entry in TABLES[table].items():
        assert KNOWN.fullmatch(name)
        assert set(entry) == {"value", "reason"}
        assert isinstance(entry["value"], str) and entry["value"]
        assert entry["reason"].endswith(".") and len(entry["reason"]) > 40


@pytest.mark.parametrize("network", [None, *networks.names()])
def test_interfaces_are_only_ever_left_out(network):
    environment = networks.environment(network)
    assert network == "slingshot" or environment.get("NCCL_SOCKET_IFNAME", "^").startswith("^")
    assert not {"NCCL_IB_HCA", "NCCL_IB_GID_INDEX", "NCCL_IB_SL", "GLOO_SOCKET_IFNAME"} & set(environment)


def test_a_preset_comes_on_top_of_what_all_share():
    common = networks.environment(None)
    assert common["NCCL_DEBUG"] == "WARN"
    assert networks.environment("infiniband") == {**common, "NCCL_IB_TIMEOUT": "22", "NCCL_IB_RETRY_CNT": "7"}


def test_an_unknown_network_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"'token-ring'.*nvlink, infiniband, ethernet, efa"):
        networks.environment("token-ring")
    with pytest.raises(ValueError, match="'all'"):
        networks.environment("all")


def test_sockets_stay_within_nccls_limit():
    chosen = networks.environment("ethernet")
    assert int(chosen["NCCL_SOCKET_NTHREADS"]) * int(chosen["NCCL_NSOCKS_PERTHREAD"]) <= 64


# Lines of published logs, by the library that wrote them: NCCL 2.27 with aws-ofi-nccl 1.19 and 1.6 (EFA, cxi), with
# InfiniBand, and where no plugin was found.
OFI = """\
node-0:188:585 [0] NCCL INFO NET/OFI Selected provider is efa, fabric is efa (found 32 nics)
node-0:188:585 [0] NCCL INFO Initialized NET plugin Libfabric
node-0:188:585 [0] NCCL INFO Assigned NET plugin Libfabric to comm
node-0:188:585 [0] NCCL INFO Using network Libfabric
"""
CXI = """\
nid006352:34610:34631 [0] NCCL INFO NET/OFI Selected Provider is cxi (found 4 nics)
nid006352:34610:34631 [0] NCCL INFO Using network AWS Libfabric
"""
IB = """\
a:1:2 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB ib0:10.1.2.3<0>
a:1:2 [0] NCCL INFO Using network IB
"""
SOCKET = """\
csgjr:1:1 [0] NCCL INFO Failed to initialize NET plugin IB
csgjr:1:1 [0] NCCL INFO NET/Socket : Using [0]eth0:10.56.0.6<0>
csgjr:1:1 [0] NCCL INFO Using network Socket
"""


@pytest.mark.parametrize(
    ("log", "name", "right"),
    [
        (OFI, "Libfabric", {"efa", "slingshot"}),
        (CXI, "AWS Libfabric", {"efa", "slingshot"}),
        (IB, "IB", {"infiniband"}),
        (IB.replace("network IB", "network IBext_v8"), "IBext_v8", {"infiniband"}),
        (SOCKET, "Socket", {"ethernet"}),
    ],
)
def test_the_network_that_nccl_has_taken(log, name, right):
    assert networks.taken(log) == name and networks.taken("NCCL WARN NET/IB : Got async event") is None
    presets = [network for network in networks.names() if networks.can_check(network)]
    assert {network for network in presets if networks.fits(network, name)} == right
    assert set(networks.names()) - set(presets) == {"nvlink"}, "it is no network between nodes"


ALONE = {"tp": 1, "pp": 1, "vpp": None, "cp": 1, "ep": 1, "etp": None, "sp": False, "fsdp": "none"}


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (ALONE, None),
        ({**ALONE, "pp": 4}, None),
        ({**ALONE, "tp": 2, "sp": True}, "1"),
        ({**ALONE, "cp": 2}, "1"),
        ({**ALONE, "ep": 8}, "32"),
        ({**ALONE, "tp": 2, "ep": 8}, "1"),
        ({**ALONE, "fsdp": "megatron"}, "32"),
        ({**ALONE, "fsdp": "torch", "tp": 2}, "32"),
        ({"fsdp": "none"}, None),
        ({}, None),
        ({"tp": 8, "sp": True}, None),  # a recipe, which may use FSDP
        ({"tp": None, "fsdp": None}, None),
    ],
)
def test_connections_before_blackwell(layout, expected):
    assert networks.connections(layout) == expected


def test_what_keeps_nccl_from_naming_its_network():
    assert networks.silenced_by({**networks.NAMING, "PATH": "/bin"}) == []
    assert networks.silenced_by({"NCCL_DEBUG": "trace", "NCCL_DEBUG_SUBSYS": "NET,GRAPH,INIT"}) == []
    assert networks.silenced_by({"NCCL_DEBUG_SUBSYS": "ALL"}) == []
    found = networks.silenced_by({"NCCL_DEBUG": None, "NCCL_DEBUG_SUBSYS": "COLL", "NCCL_DEBUG_FILE": "/tmp/nccl.%h"})
    assert found == ["NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE"]


def test_connections_with_expert_overlap_and_on_blackwell():
    experts = {**ALONE, "tp": 2, "ep": 8}
    assert networks.connections(experts, expert_overlap=True) == "32"
    assert networks.connections({**ALONE, "tp": 2}, blackwell=True) == "32"
    assert networks.connections({}, blackwell=True) is None
    assert networks.connections({"tp": 2}, expert_overlap=True) == "32", "a recipe's run has only what is set"


def test_fsdp_never_gets_the_one_connection_that_bridge_refuses():
    for fsdp in ("megatron", "torch"):
        for tp in (1, 8):
            for blackwell in (True, False):
                assert networks.connections({**ALONE, "fsdp": fsdp, "tp": tp}, blackwell=blackwell) != "1"


PINNED = "pinned_use_cuda_host_register:True,pinned_num_register_threads:8"


def test_segments_grow_unless_nccl_registers_buffers():
    assert networks.allocator({}) == f"expandable_segments:True,{PINNED}"
    assert networks.allocator({"ddp.nccl_ub": True}) == PINNED


def test_threads_touch_a_saves_memory_whatever_a_recipe_says_of_segments():
    assert networks.allocator({}, "max_split_size_mb:512") == f"max_split_size_mb:512,{PINNED}"
    assert networks.allocator({}, "pinned_num_register_threads:2") == "pinned_num_register_threads:2"


def test_pytorch_knows_each_word_of_it():
    """It refuses others when it starts."""
    read = "import sys, torch; torch._C._accelerator_setAllocatorSettings(sys.argv[1])"
    subprocess.run([sys.executable, "-c", read, networks.allocator({})], check=True)


BLACKWELL = (
    *("NVIDIA B200", "b200-180g", "nvidia_b200", "b300_288gb", "NVIDIA B100", "NVIDIA GB300", "gb200", "NVIDIA GB10"),
    *("NVIDIA RTX PRO 6000 Blackwell Server Edition", "NVIDIA GeForce RTX 5090", "rtx_5070_ti", "vr200"),
)


@pytest.mark.parametrize("gpu", BLACKWELL)
def test_blackwell_by_name(gpu):
    assert networks.is_blackwell(gpu)


@pytest.mark.parametrize(
    "gpu", [None, "", "NVIDIA H200", "h100-80g", "NVIDIA H20", "AB200", "B2000", "RTX 5000 Ada", "RTX A5000"]
)
def test_no_blackwell(gpu):
    assert not networks.is_blackwell(gpu)
