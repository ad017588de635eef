"""The host's times of layers, with two ranks that share them, as GPUs of a node do: here over gloo."""

import os
import sys

import pytest

from megaboa.scheduler import local

pytestmark = pytest.mark.slow

MEASURE = """
import torch, torch.distributed as dist
from megaboa.bridge.process import prepare
from megaboa.bridge.quiet import quietly

with quietly():
    prepare("cpu")
    from megaboa.bridge import host_times
from megaboa.bridge.kernel_times import Bench

for ranks in range(1, 9):  # of a node with so many GPUs
    host_times.provider(host_times.GPU, 6, host_times.shared_by(ranks)).finalize()
dist.init_process_group("gloo")
bench = Bench(torch.device("cpu"))
found = host_times.measure(bench, 2, lambda work: {kind: work(kind) for kind in bench.kinds})
print(found.layer["fp32"], found.tensor_host, found.experts_host.seconds(0, groups=6), found.micro_batch)
dist.destroy_process_group()
"""


def test_layers_that_two_ranks_share_and_experts_take_the_host_longer(tmp_path):
    library = {"PYTHONPATH": os.pathsep.join(sys.path)}
    ended = local.wait(local.start([sys.executable, "-c", MEASURE], 2, tmp_path, library))
    for log in (tmp_path / "rank-0.log", tmp_path / "rank-1.log"):
        assert ended.ok, log.read_text()
        layer, shared_layer, experts, micro_batch = map(float, log.read_text().splitlines()[-1].split())
        assert layer > 0 and shared_layer > 0 and experts > layer and micro_batch >= 0
