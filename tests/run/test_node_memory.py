"""megaboa.run.node_memory: what counts against a node, for how long, and that jobs can still start."""

import json

import pytest
import yaml
from called import called

from megaboa import files
from megaboa.config.models.resources import Recovery
from megaboa.paths import RunFolder
from megaboa.records import BetweenNodes, NodeHealth, NodeTrouble, PassMarks, write
from megaboa.run import bad_nodes, node_memory
from megaboa.run.node_memory import DAY, FORGOTTEN, Remembered, judge
from megaboa.scheduler.slurm import queries
from megaboa.store_paths import AttemptFolder, NodesFolder

NOW = 1_800_000_000.0


def trouble(what="node_failure", days=0.0, **more):
    return NodeTrouble(what=what, time=NOW - days * DAY, **more)


@pytest.mark.parametrize(
    ("troubles", "score", "avoided"),
    [
        ([trouble()], 1.0, False),  # chance, or the run's own fault
        ([trouble(), trouble(days=1)], 1 + 0.5 ** (1 / 7), True),
        ([trouble(days=7), trouble(days=7.1)], 0.5 + 0.5 ** (7.1 / 7), False),
        ([trouble(), trouble(days=0.02)], 1.0 * 0.5 ** (0.02 / 7), False),  # other runs met the same event
        ([trouble("gpu_failure"), trouble("gpu")], 1.5, True),
        ([trouble("slow")] * 9, 0.25, False),  # attempt after attempt
        ([trouble("slow", days) for days in range(8)], sum(0.25 * 0.5 ** (day / 7) for day in range(8)), False),
        ([trouble(), trouble(), trouble(FORGOTTEN), trouble("slow")], 0.25, False),
        ([trouble("of a later version")] * 9, 0.0, False),
    ],
)
def test_what_troubles_count(troubles, score, avoided):
    found = judge("n1", troubles, NOW, days=7.0)
    assert found.score == pytest.approx(score) and found.avoided is avoided


def test_a_node_comes_back_on_the_day_that_is_told():
    found = judge("n1", [trouble(), trouble("gpu_failure"), trouble("unhealthy")], NOW, days=7.0)
    assert found.returns(7.0) == pytest.approx(7.0)  # 3 is twice 1.5
    assert not judge("n1", found.troubles, NOW + 7.01 * DAY, days=7.0).avoided


def worst_first(*names):
    return [Remembered(name, (), 9.0 - number) for number, name in enumerate(names)]


@pytest.mark.parametrize(
    ("needed", "kept", "avoided"),
    [
        (17, set(), {"n1", "n2"}),  # a tenth of twenty, and one more than needed is left
        (18, set(), {"n1"}),
        (19, set(), set()),
        (17, {"n5"}, {"n1"}),  # the run's own first
        (2, set(), {"n1", "n2"}),  # where more are bad, something else is
        (29, set(), set()),
    ],
)
def test_never_so_many_are_avoided_that_a_job_cannot_start(needed, kept, avoided):
    usable = {f"n{number}" for number in range(1, 21)}
    assert node_memory.bad(worst_first("n1", "n2", "n3"), usable, kept, needed) == avoided


@pytest.fixture
def run_of(tmp_path, fake_command, monkeypatch):
    """Runs of several experiments that share a store, on a cluster of five nodes."""
    fake_command("sinfo", "for n in 1 2 3 4 5; do echo n$n idle; done")
    monkeypatch.setattr(queries, "cluster", lambda: "lab")

    def make(experiment="one", **recovery):
        folder = RunFolder(tmp_path / "results" / experiment / "runs" / "a")
        asked = Recovery(**recovery).model_dump(mode="json")
        files.write_json(folder.path / "launch.json", {"nodes": 2, "store": str(tmp_path / "store"), "recovery": asked})
        return folder

    return make


def test_what_one_run_met_another_avoids(run_of):
    node_memory.remember(run_of(), {"n3": "node n3 is DOWN*"}, "node_failure", 1)
    assert bad_nodes.avoided([], "gpu", run_of("two"), set()) == set(), "once is chance"
    node_memory.remember(run_of(), {"n3": "2 GPUs instead of 4"}, "unhealthy")
    assert bad_nodes.avoided([], "gpu", run_of("two"), set()) == {"n3"}
    assert bad_nodes.avoided([], "gpu", run_of("two"), {"n3"}) == set(), "the user excludes it anyway"
    assert bad_nodes.avoided([], "gpu", run_of("three", node_memory_days=0.0), set()) == set()


def test_another_cluster_that_shares_the_store_has_nodes_of_its_own(run_of, monkeypatch):
    for _ in range(2):
        node_memory.remember(run_of(), {"n3": "down"}, "node_failure", 1)
    monkeypatch.setattr(queries, "cluster", lambda: "other")
    assert node_memory.here(run_of()) == []


def test_a_store_that_cannot_be_written_stops_nothing(run_of, tmp_path):
    files.write_text(tmp_path / "store", "not a folder")
    node_memory.remember(run_of(), {"n3": "down"}, "node_failure", 1)
    assert node_memory.here(run_of()) == []


def test_broken_and_slow_gpus_are_remembered_of_the_schedulers_node(run_of, tmp_path):
    target = AttemptFolder(tmp_path / "attempts" / "01")
    found = [{"index": 0, "uuid": "a", "name": "H200"}, {"index": 1, "uuid": "b", "name": "H200"}]
    hot = {"event": "sample", "utilisation": [90, 90], "sm_mhz": [1900, 1900], "reasons": [0, 0x40]}
    errors = {"ecc_uncorrected": [0, 0]}, {"ecc_uncorrected": [3, 0]}
    lines = [{"event": "gpus", "host": "n2.cluster.org", "seconds": 5.0, "gpus": found}]
    lines += [{**hot, **more} for more in (*errors, {})]
    text = "".join(json.dumps({"time": NOW + number, **line}) + "\n" for number, line in enumerate(lines))
    files.write_text(target.gpus("n2.cluster.org"), text)
    node_memory.remember_gpus(run_of(), 1, target, ["n1", "n2"])
    (known,) = node_memory.here(run_of())
    said = {one.what: one.detail for one in known.troubles}
    assert known.node == "n2" and set(said) == {"slow", "gpu"}
    assert "GPU 1 slowed down for 100% of the time by heat (hardware)" in said["slow"]
    assert said["gpu"] == "GPU 0 3 uncorrected memory error(s) while it trained"


def test_the_command_names_them_with_their_evidence_and_forgets_what_is_repaired(run_of, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    store = f"--store={tmp_path / 'store'}"
    assert "no run has met a node" in called("nodes", store).stdout
    for what, detail in (("node_failure", "node n3 is DOWN*"), ("unhealthy", "2 GPUs instead of 4")):
        node_memory.remember(run_of(), {"n3": detail}, what, 1)
    node_memory.remember(run_of("two"), {"n1": "GPU 0 slowed down"}, "slow", 4)
    table = called("nodes", store).stdout
    assert "n3    2.00   for 2.9 days  1 x node failure, 1 x unhealthy" in table and "n1    0.25   no" in table
    assert "node failure: node n3 is DOWN* (one/a, attempt 1)" in called("nodes", "n3", store).stdout
    shown = json.loads(called("nodes", "--json", store).stdout)
    assert [one["avoided"] for one in shown["lab"]] == [True, False]
    assert called("nodes", "n3", "--forget", store).stdout == "n3: 2 trouble(s) count no more\n"
    assert "n3" not in called("nodes", store).stdout
    assert NodesFolder.of(tmp_path / "store").node("lab", "n3").exists(), "what was is kept"


def test_the_command_prints_marks_from_the_checks_of_the_store(run_of, tmp_path):
    store = f"--store={tmp_path / 'store'}"
    asked = called("nodes", "--marks", store)
    assert asked.returncode and "has no health check of a node with GPUs: set launch.health_check" in asked.stderr
    files.write_text(tmp_path / "store/runs/e/r/1/attempts.jsonl", "")
    folder = AttemptFolder(tmp_path / "store/runs/e/r/1/attempts/01").health
    for number, tflops in enumerate((880.0, 900.0)):
        measured = {"gpus": [{"name": "NVIDIA H200"}] * 2, "tflops": [tflops, 890.0], "node_gb_per_second": 250.0}
        check = NodeHealth(
            node=f"n{number}", number=number, ok=True, problems=(), stage="done",
            collective=BetweenNodes(reached=True), measured=measured,
        )  # fmt: skip
        folder.mkdir(parents=True, exist_ok=True)
        write(folder / f"n{number}.json", check)
    marks = yaml.safe_load(called("nodes", "--marks", store).stdout)["launch"]["pass_marks"]
    assert marks == {"tflops": 792, "node_gb_per_second": 225}
    assert PassMarks(**marks).tflops == 792
