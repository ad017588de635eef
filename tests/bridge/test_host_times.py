"""The host's work for layers, with two ranks that share them, as GPUs of a node do: here over gloo.

Counted in operations of torch instead of seconds, so that it is the same on any processor and under load.
"""

import os
import sys

import pytest

from megaboa.scheduler import local

pytestmark = pytest.mark.slow

COUNT = """
import torch, torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from megaboa.bridge.process import prepare
from megaboa.bridge.quiet import quietly

with quietly():
    prepare("cpu")
    from megaboa.bridge import host_times
from megaboa.bridge.kernel_times import Bench


class Count(TorchDispatchMode):
    operations = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.operations += 1
        return operation(*args, **(kwargs or {}))


class Counting(Bench):
    def host(self, work, times=20):
        work()  # the first one makes what the others keep
        with Count() as count:
            work()
        return count.operations


for ranks in range(1, 9):  # of a node with so many GPUs
    host_times.provider(host_times.GPU, 6, host_times.shared_by(ranks)).finalize()
dist.init_process_group("gloo")
bench = Counting(torch.device("cpu"))
found = host_times.measure(bench, 2, lambda work: {kind: work(kind) for kind in bench.kinds})
experts = found.experts_host
print(found.layer["fp32"], found.tensor_host, experts.latency, experts.group, found.micro_batch)
dist.destroy_process_group()
"""


def test_layers_that_two_ranks_share_and_experts_take_the_host_longer(tmp_path):
    library = {"PYTHONPATH": os.pathsep.join(sys.path)}
    ended = local.wait(local.start([sys.executable, "-c", COUNT], 2, tmp_path, library))
    for log in (tmp_path / "rank-0.log", tmp_path / "rank-1.log"):
        assert ended.ok, log.read_text()
        layer, shared, experts, expert, micro_batch = map(float, log.read_text().splitlines()[-1].split())
        assert layer > 0 and shared > 0 and experts > expert > 0 and micro_batch > 0
