"""megaboa.run.gpu_watch: links and clocks of GPUs that work, by a library of the driver's C ABI."""

import json
import os
import subprocess
import sys

import pytest
from drivers import nvml_stand_in

from megaboa.run import gpu_watch
from megaboa.run.gpu_watch import Watched

LOOK = """
import dataclasses, json
from megaboa.run import gpu_watch
watch = gpu_watch.Watch({"GPU-0000abc0", "GPU-0000abc1"})
for _ in range(3):
    watch.look()
found = watch.found()
print(json.dumps([[dataclasses.asdict(gpu) for gpu in found], gpu_watch.problems(found)]))
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return nvml_stand_in(tmp_path_factory.mktemp("driver"))


def look(**environment):
    library = os.pathsep.join(sys.path)
    words = [sys.executable, "-c", LOOK]
    done = subprocess.run(words, env={**os.environ, "PYTHONPATH": library, **environment}, stdout=-1, check=True)
    return json.loads(done.stdout)


def test_what_is_measured_of_good_gpus(library):
    measured, problems = look(**library)
    assert problems == []
    assert measured[1] == {
        "index": 1,
        "name": "NVIDIA H200",
        "nvlinks": 18,
        "nvlink_errors": 0,
        "pcie_lanes": 16,
        "most_pcie_lanes": 16,
        "pcie_replays": 70,  # too few to be a problem
        "sm_mhz": 1980,
        "most_sm_mhz": 1980,
        "slowed": {},  # by its power limit alone, as every GPU that has enough to do
    }


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ("NVML_LINK_DOWN", "GPU 1: 17 of its NVLinks are up, and 18 of the other GPUs'"),
        ("NVML_LINK_ERRORS", "GPU 1: 12 NVLink errors while it was tested"),
        ("NVML_NARROW", "GPU 1: 8 of its 16 PCIe lanes are up"),
        ("NVML_REPLAYS", "GPU 1: 140 PCIe replays while it was tested"),
        ("NVML_HOT", "GPU 1: slowed down by heat (hardware) while it was tested"),
    ],
)
def test_what_is_wrong_is_said_of_that_gpu(library, broken, said):
    assert look(**library, **{broken: "1"})[1] == [said]


def test_a_driver_that_cannot_be_asked_says_nothing(library):
    assert look(**library, NVML_NO_DRIVER="1") == [[], []]


def test_what_the_driver_does_not_say_is_no_problem():
    unknown = Watched(0, "NVIDIA T4")
    assert gpu_watch.problems([unknown, Watched(1, "NVIDIA H200", nvlinks=18)]) == []


def test_one_look_may_see_a_clock_on_its_way_up():
    assert gpu_watch.problems([Watched(0, "NVIDIA H200", slowed={"power brake": 1})]) == []
