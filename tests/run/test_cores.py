"""megaboa.run.cores: which processors the ranks of a node's only task are bound to."""

import json
import os
import subprocess
import sys

import pytest
from nvml import stand_in

from megaboa.run import cores

NEAR = "import json; from megaboa.run import cores; print(json.dumps([sorted(s) for s in cores.near_gpus(2, None)]))"


def socket_and_core(processor):
    """Two sockets of four cores with two threads, numbered as Linux does on most machines: second threads last."""
    core = processor % 8
    return core // 4, core % 4, processor


def test_a_rank_gets_whole_cores_and_one_socket():
    assert cores.shares(range(16), 4, [], socket_and_core) == [
        {0, 1, 8, 9},
        {2, 3, 10, 11},
        {4, 5, 12, 13},
        {6, 7, 14, 15},
    ]


def test_processors_that_do_not_divide_are_all_given():
    found = cores.shares([0, 1, 2, 4, 5, 6, 7], 3, [], socket_and_core)
    assert found == [{0, 1}, {2, 4}, {5, 6, 7}]


def test_ranks_are_near_their_gpus_whatever_the_order_of_these():
    first, second = {0, 1, 2, 3, 8, 9, 10, 11}, {4, 5, 6, 7, 12, 13, 14, 15}
    found = cores.shares(range(16), 4, [second, first, second, first], socket_and_core)
    assert found == [{4, 5, 12, 13}, {0, 1, 8, 9}, {6, 7, 14, 15}, {2, 3, 10, 11}]


@pytest.mark.parametrize(
    "near",
    [
        [{0, 1}, {2, 3}, {30}],  # none of the job's is near the last one
        [{0}, {0}, {4, 5}],  # one for two ranks
        [{0, 1, 2}, {2, 3}, {4, 5}],  # sets that overlap would be given twice
        [{0, 1}, {2, 3}],  # of one rank it isn't known
    ],
)
def test_where_gpus_are_no_guide_all_processors_are_divided(near):
    assert cores.shares(range(6), 3, near, socket_and_core) == [{0, 1}, {2, 3}, {4, 5}]


def test_a_task_that_may_run_on_others_than_its_jobs_binds_nobody(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    assert cores.of_ranks(2, 2, {}) == [] == cores.of_ranks(2, 0, {})
    assert [len(some) for some in cores.of_ranks(2, 4, {})] == [2, 2]
    assert cores.of_ranks(1, 4, {}) == [] == cores.of_ranks(8, 4, {})


def test_what_the_driver_says_is_near(tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **stand_in(tmp_path)}
    done = subprocess.run([sys.executable, "-c", NEAR], env=environment, stdout=-1, check=True)
    assert json.loads(done.stdout) == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_this_machines_processors_have_a_place():
    places = {cores.place(one) for one in os.sched_getaffinity(0)}
    assert len(places) == len(os.sched_getaffinity(0))
