"""All runs of a store together: no second twice, the same numbers as in their reports, each loss with its cause."""

import json
import random
import re

import pytest
from called import called
from fake_runs import START, FakeExperiment, end_event, start_event, write_attempt, write_attempts
from test_goodput import event, steps

from megaboa.files import write_json
from megaboa.observe import alerts, fleet, measure, prometheus
from megaboa.observe.queue import Queue
from megaboa.paths import ExperimentFolder
from megaboa.records import NodeTrouble, Recovery, line, plain
from megaboa.run.node_memory import DAY
from megaboa.scheduler.answers import Life, QueuedJob
from megaboa.store_paths import NodesFolder

NOW = START + 10_000


def read(root, now=NOW, **more):
    return fleet.read_fleet(root / "store", Queue(now), now, **more)


def run_of(experiment, name, entries, events, dp=1):
    store = experiment.plan_run(name, dp=dp)
    for number in {one["attempt"] for one in events}:
        write_attempt(store, number, [one for one in events if one["attempt"] == number])
    experiment.begin(name, store, entries)
    return store


def failing(nodes=("n1", "n2"), bad=("n2",), cause="node_failure", spares=(), between=(), then=None):
    """A run of four ranks on two nodes: 13 steps, of which 3 are done again, and 10 further ones.

    `between`: entries before the second attempt; `then`: its own values."""
    events = [
        event("train_start", 1, START + 40),
        *steps(1, 1, 13, START + 40),
        event("train_start", 2, START + 100),
        *steps(2, 11, 20, START + 100),
    ]
    begins = {"nodes": list(nodes), "spares": list(spares), "world_size": 4}
    entries = [
        {"event": "call", "time": START, "job": None},
        start_event(1, START + 10, **begins),
        end_event(1, 10, START + 60, outcome="failed", cause=cause, action="resume", bad_nodes=list(bad)),
        *between,
        start_event(2, START + 70, resumed_from=10, **{**begins, **(then or {})}),
        end_event(2, 20, START + 110),
    ]
    return entries, events


def test_a_failure_costs_what_was_done_again_the_wait_and_the_next_start(tmp_path):
    run_of(FakeExperiment(tmp_path), "a", *failing())
    found = read(tmp_path)
    assert dict(found.total.spent) == {"start": 4 * 40.0, "productive": 4 * 20.0}
    # Three steps, seven seconds until it was seen, ten until ranks started again, and thirty until they trained.
    assert dict(found.total.lost) == {"node_failure": 4 * (3.0 + 7.0 + 10.0 + 30.0)}
    assert found.ends == {"node_failure": 1}
    nodes = found.nodes
    assert list(nodes) == ["n2", "n1"]  # what cost most comes first
    assert (nodes["n2"].blamed, nodes["n1"].blamed) == (200.0, 0.0)
    assert nodes["n1"].held == nodes["n2"].held == found.total.held / 2
    assert nodes["n1"].lost == nodes["n2"].lost == {"node_failure": 100.0}, "the other node's ranks wait as well"
    assert nodes["n1"].tokens == nodes["n2"].tokens == found.runs[0].tokens / 2 > 0
    assert fleet.losses(nodes["n1"]) == "node failure 0.028"


def test_spares_are_held_too_and_are_in_no_share(tmp_path):
    run_of(FakeExperiment(tmp_path), "a", *failing(spares=["n3"]))
    found = read(tmp_path)
    assert found.total.spent["spare"] == 2 * 110.0  # as many ranks as another node has
    assert found.nodes["n3"].held == 220.0
    assert found.total.effective == pytest.approx(20 / 110)


def test_a_node_that_a_spare_has_replaced_is_held_as_long_as_the_job_has_it(tmp_path):
    replaced = {"nodes": ["n1", "n3"], "spares": [], "unused": ["n2"]}
    run_of(FakeExperiment(tmp_path), "a", *failing(spares=["n3"], then=replaced))
    found = read(tmp_path, price=1.0)
    assert {name: node.held for name, node in found.nodes.items()} == {"n1": 220.0, "n2": 220.0, "n3": 220.0}
    assert found.total.spent["spare"] == 220.0 and found.cost(found.total) == 660.0 / 3600
    assert found.total.effective == pytest.approx(20 / 110)


def test_a_check_that_refuses_nodes_costs_the_time_before_it_and_so_does_a_job_that_goes_back(tmp_path):
    between = [
        {"event": "unhealthy", "time": START + 64, "bad_nodes": ["n2"]},
        {"event": "trust", "time": START + 65, "iteration": 10},
        {"event": "unhealthy", "time": START + 67, "bad_nodes": ["n4", "n5"]},
    ]
    run_of(FakeExperiment(tmp_path), "a", *failing(cause="hang", bad=(), between=between))
    found = read(tmp_path)
    # Of the ten seconds without ranks four and two.
    assert dict(found.total.lost) == {"hang": 4 * (50.0 - 6.0), "unhealthy": 4 * 6.0}
    assert {name: node.blamed for name, node in found.nodes.items()} == {"n2": 16.0, "n4": 4.0, "n5": 4.0, "n1": 0.0}
    assert fleet.causes(found) == [("hang", 1, 176.0), ("failed health check", 0, 24.0)]
    assert found.total.held == 4 * 110.0 == sum(node.held for node in found.nodes.values())
    assert read(tmp_path, since=START + 66).total.lost["unhealthy"] == 4 * 1.0


def test_the_time_of_a_life_that_left_its_nodes_is_lost_to_them(tmp_path, monkeypatch):
    begins = {"job": "7", "nodes": ["n1", "n2"], "world_size": 4}
    entries = [
        start_event(1, START, **begins),
        end_event(1, 10, START + 20, outcome="failed", cause="preempted", action="requeue"),
        {"event": "left", "time": START + 109, "nodes": ["n2"]},
        start_event(2, START + 205, **begins, restarts=2, resumed_from=10),
        end_event(2, 20, START + 225),
    ]
    events = [*steps(1, 1, 10, START + 10), *steps(2, 11, 20, START + 215)]
    held = ((0, 0, 23), (23, 100, 110), (110, 200, 226))
    lives = [Life("7", *(START + moment for moment in life)) for life in held]
    monkeypatch.setattr(fleet, "_lives", lambda ledgers: lives)
    run_of(FakeExperiment(tmp_path), "a", entries, events)
    found = read(tmp_path)
    assert found.total.lost["left"] == 4 * 9.0 == found.nodes["n2"].blamed, "of its ten seconds"
    assert found.total.lost["preempted"] == 4 * (3.0 + 1.0 + 5.0 + 10.0)
    assert "avoided nodes 0.01" in fleet.losses(found.total)


@pytest.mark.parametrize("seed", range(6))
def test_it_agrees_with_the_reports_of_the_same_runs(tmp_path, seed):
    """Whatever happened to them: share, time, tokens of each run are those of goodput.json and summary.json."""
    rng, experiment = random.Random(seed), FakeExperiment(tmp_path)
    for name in "abc":
        now, entries, events, done = START, [{"event": "call", "time": START, "job": None}], [], 0
        for attempt in range(1, 5):
            now += rng.uniform(0, 40)
            saved = done // 10 * 10
            entries.append(start_event(attempt, now, resumed_from=saved, world_size=2))
            begun = saved + rng.randrange(0, 25) if attempt < 4 else 60
            events.append(event("phase", attempt, now + 1, phase="configured"))
            if begun > saved:
                events.append(event("train_start", attempt, now + 5))
                events += steps(attempt, saved + 1, begun, now + 5, seconds=rng.uniform(0.5, 2.0), gap=0.1)
            now = max(one["time"] for one in events) + rng.uniform(0, 30)
            cause = rng.choice(["hang", "killed", "crash"])
            how = {"outcome": "failed", "cause": cause, "action": "resume"} if attempt < 4 else {}
            if attempt == 4 or rng.random() < 0.8:  # some ends are never written
                entries.append(end_event(attempt, done, now, **how))
            done = begun
        store = run_of(experiment, name, entries, events, dp=2)
        experiment.finish(name, store, 60, world_size=2)
    found = read(tmp_path)
    assert [run.run for run in found.runs] == ["a", "b", "c"]
    for run in found.runs:
        measured = measure.trained(ExperimentFolder(experiment.results).run(run.run))
        told = measured.goodput
        assert run.tokens == measured.summary.tokens
        assert run.use.effective == pytest.approx(told.goodput)
        assert run.use.held == pytest.approx(2 * told.allocated_seconds)
        for kind in ("productive", "checkpoint", "evaluation"):
            assert run.use.spent[kind] == pytest.approx(2 * told.seconds[kind])
        assert sum(node.held for node in run.nodes.values()) == pytest.approx(run.use.held)
    assert found.total.held == pytest.approx(sum(run.use.held for run in found.runs))


def test_a_run_under_way_counts_up_to_its_last_event(tmp_path):
    events = [event("train_start", 1, START + 40), *steps(1, 1, 10, START + 40)]
    run_of(FakeExperiment(tmp_path), "a", [start_event(1, START, world_size=8)], events)
    (run,) = read(tmp_path).runs
    assert (run.progress.state, run.use.held, run.use.spent["productive"]) == ("running", 8 * 50.0, 8 * 10.0)
    assert (run.ends.total(), run.use.lost.total()) == (0, 0)


def test_an_attempt_without_a_step_was_in_vain_and_its_cause_pays(tmp_path):
    entries = [
        start_event(1, START),
        end_event(1, 0, START + 30, outcome="failed", cause="config", action="stop"),
        {"event": "call", "time": START + 500, "job": None},
        start_event(2, START + 500),
        end_event(2, 10, START + 540),
    ]
    events = [event("phase", 1, START + 20, phase="configured"), *steps(2, 1, 10, START + 530)]
    run_of(FakeExperiment(tmp_path), "a", entries, events)
    found = read(tmp_path)
    assert dict(found.total.lost) == {"config": 30.0 + 30.0}  # and the start that was needed again
    assert found.total.held == 70.0  # nobody asked for the time between the calls


def test_what_was_before_a_window_is_not_counted(tmp_path):
    run_of(FakeExperiment(tmp_path), "a", *failing())
    whole, later = read(tmp_path), read(tmp_path, since=START + 105)
    assert later.total.held == 4 * 5.0 == later.total.spent["productive"]
    assert (later.runs[0].tokens, later.ends.total()) == (6 * 1024, 0)  # one step ended as it began
    assert read(tmp_path, since=START - 1).total == whole.total


def test_a_run_that_did_nothing_in_the_window_is_not_read(tmp_path, monkeypatch):
    run_of(FakeExperiment(tmp_path), "a", *failing())
    monkeypatch.setattr(fleet, "read_events", None)
    assert read(tmp_path, since=2**40).runs == ()


def test_ledgers_that_cannot_be_read_are_named_and_the_others_are_counted(tmp_path):
    experiment = FakeExperiment(tmp_path)
    run_of(experiment, "good", *failing())
    garbage, headless, nobody = (experiment.plan_run(name) for name in ("garbage", "headless", "nobody"))
    (garbage / "attempts.jsonl").write_text("[1, 2]\n")
    write_attempts(headless, [{"event": "start", "time": START}])
    write_attempts(nobody, [start_event(1)])
    (nobody / "identity.json").write_text("{")
    found = read(tmp_path)
    assert [run.run for run in found.runs] == ["good"]
    assert {path.parent for path in found.broken} == {garbage, headless, nobody}
    assert (
        "'start'" in found.broken[headless / "attempts.jsonl"]
        and "attempt" in found.broken[headless / "attempts.jsonl"]
    )


def test_two_identities_of_a_run_are_two_and_the_newest_is_what_it_is_now(tmp_path):
    experiment = FakeExperiment(tmp_path)
    run_of(experiment, "a", *failing())
    store = experiment.plan_run("a", steps=99)
    experiment.begin("a", store, [start_event(1, START + 900)])
    found = read(tmp_path)
    assert len({run.identity for run in found.runs}) == 2
    assert [run.store.path for run in found.latest] == [store]


@pytest.mark.parametrize(
    ("events", "limit"),
    [
        ([], 60 * fleet.USUAL_START_MINUTES),
        ([event("train_start", 1, START + 500)], 60 * fleet.USUAL_START_MINUTES),
        ([event("train_start", 1, START + 500), *steps(1, 1, 3, START + 500, seconds=400.0)], 3 * 400.0),
        ([event("train_start", 1, START + 5), *steps(1, 1, 9, START + 5)], 600.0),
    ],
)
def test_how_long_a_run_may_be_quiet_is_by_its_own_past(tmp_path, events, limit):
    store = FakeExperiment(tmp_path).plan_run("a")
    write_attempt(store, 1, events)
    write_attempts(store, [start_event(1, START)])
    assert read(tmp_path).runs[0].quiet_limit == limit


# What a person is told


def live(experiment, name, silent, **more):
    """A run that trains on another host, whose last step was so many seconds ago; its steps take five."""
    begin = NOW - silent - 100
    events = [event("train_start", 1, begin), *steps(1, 1, 20, begin, seconds=5.0)]
    return run_of(experiment, name, [start_event(1, begin - 30, host="elsewhere", **more)], events)


def asks_for(store, command):
    write_json(store / "attempts" / "01" / "asked.json", {"launch": {"recovery": {**RECOVERY, "notify": command}}})


RECOVERY = plain(Recovery(budget=5, backoff_seconds=0, no_progress_minutes=30, start_minutes=60, stop_seconds=60,
                          exclude_hours=24, actions={}, loss_spike=None, notify=None))  # fmt: skip


def told(root, command=None, now=NOW, **more):
    lines = []
    found = read(root, now=now, **{key: value for key, value in more.items() if key != "least"})
    alerts.send(root / "store", alerts.alerts(found, more.get("least")), command, lines.append, now)
    return lines


def states(root, least=None, **more):
    return [(one.state, one.subject) for one in alerts.alerts(read(root, **more), least)]


def remembers(store, node, **more):
    path = NodesFolder.of(store).node("hpc", node)
    path.parent.mkdir(parents=True)
    troubles = [NodeTrouble(what="gpu_failure", time=NOW - DAY * k, **more) for k in (0, 1)]
    path.write_text("".join(f"{line(trouble)}\n" for trouble in troubles))


def test_a_run_that_is_silent_for_longer_than_ever_is_told_of(tmp_path):
    experiment = FakeExperiment(tmp_path)
    live(experiment, "steady", 300)
    live(experiment, "stuck", 700)
    live(experiment, "abandoned", 8 * DAY)
    assert states(tmp_path) == [("quiet", "tiny/stuck")]


def test_a_run_that_nobody_trains_any_more_is_told_of(tmp_path):
    experiment = FakeExperiment(tmp_path)
    live(experiment, "gone", 100, job="7")
    live(experiment, "waits", 100, job="8")
    live(experiment, "ended", 100, job="9")
    run_of(experiment, "killed", [start_event(1, NOW - 50, pid=2**22 + 1)], [])
    ledger = experiment.results.parents[1] / "store" / "runs" / "tiny" / "ended"
    (path,) = ledger.glob("*/attempts.jsonl")
    with path.open("a") as stream:
        stream.write(json.dumps(end_event(1, 0, NOW - 50, outcome="failed", cause="nan", action="stop")) + "\n")
    queue = Queue(NOW, True, (QueuedJob("8", "PENDING", waits=True),))
    found = alerts.alerts(fleet.read_fleet(tmp_path / "store", queue, NOW))
    assert sorted((one.state, one.subject) for one in found) == [
        ("lost", "tiny/gone"),
        ("lost", "tiny/killed"),
    ]
    unasked = fleet.read_fleet(tmp_path / "store", Queue(NOW), NOW)  # nothing may be concluded from that
    assert [one.subject for one in alerts.alerts(unasked)] == ["tiny/killed"]


def test_an_experiment_whose_time_is_not_effective_is_told_of_once_it_held_an_hour(tmp_path):
    run_of(FakeExperiment(tmp_path), "a", *failing())
    assert states(tmp_path, 0.9) == []  # 110 seconds: all start
    slow = FakeExperiment(tmp_path, "slow")
    events = [event("train_start", 1, START + 3000), *steps(1, 1, 10, START + 3000, seconds=100.0)]
    run_of(slow, "b", [start_event(1, START), end_event(1, 10, START + 4000)], events)
    assert states(tmp_path, 0.9) == [("ineffective", "slow")] and states(tmp_path, 0.2) == states(tmp_path) == []


def test_a_node_that_all_runs_avoid_is_told_of(tmp_path):
    path = NodesFolder.of(tmp_path / "store").node("hpc", "n2")
    path.parent.mkdir(parents=True)
    path.write_text(
        "".join(line(NodeTrouble(what="gpu_failure", time=NOW - DAY * k, run="tiny/a")) + "\n" for k in (0, 1))
    )
    assert states(tmp_path) == [("bad_node", "n2")]
    assert read(tmp_path).avoided("n2") and not read(tmp_path).avoided("n1")


def test_what_is_told_is_told_once_by_the_command_of_the_run(tmp_path):
    experiment = FakeExperiment(tmp_path)
    asks_for(live(experiment, "stuck", 700), f'echo "$MEGABOA_RUN|$MEGABOA_STATE|$MEGABOA_DETAIL" >>{tmp_path}/heard')
    live(experiment, "mute", 800)
    first = told(tmp_path)
    assert (
        len(first) == 3
        and "no recovery.notify is known" in first[1 + first.index(next(x for x in first if "mute" in x))]
    )
    assert (
        (tmp_path / "heard").read_text().startswith("stuck|quiet|tiny/stuck: has done nothing for 11 min, at step 20")
    )
    assert told(tmp_path) == told(tmp_path, now=NOW + 3 * DAY) == []
    assert (tmp_path / "heard").read_text().count("\n") == 1


def test_what_comes_and_goes_is_not_told_again_on_the_same_day(tmp_path):
    slow = FakeExperiment(tmp_path, "slow")
    events = [event("train_start", 1, START + 3000), *steps(1, 1, 10, START + 3000, seconds=100.0)]
    run_of(slow, "b", [start_event(1, START), end_event(1, 10, START + 4000)], events)
    assert len(told(tmp_path, "true", least=0.9)) == 1
    assert told(tmp_path, "true", least=0.1) == told(tmp_path, "true", least=0.9) == []
    assert told(tmp_path, "true", least=0.1, now=NOW + 2 * DAY) == []
    assert len(told(tmp_path, "true", least=0.9, now=NOW + 2 * DAY)) == 1


def test_a_command_of_another_users_run_is_not_executed(tmp_path, monkeypatch):
    store = live(FakeExperiment(tmp_path), "stuck", 700)
    asks_for(store, f"touch {tmp_path}/executed")
    asked = store / "attempts" / "01" / "asked.json"
    asked.chmod(0o664)
    assert "others can have written" in told(tmp_path)[1]
    assert not (tmp_path / "executed").exists()


def test_an_alert_whose_command_failed_is_sent_again(tmp_path):
    live(FakeExperiment(tmp_path), "stuck", 700)
    assert "the notification failed with exit status 7" in told(tmp_path, "exit 7")[1]
    assert len(told(tmp_path, f"touch {tmp_path}/heard")) == 1 and (tmp_path / "heard").exists()
    assert told(tmp_path, "true") == []


def test_where_nothing_can_be_noted_nothing_is_told(tmp_path):
    live(FakeExperiment(tmp_path), "stuck", 700)
    (tmp_path / "store" / "fleet").touch()  # no folder
    done = called("fleet", tmp_path / "store", "--alert", "--notify", f"touch {tmp_path}/told")
    assert done.returncode == 1 and "can't be noted" in done.stderr and not (tmp_path / "told").exists()


def test_a_command_for_all_is_told_of_nodes_too(tmp_path):
    remembers(tmp_path / "store", "n2")
    assert len(told(tmp_path, f'echo "$MEGABOA_NODE|$MEGABOA_STATE" >>{tmp_path}/heard')) == 1
    assert (tmp_path / "heard").read_text() == "n2|bad_node\n"


# For Prometheus

SAMPLE = re.compile(r'([a-z_]+)(?:\{((?:[a-z_]+="(?:[^"\\\n]|\\[\\"n])*",?)*)\})? (\S+)')


def parsed(text):
    """Of the text format, strictly: every sample below its metric's HELP and TYPE, none twice."""
    kinds, samples = {}, {}
    assert text.endswith("\n")
    for row in text.splitlines():
        if row.startswith("# HELP "):
            name = row.split()[2]
            assert name not in kinds and len(row.split()) > 4
        elif row.startswith("# TYPE "):
            assert row.split()[2] == name
            kinds[name] = row.split()[3]
        else:
            found = SAMPLE.fullmatch(row)
            assert found and found[1] == name and (found[1], found[2]) not in samples, row
            samples[found[1], found[2]] = float(found[3])
    return kinds, samples


def test_the_text_for_prometheus_keeps_its_rules(tmp_path):
    run_of(FakeExperiment(tmp_path, 'my "odd\\one"'), "a", *failing())
    experiment = FakeExperiment(tmp_path)
    run_of(experiment, "b", *failing(cause="hang"))
    run_of(experiment, "b", *failing())
    experiment.plan_run("c")
    found = read(tmp_path, price=2.0)
    kinds, samples = parsed(prometheus.text(found))
    assert all(name.startswith("megaboa_") for name in kinds)
    assert {kind for name, kind in kinds.items() if name.endswith("_total")} == {"counter"}
    assert {kind for name, kind in kinds.items() if not name.endswith("_total")} == {"gauge"}
    assert not any(re.search("hour|minute|percent|milli", name) for name in kinds)
    odd = next(labels for name, labels in samples if name == "megaboa_run_tokens" and "odd" in labels)
    assert odd.startswith(r'experiment="my \"odd\\one\"",run="a",id="')
    total = sum(value for (name, _), value in samples.items() if name == "megaboa_run_rank_seconds")
    assert total == pytest.approx(found.total.held)
    lost = [
        value
        for (name, labels), value in samples.items()
        if name == "megaboa_run_rank_seconds" and 'use="lost"' in labels
    ]
    by_cause = [value for (name, _), value in samples.items() if name == "megaboa_run_lost_rank_seconds"]
    assert sum(lost) == pytest.approx(sum(by_cause)) and sum(by_cause) > 0
    cost = [value for (name, _), value in samples.items() if name == "megaboa_run_cost"]
    assert sum(cost) == pytest.approx(2.0 * found.total.held / 3600)
    for of_runs, of_nodes in (
        ("run_lost_rank_seconds", "node_lost_rank_seconds"),
        ("run_tokens", "node_tokens"),
        ("run_cost", "node_cost"),
    ):
        one, other = (
            sum(value for (name, _), value in samples.items() if name == f"megaboa_{of}") for of in (of_runs, of_nodes)
        )
        assert one == pytest.approx(other) and one > 0, of_nodes


# The command


def test_the_command_shows_writes_and_tells(tmp_path):
    run_of(FakeExperiment(tmp_path), "a", *failing())
    (FakeExperiment(tmp_path, "torn").plan_run("x") / "attempts.jsonl").write_text('{"event": "start", "time": 1}\n')
    store, page, text = tmp_path / "store", tmp_path / "out" / "fleet.html", tmp_path / "megaboa.prom"
    done = called("fleet", store, "--price", "3")
    assert done.returncode == 0 and "node failure" in done.stdout and "n2" in done.stdout
    assert "left out: " in done.stderr and str(store / "runs" / "torn" / "x") in done.stderr
    done = called("fleet", store, "--page", page, "--prometheus", text, "--alert")
    assert (done.returncode, done.stdout) == (0, "")
    assert parsed(text.read_text())[1]["megaboa_fleet_unreadable_ledgers", None] == 1
    html = page.read_text()
    assert "node failure" in html and "src=" not in html and "http" not in html
    assert not list(tmp_path.rglob("*.tmp"))
    told = json.loads(called("fleet", store, "--json").stdout)
    assert told["nodes"]["n1"]["lost"] == {"node_failure": 100.0} and told["nodes"]["n1"]["tokens"] > 0
    assert told["runs"][0]["lost"] == {"node_failure": 200.0} and told["effective"] == pytest.approx(20 / 110)


def test_an_experiments_name_is_text_on_the_page(tmp_path):
    run_of(FakeExperiment(tmp_path, "<script>alert(1)</script>".replace("/", "-")), "a", *failing())
    called("fleet", tmp_path / "store", "--page", tmp_path / "fleet.html")
    assert "<script>alert" not in (tmp_path / "fleet.html").read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--since", "soon"], "is not a duration such as"),
        (["--since", "7d", "--prometheus", "a.prom"], "leave out --since"),
        (["--prometheus", "a.txt"], "end in .prom"),
        (["--notify", "true"], "--notify needs --alert"),
        (["--least", "90"], "at most 1"),
        (["--price", "-1"], "above 0"),
    ],
)
def test_what_is_asked_wrongly_is_said(tmp_path, words, said):
    done = called("fleet", tmp_path, *words)
    assert done.returncode == 2 and said in done.stderr


def test_an_empty_store_and_none(tmp_path):
    assert "no run has begun" in called("fleet", tmp_path).stdout
    done = called("fleet", tmp_path / "none")
    assert done.returncode == 1 and "there is no store" in done.stderr
