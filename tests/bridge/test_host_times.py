"""The host's times of layers, with two ranks that share them, as GPUs of a node do: here over gloo."""

import os
import socket
import subprocess
import sys

import pytest

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


def test_layers_that_two_ranks_share_and_experts_take_the_host_longer():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"PYTHONPATH": os.pathsep.join(sys.path), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", MEASURE],
            env={**os.environ, **shared, "WORLD_SIZE": "2", "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for output, errors in [rank.communicate(timeout=300) for rank in ranks]:
        assert output, errors
        layer, shared_layer, experts, micro_batch = map(float, output.split())
        assert layer > 0 and shared_layer > 0 and experts > layer and micro_batch >= 0
