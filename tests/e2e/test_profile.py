"""The profile stage: a short run of its own under PyTorch's profiler."""

import gzip
import json

import pytest

pytestmark = pytest.mark.slow


def test_a_profile_is_captured_beside_the_run_and_trains_nothing(workspace):
    profile = "profile: {tool: pytorch, steps: [2, 4], ranks: [1]}\n"
    config = workspace.experiment("traced", {"dp2": "{resources.gpus_per_node: 2}"}, more=profile)
    workspace.snakemake("profile", "--configfile", config)
    manifest = workspace.json("traced", "runs", "dp2", "trace.json")
    assert manifest["traces"] == ["rank-1.json.gz"]
    with gzip.open(workspace.path / manifest["path"] / "rank-1.json.gz") as trace:
        events = json.load(trace)["traceEvents"]
    names = {event.get("name") for event in events}
    assert {"aten::mm", "aten::embedding"} & names
    assert len([name for name in names if name and name.startswith("ProfilerStep#")]) == 2
    assert not workspace.results("traced", "runs", "dp2", "train.json").exists()


def test_a_rank_that_the_run_does_not_have_is_named(workspace):
    config = workspace.experiment("untraced", {"a": "{}"}, more="profile: {tool: pytorch, ranks: [3]}\n")
    output = workspace.snakemake("profile", "--configfile", config, code=1)
    assert "profile.ranks names rank 3" in output
