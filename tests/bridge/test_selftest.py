"""The entrypoint's own test, here, where nothing of a GPU is."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megaboa.bridge import selftest
from megaboa.files import read_json
from megaboa.image import pins

ENTRYPOINT = Path(__file__).parents[2] / "workflow/scripts/train_rank.py"


def test_versions_are_held_against_the_pins():
    found = {"Torch": "2.13.0+cu130", "megatron_core": "0.19.1"}
    wanted = {"torch": "2.13.0", "megatron-core": "0.19.2", "deep-ep": "1"}
    assert selftest.differences(found, wanted) == [
        ("megatron-core", "0.19.1", "0.19.2"),
        ("deep-ep", None, "1"),
    ]


def test_what_is_missing_says_what_it_disables():
    def told(device, installed, programs=()):
        return {
            one["what"]: one["disables"] for one in selftest.missing(device, installed.__contains__, dict(programs).get)
        }

    every = set(selftest.OPTIONAL)
    assert told("cuda", every, {"nsys": "/nsys"}) == told("cpu", every) == {}
    assert "fp8" in told("cuda", every - {"transformer_engine"})["transformer_engine"]
    assert told("cuda", every)["nsys"] == "profile.tool: nsys"
    assert "transformer_engine" not in told("cpu", {"wandb"})


def self_test(*arguments):
    return subprocess.run([sys.executable, ENTRYPOINT, "--self-test", *arguments], capture_output=True, text=True)


@pytest.mark.slow
def test_the_entrypoint_examines_this_environment(tmp_path):
    done = self_test("--device=cpu", "--strict", f"--out={tmp_path}/report.json")
    assert done.returncode == 0, done.stderr
    report = read_json(tmp_path / "report.json")
    assert report["state"] == "PASS" and report["other_than_pinned"] == []
    assert report["imports"] == list(selftest.REQUIRED)
    for package, version in pins.packages("cpu").items():
        assert report["packages"][package] == version
    assert report["gpu"]["cuda"].startswith("13.") and report["gpu"]["nccl"]  # torch's own, unused here
    assert Path(report["bridge"]).name == "bridge"


@pytest.mark.slow
def test_what_is_asked_of_gpus_and_is_not_here():
    done = self_test("--device=cuda", "--strict")
    report = json.loads(done.stdout)
    assert done.returncode == 1 and report["state"] == "FAIL"
    assert any("transformer-engine is not installed, and 2.17.1 is pinned" in line for line in report["problems"])
    missing = {one["what"] for one in report["missing"]}
    assert {"transformer_engine", "deep_ep"} <= missing
    assert ("nsys" in missing) == (shutil.which("nsys") is None)  # the one of these that a CPU may well have
