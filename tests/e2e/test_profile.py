"""The profile stage: a short run of its own under PyTorch's profiler, its analysis, and both in the report."""

import gzip
import json
import pstats

import pytest

pytestmark = pytest.mark.slow

RUNS = {
    "dp2": "{profile.tool: pytorch, profile.ranks: [0, 1], resources.gpus_per_node: 2}",
    "own": "{profile.tool: profilers/cprofile.py, profile.ranks: [0], optimizer.lr: 0.001}",
}
MORE = """\
profile: {steps: [2, 7]}
overrides: {profiling.use_viztracer: true}
"""


def test_a_profile_is_captured_beside_the_run_and_trains_nothing(workspace):
    config = workspace.experiment("traced", RUNS, more=MORE)
    workspace.snakemake("profile", "--configfile", config)
    manifest = workspace.json("traced", "runs", "dp2", "trace.json")
    assert manifest["traces"] == ["rank-0.json.gz", "rank-1.json.gz"]
    with gzip.open(workspace.path / manifest["path"] / "rank-1.json.gz") as trace:
        events = json.load(trace)["traceEvents"]
    names = {event.get("name") for event in events}
    assert {"aten::mm", "aten::embedding"} & names
    assert len([name for name in names if name and name.startswith("ProfilerStep#")]) == 5
    assert not workspace.results("traced", "runs", "dp2", "train.json").exists()

    analysis = workspace.json("traced", "runs", "dp2", "analysis.json")
    assert {row["window"]: row["n"] for row in analysis["ranks"]} == {
        "steps 3 to 5 of rank 0": 3,
        "steps 3 to 5 of rank 1": 3,
    }
    for row in analysis["budget"]:
        assert row["wall"] == pytest.approx(row["compute"] + row["exposed"] + row["idle"])
        assert row["compute"] > 0 and row["communication"] > 0 and row["copies"] is None
    codes = {finding["code"] for finding in analysis["findings"]}
    assert "host_only" in codes and not {"steps_outside", "missing_rank", "truncated", "unlike_ranks"} & codes
    assert {row["part"] for row in analysis["ranks"]} == {"the whole model"} and len(analysis["summary"]) <= 10
    assert analysis["clocks"][0]["offset_us"] == 0 and analysis["waiting"]["matched"] > 0


def test_what_the_profiler_costs_is_measured_in_the_same_run(workspace):
    cost = workspace.json("traced", "runs", "dp2", "analysis.json")["perturbation"]
    assert (cost["captured_n"], cost["reference_n"], cost["reference"]) == (3, 4, "steps 8 to 11")
    assert cost["captured_ms"] > 0 and cost["slowdown"] > -1


def test_a_profiler_of_the_users_own_sees_the_steps_that_were_asked_for(workspace):
    manifest = workspace.json("traced", "runs", "own", "trace.json")
    assert manifest["traces"] == ["rank-0.pstats"]
    seen = pstats.Stats(str(workspace.path / manifest["path"] / "rank-0.pstats")).stats
    assert [calls for (_, _, name), (calls, *_) in seen.items() if name == "on_training_step_start"] == [5]
    analysis = workspace.json("traced", "runs", "own", "analysis.json")
    assert "kept" in {finding["code"] for finding in analysis["findings"]}
    assert analysis["summary"][0].endswith(" keeps 1 file of profilers/cprofile.py, for its own viewer to read.")
    assert analysis["perturbation"]["captured_n"] == 3 and not analysis["captures"] and analysis["device"] == "cpu"


def test_the_report_shows_the_profile(workspace):
    config = workspace.path / "traced.yaml"
    before = workspace.results("traced", "runs", "dp2", "trace.json").stat().st_mtime
    workspace.snakemake("--configfile", config)
    assert workspace.results("traced", "runs", "dp2", "trace.json").stat().st_mtime == before
    html = workspace.results("traced", "report", "index.html").read_text()
    summary = workspace.json("traced", "runs", "dp2", "analysis.json")["summary"]
    assert 'id="profiles"' in html and summary[0] in html
    assert workspace.results("traced", "report", "profile_0_timeline.png").exists()


def test_viztracer_traces_the_training_where_an_override_asks_for_it(workspace):
    attempt = workspace.store("traced", "dp2") / "attempts" / "01"
    assert sorted(path.name for path in (attempt / "viztracer").iterdir()) == ["rank-0.json", "rank-1.json"]
    events = json.loads((attempt / "viztracer" / "rank-1.json").read_text())["traceEvents"]
    steps = [event for event in events if event["name"].startswith("on_training_step_start ") and event["ph"] == "X"]
    assert len(steps) == 5
