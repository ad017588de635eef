"""A CUDA graph of short sequences: what cuDNN up to 9.15.0 can't replay is refused, other attention is replayed."""

import re

import pytest
from gpu_runs import BF16, BF16_RUN, GRAPH_RUN, assert_same_losses, done, experiment, losses, on_two_gpus

pytestmark = on_two_gpus

RUNS = {
    "eager": f"{{{BF16_RUN}}}",
    "graph": f"{{{BF16_RUN}, {GRAPH_RUN}}}",
    "unfused": f"{{{BF16_RUN}, {GRAPH_RUN}, overrides.model.attention_backend: unfused}}",
}


def configuration(workspace):
    return experiment(workspace, "short", RUNS, init="scratch", seq_length=64)


@pytest.fixture(scope="module")
def eager(workspace):
    done(workspace, configuration(workspace), "pretrain")
    return losses(workspace, "short", "eager")


def test_cudnns_attention_gives_the_same_losses_or_is_refused(workspace, eager):
    found = losses(workspace, "short", "graph")
    if found:
        assert_same_losses(found, eager, BF16)
    else:
        attempts = workspace.store("short", "graph") / "attempts"
        assert not (attempts / "02").exists()  # nor is it tried again
        said = (attempts / "01/rank-0.log").read_text()
        assert re.search(r"error: training.seq_length: 64 .*cuDNN 9\.15\.1.*here it is 9\.", said)


def test_other_attention_gives_the_same_losses(workspace, eager):
    assert_same_losses(losses(workspace, "short", "unfused"), eager, BF16)
