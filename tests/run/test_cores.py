"""megaboa.run.cores: which processors the ranks of a node's only task are bound to."""

import json
import os
import subprocess
import sys

import pytest
from drivers import nvml_stand_in

from megaboa.run import cores


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


def test_cores_are_not_cut_and_all_are_given():
    assert cores.shares(range(16), 3, [], socket_and_core) == [
        {0, 1, 8, 9},
        {2, 3, 4, 10, 11, 12},
        {5, 6, 7, 13, 14, 15},
    ]


def test_more_ranks_than_cores_share_them_by_threads():
    assert cores.shares([0, 8, 1, 9], 4, [], socket_and_core) == [{0}, {8}, {1}, {9}]


FIRST, SECOND = {0, 1, 2, 3, 8, 9, 10, 11}, {4, 5, 6, 7, 12, 13, 14, 15}


@pytest.mark.parametrize(
    ("near", "found"),
    [
        ([SECOND, FIRST, SECOND, FIRST], [{4, 5, 12, 13}, {0, 1, 8, 9}, {6, 7, 14, 15}, {2, 3, 10, 11}]),
        # One must be far.
        ([FIRST, FIRST, FIRST, SECOND], [{0, 1, 8, 9}, {2, 3, 10, 11}, {4, 5, 12, 13}, {6, 7, 14, 15}]),
        # Sets that are narrower than the shares, as where GPUs are near some NUMA nodes of a socket only.
        ([{4}, {4}, {0}, {0}], [{4, 5, 12, 13}, {6, 7, 14, 15}, {0, 1, 8, 9}, {2, 3, 10, 11}]),
        ([SECOND, FIRST], [{0, 1, 8, 9}, {2, 3, 10, 11}, {4, 5, 12, 13}, {6, 7, 14, 15}]),  # of some it isn't known
    ],
)
def test_a_rank_gets_the_share_nearest_to_its_gpu(near, found):
    assert [sorted(some) for some in cores.shares(range(16), 4, near, socket_and_core)] == list(map(sorted, found))


def test_a_task_that_may_run_on_others_than_its_jobs_binds_nobody(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    assert cores.of_ranks(2, 2, {}) == [] == cores.of_ranks(2, 0, {})
    assert [len(some) for some in cores.of_ranks(2, 4, {})] == [2, 2]
    assert cores.of_ranks(1, 4, {}) == [] == cores.of_ranks(8, 4, {})


@pytest.mark.parametrize(
    ("shown", "near"),
    [({}, [[0, 2, 4, 6], [1, 3, 5, 7]]), ({"CUDA_VISIBLE_DEVICES": "1,0"}, [[1, 3, 5, 7], [0, 2, 4, 6]])],
)
def test_what_the_driver_says_is_near(tmp_path, shown, near):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **nvml_stand_in(tmp_path), **shown}
    done = subprocess.run([sys.executable, "-m", "megaboa.run.cores"], env=environment, stdout=-1, check=True)
    assert json.loads(done.stdout) == near


def test_this_machines_processors_have_a_place():
    places = {cores.place(one) for one in os.sched_getaffinity(0)}
    assert len(places) == len(os.sched_getaffinity(0))
