"""`megaboa check-inside` as it runs in an image: Bridge's own checks by the Transformer Engine that is there."""

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
from preflights import write_runs

from megaboa.files import read_json, write_json

pytestmark = pytest.mark.slow

MEGABOA = Path(__file__).parents[2] / "workflow" / "scripts" / "megaboa"
FP8 = {"training": {"precision": "bf16_with_fp8_current_scaling_mixed"}}
CASES = {"plain": {}, "fp8": FP8, "experts": {"model": "moe", **FP8}}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inside")
    write_runs(folder, copy.deepcopy(CASES))
    write_json(folder / "specs" / "runs.json", {"runs": list(CASES), "skip_illegal": False})

    def check(version):
        """Where pip's record says that this version is there: nothing else of it is looked at."""
        packages = folder / f"packages-{version}"
        record = packages / f"transformer_engine-{version}.dist-info"
        record.mkdir(parents=True)
        (record / "METADATA").write_text(f"Name: transformer-engine\nVersion: {version}\n")
        done = subprocess.run(
            [sys.executable, MEGABOA, "check-inside", folder / "specs" / "runs.json", "--out", folder / "out.json"],
            env={**os.environ, "PYTHONPATH": str(packages), "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return read_json(folder / "out.json")["runs"]

    return check


def test_one_that_is_too_old_is_refused_by_bridges_own_check(runs):
    found = runs("1.5")
    assert [found[name]["state"] for name in CASES] == ["PASS", "PASS", "FAIL"]
    (reason,) = found["experts"]["reasons"]
    assert "the image has transformer_engine 1.5" in reason and "transformer-engine>=1.7.0" in reason


def test_with_one_that_is_new_enough_only_the_gpu_stays_open(runs):
    found = runs("2.9.0")
    assert {one["state"] for one in found.values()} == {"PASS"}
    assert "needs a GPU" in found["experts"]["needs_gpu"][0] and "stopped_at" not in found["experts"]
    assert not any("precision" in line for line in found["plain"]["needs_gpu"])
