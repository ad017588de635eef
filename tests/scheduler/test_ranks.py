import contextlib
import os
import signal
import socket
import subprocess
import sys

import pytest

from megaboa import scheduler
from megaboa.scheduler import ranks
from megaboa.scheduler.ranks import STACKS_SIGNAL, Ended, NoPortError, ReservedPort

ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="Linux names the interface of an address")
LOOPBACK = "lo"


@pytest.mark.parametrize(
    ("ended", "said"),
    [
        (Ended(), "every rank ended with 0"),
        (Ended(3, 1), "rank 3 ended with exit code 1"),
        (Ended(3, 1, "n2"), "rank 3 on n2 ended with exit code 1"),
        (Ended(0, -9), "rank 0 was killed by SIGKILL"),
        (Ended(0, -250), "rank 0 was killed by signal 250"),
        (Ended(None, 137), "the launcher ended with exit code 137"),
        (Ended(None, -15), "the launcher was killed by SIGTERM"),
    ],
)
def test_an_end_says_who_and_how(ended, said):
    assert str(ended) == said


def test_only_0_is_well_and_only_a_signal_kills():
    assert Ended().ok and not Ended().killed
    assert not Ended(0, 1).ok and not Ended(0, 1).killed
    assert not Ended(0, -6).ok and Ended(0, -6).killed


def test_stacks_are_not_asked_for_by_a_signal_that_asks_for_something_else():
    assert STACKS_SIGNAL not in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


def test_a_rank_is_told_everything_torch_asks_for():
    assert ranks.rank_environment(3, 1, 8, "node7", 29500) == {
        "RANK": "3",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "8",
        "MASTER_ADDR": "node7",
        "MASTER_PORT": "29500",
    }


SLURM = {"SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NTASKS": "8", "SLURM_NODEID": "2", "SLURM_NNODES": "4"}


def test_a_task_of_srun_learns_its_rank_from_slurm():
    assert scheduler.rank_of(SLURM) == {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8"}
    assert scheduler.rank_of({"PATH": "/bin"}) == {}


def test_who_started_the_rank_himself_knows_better_than_slurm():
    assert scheduler.rank_of({**SLURM, "RANK": "0"}) == {}


@ON_LINUX
def test_a_rank_adopts_its_names_and_the_interface_to_its_peers():
    mine = {**SLURM, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    scheduler.adopt_rank(mine)
    assert mine["RANK"] == "5" and mine["WORLD_SIZE"] == "8" and mine["GLOO_SOCKET_IFNAME"] == LOOPBACK


def test_a_chosen_interface_is_kept():
    mine = {"RANK": "0", "MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "ib0"}
    scheduler.adopt_rank(mine)
    assert mine == {"RANK": "0", "MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "ib0"}


@ON_LINUX
@pytest.mark.parametrize("address", ["127.0.0.1", "localhost"])
def test_the_interface_towards_this_machine(address):
    assert ranks.interface_towards(address) == LOOPBACK


@ON_LINUX
def test_the_interface_towards_another_machine_has_the_address_that_it_sees():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no network")
    assert ranks.interface_towards("192.0.2.1") in {name for _, name in socket.if_nameindex()} - {LOOPBACK}


def test_an_unknown_host_has_no_interface():
    assert ranks.interface_towards("no-such-host.invalid") is None


def test_held_ports_are_distinct():
    with contextlib.ExitStack() as stack:
        numbers = {stack.enter_context(contextlib.closing(ReservedPort("127.0.0.1"))).number for _ in range(50)}
        assert len(numbers) == 50


def test_nobody_else_is_given_a_held_port():
    held = contextlib.closing(ReservedPort("127.0.0.1"))
    with held as port, socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port.number))


@pytest.mark.parametrize("held_on", ["", "127.0.0.1"])
@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_rank_0_can_listen_on_a_held_port(held_on, family):
    with contextlib.closing(ReservedPort(held_on)) as port, socket.socket(family) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torch's store does
        if family == socket.AF_INET6:
            server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        server.bind(("", port.number))
        server.listen()
        with socket.create_connection(("127.0.0.1", port.number), timeout=5):
            peer, _ = server.accept()
            peer.close()


def test_a_closed_port_is_anybodys():
    port = ReservedPort("127.0.0.1")
    port.close()
    with socket.socket() as other:
        other.bind(("127.0.0.1", port.number))


def test_only_the_standard_library_is_needed():
    code = (
        "import sys, megaboa.scheduler.local, megaboa.scheduler.slurm.srun, megaboa.run.failures, megaboa.run.claims\n"
    )
    code += "third = {n.split('.')[0] for n in sys.modules} - set(sys.stdlib_module_names) - {'megaboa', '__main__'}\n"
    code += "sys.exit(str(third) if third else 0)"
    subprocess.run([sys.executable, "-S", "-c", code], env=dict(os.environ), check=True)


def test_the_user_comes_first_then_the_site_then_a_preset():
    own, preset = {"A": "ours", "B": "ours", "C": "ours"}, {"A": "preset", "D": "preset", "E": "preset"}
    found = ranks.layered(own, preset, {"B": "chosen", "C": None}, given={"D": "site"})
    assert found == {"A": "preset", "B": "chosen", "E": "preset"}


def test_a_port_of_a_range():
    with contextlib.closing(ReservedPort("127.0.0.1")) as any_port:
        taken = any_port.number
        with pytest.raises(NoPortError, match=f"launch.ports: all ports from {taken} to {taken}"):
            ReservedPort("127.0.0.1", f"{taken}-{taken}")
    with contextlib.closing(ReservedPort("127.0.0.1", f"{taken}-{taken}")) as port:
        assert port.number == taken
