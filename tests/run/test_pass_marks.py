"""megaboa.run.pass_marks: which nodes are too slow, by the site's numbers or by the other nodes'."""

from dataclasses import replace

import pytest

from megaboa.files import append_line
from megaboa.records import BetweenNodes, NodeHealth, PassMarks, Unhealthy, line, write
from megaboa.run.pass_marks import checks_of, of_good_nodes, slow
from megaboa.store_paths import RunStore


def nodes(gpu="H200", **tflops):
    return {node: answer(node, gpu, tflops=[700.0, value]) for node, value in tflops.items()}


def answer(node, gpu="H200", **measured):
    gpus = [{"name": gpu}] * 2 if gpu else []
    between = BetweenNodes(reached=True)
    more = {"gpus": gpus, **measured}
    return NodeHealth(node=node, number=0, ok=True, problems=(), stage="done", collective=between, measured=more)


@pytest.mark.parametrize(
    ("tflops", "found"),
    [
        ({"n1": 700, "n2": 690, "n3": 710, "n4": 570}, []),
        ({"n1": 700, "n2": 690, "n3": 710, "n4": 550}, ["n4"]),  # its slower GPU: below 80% of 700
        ({"n1": 700, "n2": 690, "n3": 550}, []),  # too few to compare with
        ({"n1": 700, "n2": 500, "n3": 710, "n4": 400, "n5": 690}, ["n2", "n4"]),
    ],
)
def test_far_below_the_others(tflops, found):
    assert sorted(slow(nodes(**tflops), None)) == found


def test_the_sentence():
    found = slow(nodes(n1=700, n2=690, n3=710, n4=400), PassMarks(tflops=420.0, node_gb_per_second=100.0))
    assert found == {"n4": ["400 TFLOP/s in a product of matrices, and launch.pass_marks.tflops is 420"]}
    found = slow(nodes(n1=700, n2=690, n3=710, n4=430), PassMarks(tflops=420.0))
    assert found == {"n4": ["430 TFLOP/s in a product of matrices, and the other nodes have 700"]}


def test_a_node_alone_is_held_against_its_gpus_published_peak():
    found = slow(nodes("NVIDIA H200", n1=260), None)
    assert found == {"n1": ["260 TFLOP/s in a product of matrices, and the published peak is 989"]}
    assert slow(nodes("NVIDIA H200", n1=560), None) == {}
    assert slow(nodes("NVIDIA Z1", n1=2), None) == {}, "nobody knows what that one can do"


def test_other_gpus_and_processors_are_no_measure():
    mixed = nodes(n1=700, n2=690, n3=710) | nodes("A100", n4=280)
    assert slow(mixed, None) == {}
    processors = {
        node: answer(node, None, tflops=[value]) for node, value in {"a": 1, "b": 1, "c": 1, "d": 0.1}.items()
    }
    assert slow(processors, None) == {} and list(slow(processors, PassMarks(tflops=0.5))) == ["d"]


def test_what_is_slow_between_nodes_is_every_nodes_problem():
    both = {node: answer(node, nodes_gb_per_second=12.0) for node in ("n1", "n2")}
    assert list(slow(both, PassMarks(nodes_gb_per_second=40.0))) == ["n1", "n2"] and slow(both, None) == {}
    one_slow = both | {"n1": answer("n1", nodes_gb_per_second=12.0, tflops=[300.0])}
    assert list(slow(one_slow, PassMarks(nodes_gb_per_second=40.0, tflops=600.0))) == ["n1"], "it slows the others down"
    silent = {node: answer(node, tflops=[None, 700.0]) for node in ("n1", "n2")}
    assert slow(silent, PassMarks(nodes_gb_per_second=40.0)) == {}


def test_marks_of_good_nodes_are_passed_by_them_and_by_no_slow_one(tmp_path):
    good = [answer(f"n{number}", tflops=[700.0 + number], sm_mhz=[1700]) for number in range(20)]
    slow_one = answer("s", tflops=[300.0], sm_mhz=[345])
    run = RunStore(tmp_path / "runs" / "e" / "r" / "1")
    run.path.mkdir(parents=True)
    append_line(run.ledger, line(Unhealthy(bad_nodes=("s",), detail="300 TFLOP/s")))
    for one in (*good, slow_one, replace(good[0], node="b", ok=False), answer("c", None, tflops=[1.0])):
        write(run.attempt(1).health / f"{one.node}.json", one)
    kinds = checks_of(tmp_path)
    assert {kind: len(checks) for kind, checks in kinds.items()} == {"2 x H200": 20}
    marks = of_good_nodes(kinds["2 x H200"])
    assert marks == PassMarks(tflops=632.0, sm_mhz=1530.0)
    assert slow({one.node: one for one in good}, marks) == {}
    assert list(slow({"s": slow_one}, marks)) == ["s"]
