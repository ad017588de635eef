import csv
from dataclasses import replace

from gpt2_large import facts
from test_costs import course

from megaboa.check import costs, overview
from megaboa.records import RunCheck


def rows():
    given = course(facts(gbs=64, world=2))
    good = overview.row("a", RunCheck(), given, costs.of_run(given, given=0.45))
    return [good, overview.row("b", RunCheck(state="FAIL", reasons=("no", "never")), None, None)]


def test_a_table_that_a_person_can_read():
    total = costs.total([costs.of_run(course(facts(gbs=64, world=2)), given=0.45), None])
    head, first, second, last = overview.text(rows(), total).splitlines()
    assert head.split() == [*overview.HEAD[:-1], "time", "by"]
    assert " ".join(first.split()) == "a PASS 2 dp2 774M 75.7 139.6 65.5M 3.22e+17 0.45 0.25 108 GB given"
    assert second.split()[:2] == ["b", "FAIL"]
    sums = "65.5M tokens, 3.22e+17 FLOP, 0.25 GPU-hours, 108 GB on disk"
    assert last == f"2 runs: {sums}; without 1 run of which nothing is known"


def test_what_is_unknown_is_not_zero():
    known = costs.of_run(course(facts(gbs=64, world=2)), given=0.45)
    untimed = replace(known, step_seconds=None)
    both = "2 runs: 131M tokens, 6.44e+17 FLOP, 0.25 GPU-hours, 217 GB on disk; 1 run of unknown duration"
    said = {
        "1 run: tokens, FLOP, GPU-hours and disk are unknown": [None],
        "1 run: 65.5M tokens, 3.22e+17 FLOP, GPU-hours unknown, 108 GB on disk": [untimed],
        both: [untimed, known],
    }
    for last, of_runs in said.items():
        assert overview.text([rows()[0]] * len(of_runs), costs.total(of_runs)).splitlines()[-1] == last


def test_the_same_as_tsv():
    good, bad = csv.DictReader(overview.tsv(rows()).splitlines(), delimiter="\t")
    assert (good["run"], good["layout"], good["tokens"], good["checkpoints"]) == ("a", "dp2", "65536000", "10")
    assert float(good["memory_gib"]) == 75.71 and float(good["activations_gib"]) == 45.09
    assert (bad["state"], bad["why"], bad["memory_gib"]) == ("FAIL", "no; never", "-")


def test_processors_need_no_memory_for_cuda():
    on_gpus = course(facts(gbs=64, world=2))
    on_processors = replace(on_gpus, cluster=replace(on_gpus.cluster, device="cpu"))
    with_cuda, without = (overview.row("a", RunCheck(), one, None) for one in (on_gpus, on_processors))
    assert with_cuda["memory_gib"] > with_cuda["tensors_gib"] + 3
    assert without["memory_gib"] == without["tensors_gib"]
