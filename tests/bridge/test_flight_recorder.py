"""megaboa.bridge.flight: one dump of what torch's recorders of NCCL and of other backends hold."""

import pickle
import sys
from types import SimpleNamespace

import pytest

from megaboa.bridge import flight
from megaboa.bridge.flight import OTHER, WANTED, _last, merged
from megaboa.files import read_json
from megaboa.run.flight import dump_of, judge


def recorded(last, *calls):
    """Of one group each, all with number 0: a recorder's groups begin there."""
    kinds = {"input_sizes": [], "input_dtypes": [], "is_p2p": False, "state": "scheduled", "pg_id": 0}
    entries = [
        {"collective_seq_id": number, "process_group": (group, ""), "profiling_name": name, **kinds}
        for group, number, name in calls
    ]
    return {"entries": entries, "pg_status": {0: {"last_completed_collective": last}} if calls else {}}


def test_what_hangs_is_told_of_both_backends():
    gloo = recorded(1, ("objects", 1, "gloo:gather"), ("objects", 2, "gloo:gather"))
    nccl = recorded(7, ("world", 7, "nccl:all_reduce"), ("world", 8, "nccl:all_reduce"))
    found = dump_of(merged(gloo, nccl))
    assert {group: found.waiting(group).number for group in found.calls} == {f"objects{OTHER}": 2, "world": 8}
    assert judge({0: dump_of(merged(recorded(0), nccl)), 1: dump_of(merged(recorded(0), nccl))}, 2).kind == "joined"
    assert merged(gloo, recorded(0)) == merged(gloo) == gloo, "on processors"


def test_a_group_with_two_backends_has_calls_of_both():
    gloo = recorded(0, ("world", 3, "gloo:gather"))
    found = dump_of(merged(gloo, recorded(8, ("world", 8, "nccl:all_reduce"))))
    assert found.waiting("world") is None and str(found.waiting(f"world{OTHER}")) == "gather 3"


@pytest.mark.parametrize("by_state", [True, False], ids=["nccl", "gloo"])
@pytest.mark.parametrize(
    ("ended", "first", "last"), [(300, 251, 300), (100, 76, 125), (3, 1, 28), (0, 1, 25), (290, 251, 300)]
)
def test_the_call_that_hangs_is_kept_however_many_wait_behind_it(ended, first, last, by_state):
    dump = recorded(0 if by_state else ended, *(("tp", number, "nccl:all_gather") for number in range(1, 301)))
    for entry in dump["entries"][: ended if by_state else 0]:
        entry["state"] = "completed"
    assert [entry["collective_seq_id"] for entry in _last(dump)] == list(range(first, last + 1))


def test_a_dump_that_does_not_fit_on_the_disk_leaves_no_file(small_disk, monkeypatch):
    disk = small_disk(1)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace())
    monkeypatch.setenv(flight.PREFIX, str(disk / "flight-rank-"))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(flight, "_dump", lambda also_nccl: {"stack": ["x" * (2 << 20)]})
    assert flight.write() is None and list(disk.iterdir()) == []
    monkeypatch.setattr(flight, "_dump", lambda also_nccl: {"stack": ["x"]})
    assert flight.write() == {"stack": ["x"]} == read_json(disk / "flight-rank-0.json")


def test_torch_has_both_recorders():
    from torch._C import _distributed_c10d as c10d

    if not hasattr(c10d, "_dump_nccl_trace"):
        pytest.skip("a build without NCCL")
    for ask in (c10d._dump_fr_trace, c10d._dump_nccl_trace):
        assert pickle.loads(ask(*WANTED)).keys() >= {"entries", "pg_status", "pg_config"}
