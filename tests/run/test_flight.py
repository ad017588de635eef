"""megaboa.run.flight: which ranks the others waited for, by constructed dumps and by real ones of gloo."""

import json
import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megaboa.run import flight
from megaboa.run.flight import Call, Dump, blamed, judge

ROOT = Path(__file__).resolve().parents[2]
STOPPED_GPU = ROOT / "tests" / "fixtures" / "stopped-gpu"


def dump(world=(), tensor=(), data=(), name="reduce", **more):
    """A rank's calls by group: how many it began and how many ended, as in `world=(3, 2)`."""
    asked = {"world": world, "tensor": tensor, "data": data}
    calls = {
        group: {
            number: Call(number, f"gloo:{name}", "Float [8]", number <= made[1]) for number in range(1, made[0] + 1)
        }
        for group, made in asked.items()
        if made
    }
    return Dump(calls, **more)


ALL = {"groups": {"world": frozenset(range(4))}}
WAITS = dump((3, 2), **ALL)


@pytest.mark.parametrize(
    ("dumps", "kind", "ranks"),
    [
        ({rank: dump((3, 3), **ALL) for rank in range(4)}, None, ()),  # they are busy with other things
        ({}, None, ()),
        ({0: WAITS, 1: WAITS, 2: WAITS, 3: dump((2, 2), **ALL)}, "missing", (3,)),
        ({0: WAITS, 1: WAITS, 2: WAITS}, "frozen", (3,)),
        ({0: WAITS, 1: replace(WAITS, moved=True), 2: WAITS}, "slow", (3,)),  # what goes on doesn't hang
        ({rank: replace(WAITS, moved=True) for rank in range(4)}, "slow", ()),
        ({0: WAITS, 2: dump((2, 2), **ALL)}, "frozen", (1, 3)),  # who didn't answer goes before who is only late
        (dict.fromkeys(range(4), WAITS), "joined", ()),
        (
            {0: WAITS, 1: replace(WAITS, calls=dump((3, 3), name="broadcast").calls), 2: WAITS, 3: WAITS},
            "mismatch",
            (1,),
        ),
        # 3 is late in its pair, for which 2 waits, for which 0 waits, for which 1 waits.
        (
            {
                0: dump(tensor=(1, 1), data=(2, 1), groups={"data": frozenset({0, 2})}),
                1: dump(tensor=(2, 1), groups={"tensor": frozenset({0, 1})}),
                2: Dump(
                    {"second": {2: Call(2, "x", "", False)}}, {"second": frozenset({2, 3}), "data": frozenset({0, 2})}
                ),
                3: Dump({"second": {1: Call(1, "x", "", True)}}, {"second": frozenset({2, 3})}),
            },
            "missing",
            (3,),
        ),
        (
            {
                0: dump(tensor=(1, 0), groups={"tensor": frozenset({0, 1}), "data": frozenset({0, 1})}),
                1: dump(data=(1, 0), groups={"tensor": frozenset({0, 1}), "data": frozenset({0, 1})}),
                2: Dump({}),
                3: Dump({}),
            },
            "deadlock",
            (0,),
        ),
    ],
)
def test_who_was_waited_for(dumps, kind, ranks):
    found = judge(dumps, 4)
    assert (found and found.kind) == kind and (found.ranks if found else ()) == ranks


def test_the_sentence_names_the_call_the_ranks_and_what_they_did():
    stack = ("/usr/lib/torch/utils.py:1 next", "/home/me/loader.py:33 load")
    found = judge({0: WAITS, 1: WAITS, 2: WAITS, 3: dump((2, 2), **ALL, stack=stack)}, 4)
    there = "reduce 3 of Float [8] (group world)"
    assert str(found) == f"rank 0, 1, 2 waited in {there} for rank 3, which was in /home/me/loader.py:33 load"
    assert "which did not even answer" in str(judge({0: WAITS}, 4))


def entry(number, group="0", state="scheduled"):
    kinds = {"input_sizes": [[4]], "input_dtypes": ["Float"], "profiling_name": "nccl:all_reduce", "is_p2p": False}
    return {"collective_seq_id": number, "process_group": (group, "desc"), "pg_id": 0, "state": state, **kinds}


def test_nccls_own_files_are_read_and_run_nothing(tmp_path):
    """Pickles, as its watchdog writes them; of three files one is cut off, and one holds a call."""
    status = {0: {"last_enqueued_collective": 3, "last_started_collective": 3, "last_completed_collective": 2}}
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2, 3]"}}
    values = {"entries": [entry(2), entry(3)], "pg_status": status, "pg_config": config, "version": "2.10"}
    prefix = tmp_path / "flight-rank-"
    Path(f"{prefix}0").write_bytes(pickle.dumps(values))
    Path(f"{prefix}1").write_bytes(pickle.dumps(values)[:-20])
    Path(f"{prefix}2").write_bytes(pickle.dumps(os.system))
    Path(f"{prefix}3.json").write_text(json.dumps(values))
    found = flight.read(str(prefix), 4)
    assert set(found) == {0, 3} and found[0] == found[3]
    assert str(found[0].waiting("0")) == "all_reduce 3 of Float [4]"
    assert judge(found, 4).ranks == (1, 2)


def stuck(ended, *begun):
    """NCCL's dump of a rank whose GPU has ended so many collectives; `begun` are those that it has yet to end."""
    status = {
        0: {"last_enqueued_collective": max(begun), "last_started_collective": -1, "last_completed_collective": ended}
    }
    return flight.dump_of({"entries": [entry(number) for number in begun], "pg_status": status})


def test_a_gpu_that_has_not_ended_what_the_others_have_is_told():
    """As after an error of a GPU: its processes go on for a while and enqueue as much as the others'."""
    dumps = {0: stuck(6, 7, 8), 1: stuck(3, 4, 5, 6), 2: stuck(6, 7, 8), 3: stuck(3, 4, 5, 6, 7)}
    found = judge(dumps, 4)
    assert (found.kind, found.ranks, found.waiting) == ("stalled", (1, 3), (0, 2))
    assert str(found) == "all_reduce 4 of Float [4] (group 0) ended on rank 0, 2 and not on the GPU of rank 1, 3"
    assert judge(dict.fromkeys(range(4), stuck(3, 4, 5)), 4).kind == "joined"
    late = {0: stuck(6, 7), 1: stuck(6, 7), 2: stuck(6, 7), 3: Dump({})}  # which has done all that it has begun
    assert judge({**late, 0: replace(late[0], groups=ALL_OF_NCCL)}, 4).kind == "missing"


def test_a_gpu_that_has_not_begun_what_those_of_the_others_have_is_told():
    """As one that stands still, where NCCL takes the time of collectives."""

    def rank(state, **more):
        return replace(flight.dump_of({"entries": [entry(3, state=state)], "pg_status": {}}), **more)

    dumps = {0: rank("scheduled"), 1: rank("started"), 2: rank("started")}
    found = judge(dumps, 3)
    assert (found.kind, found.ranks, found.waiting) == ("unbegun", (0,), (1, 2))
    assert str(found) == "all_reduce 3 of Float [4] (group 0) began on rank 1, 2 and not on the GPU of rank 0"
    assert judge(dict.fromkeys(range(3), dumps[0]), 3).kind == "joined", "NCCL takes no time"
    assert judge(dict.fromkeys(range(3), dumps[1]), 3).kind == "joined", "the network"
    # What 0 has not begun waits for another collective on its GPU, to which 3 hasn't come.
    pair = {"1": frozenset({0, 3})}
    elsewhere = flight.dump_of({"entries": [entry(3), entry(9, "1", "started")], "pg_status": {}})
    late = {**dumps, 0: replace(elsewhere, groups=pair), 3: Dump({}, pair)}
    assert (judge(late, 4).kind, judge(late, 4).ranks) == ("missing", (3,))


def test_a_gpu_that_stands_still_is_told_by_what_takes_no_other_rank():
    """Two H200s, one of which slept: it has not completed its own all-reduce, and the other waits for its rank."""
    found = flight.read(str(STOPPED_GPU / "flight-rank-"), 2)
    said = judge(found, 2)
    assert (said.kind, said.ranks, said.waiting) == ("halted", (0,), (1,))
    assert str(said) == (
        "rank 1 waited in reduce_scatter_tensor_coalesced 165 of Float [43648] (group 3) for rank 0, which was in"
        " site-packages/megatron/bridge/training/losses.py:73 masked_next_token_loss, and whose GPU stands still"
    )
    assert str(judge({**found, 0: replace(found[0], stack=())}, 2)).endswith("for rank 0, whose GPU stands still")
    # Behind what nobody records, peers that wait for such a GPU look like it: no node is blamed then.
    both = judge({0: found[0], 1: found[0], 2: found[1]}, 3)
    assert (both.ranks, both.waiting) == ((0, 1), (2,)) and "one of whose GPUs stands still" in str(both)
    assert (blamed(said, ["a"], 2), blamed(both, ["a", "b"], 8), blamed(both, ["a", "a"], 2)) == (("a",), (), ("a",))
    # Where all look like that, as behind a CUDA graph, whose collectives nobody records, none is to blame.
    assert judge({0: found[0], 1: replace(found[1], halted=True)}, 2).ranks == ()


def test_who_sends_or_receives_between_stages_has_not_left_others_waiting():
    """Its GPU waits for the other stage."""
    sends = {**entry(5, "1"), "is_p2p": True}
    first = flight.dump_of({"entries": [sends, entry(3)], "pg_status": {}})
    assert first.between_stages
    last = replace(first, between_stages=False)
    began = flight.dump_of({"entries": [entry(3, state="started")], "pg_status": {}})
    assert judge({0: first, 1: began}, 2).kind == "joined"
    assert judge({0: last, 1: began}, 2).ranks == (0,)


def test_what_has_ended_is_not_told_by_the_number_of_a_send():
    """The two are counted apart, and the group's last is that of either."""
    status = {0: {"last_completed_collective": 4000}}
    sent = {**entry(4000, state="completed"), "is_p2p": True}
    assert flight.dump_of({"entries": [entry(7)], "pg_status": status}).waiting("0") is None
    assert flight.dump_of({"entries": [sent, entry(7)], "pg_status": status}).waiting("0").number == 7


def test_who_waits_in_what_all_have_joined_is_not_the_one_to_look_at():
    """0 has not got the end of what 1 has done, so 1 waits for it elsewhere: the network, and not what 0 does."""
    pair = {"tensor": frozenset({0, 1}), "world": frozenset({0, 1})}
    dumps = {0: dump(tensor=(1, 0), groups=pair), 1: dump((1, 0), tensor=(1, 1), groups=pair)}
    assert (judge(dumps, 2).kind, judge(dumps, 2).group) == ("joined", "tensor")
    apart = {"data": frozenset({0, 2}), **pair}
    late = {**dumps, 0: dump(tensor=(1, 0), data=(1, 0), groups=apart), 2: dump(groups=apart)}
    assert (judge(late, 3).kind, judge(late, 3).ranks) == ("missing", (2,))


def test_a_broadcast_that_its_root_has_ended_blames_no_gpu():
    """Rank 3 is late; rank 1 waits for it, and has not reached what rank 0 has sent."""

    def said(**calls):
        done = {name: {1: Call(1, f"nccl:{kind}", "", ended)} for name, (kind, ended) in calls.items()}
        return Dump(done, GROUPS, (), {name: 1 for name, (_, ended) in calls.items() if ended})

    dumps = {0: said(tp=("broadcast", True)), 2: Dump({}, GROUPS), 3: Dump({}, GROUPS)}
    dumps[1] = said(tp=("broadcast", False), dp=("all_gather", False))
    found = judge(dumps, 4)
    assert (found.kind, found.ranks) == ("missing", (3,))


GROUPS = {"tp": frozenset({0, 1}), "dp": frozenset({1, 3})}
ALL_OF_NCCL = {"0": frozenset(range(4))}


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="one kind of case takes a network away, which needs root")
def test_real_hangs_of_gloo_are_told(tmp_path):
    """One case of each kind, by processes that hang: benchmarks/flight.py makes more."""
    words = [sys.executable, ROOT / "benchmarks" / "flight.py", "--cases=1"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    rows = [line.split("|")[1:-1] for line in done.stdout.splitlines() if "100%" in line]
    assert [row[0].strip() for row in rows] == ["frozen", "missing", "mismatch", "joined", "deadlock"], done
    assert done.stderr == ""
