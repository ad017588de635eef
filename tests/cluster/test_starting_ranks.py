"""Ways to start ranks that sites want, and the table of runs on the login host."""

from __future__ import annotations

import json
import os
import shutil
import sys

import pytest
from clone import edit
from image import machine
from lab import UID
from site_clone import SHORT

from megaboa.run.health import SECONDS as CHECK_SECONDS

pytestmark = pytest.mark.slow
LATE_SECONDS = CHECK_SECONDS + 10
ONE_TASK = "launch.tasks: node"  # on each node: the default on GPUs


def test_layouts_over_two_hosts_agree(clone):
    config = clone.default_on_two_hosts(["dp1", "dp2", "pp2", "cp2", "moe-dp1", "moe-ep2"])
    clone.before_training(config)
    clone.snakemake("--configfile", config, timeout=1500)
    checks = clone.json("tiny", "report", "checks.json")
    assert checks["state"] == "PASS", checks
    for run in ("dp2", "pp2", "cp2", "moe-ep2"):
        (start,) = clone.starts("tiny", run)
        assert len(start["nodes"]) == 2 and start["job"]


def test_other_ways_to_start_ranks(clone):
    """One task per node, for an import too, a single rank, a wrapper of srun in another place, a preset of the network,
    a health check, on one of whose hosts Python starts late.
    """
    slow = clone.path / "slow-python"
    sleep = f'case "$SLURM_NODEID $*" in "1 "*check_node.py*) sleep {LATE_SECONDS};; esac'
    slow.write_text(f'#!/bin/sh\n{sleep}\nexec {sys.executable} "$@"\n')
    slow.chmod(0o755)
    late = f"launch.python: {slow}, launch.health_check: true"
    wrapper = clone.path / "site-srun"
    wrapper.write_text(f'#!/bin/sh\necho "$@" >> {clone.path}/srun-calls\nexec srun "$@"\n')
    wrapper.chmod(0o755)
    runs = {
        "tasks": f"{SHORT}, resources.nodes: 2, resources.gpus_per_node: 2, {ONE_TASK}",  # and so the import
        "ranks": f"{SHORT}, resources.nodes: 2, resources.gpus_per_node: 2, launch.network: ethernet, {late}",
        "single": f"{SHORT}, launch.srun: {wrapper}, launch.health_check: true",
    }
    config = clone.experiment("ways", runs, save_interval=6)
    edit(clone.path / config, "init: pretrained", "init: pretrained\n    conversion: {tp: 2, nodes: 2}")
    clone.before_training(config, "data")
    clone.snakemake("pretrain", "--configfile", config)
    assert clone.json("ways", "models", "dense", "proof.json")["state"] == "PASS"
    (said,) = clone.path.glob("results/ways/logs/models/dense.import.log.ranks/node-1.log")
    assert "rank 1" not in said.read_text()  # else it has failed
    tasks, ranks, single = (clone.curve("ways", run) for run in runs)
    assert ranks == tasks and len(ranks) == 12
    assert [step for step, *_ in single] == list(range(1, 13))
    logs = sorted(path.name for path in (clone.store("ways", "tasks") / "attempts" / "01").glob("rank-*.log"))
    assert logs == [f"rank-{rank}.log" for rank in range(4)]
    forked = {run: '"keeper"' in (clone.store("ways", run) / "attempts/01/steps.jsonl").read_text() for run in runs}
    assert forked == {"tasks": True, "ranks": False, "single": False}
    for rank in range(4):  # every one of them, not only the last, which writes the steps
        said = (clone.store("ways", "tasks") / "attempts" / "01" / f"rank-{rank}.log").read_text()
        assert "imports for itself" not in said
    calls = (clone.path / "srun-calls").read_text()
    assert "check_node.py" in calls and "train_rank.py" in calls
    (health,) = (clone.store("ways", "single") / "attempts" / "01" / "health").glob("*.json")
    assert json.loads(health.read_text())["ok"]
    (start,) = clone.starts("ways", "ranks")
    assert start["before"]["health_check"] > LATE_SECONDS
    assert not [event for event in clone.ledger("ways", "ranks") if event["event"] == "unhealthy"]


@pytest.mark.skipif(not shutil.which("apptainer"), reason="there is no apptainer (.ci/install_apptainer)")
def test_an_image_is_started_by_apptainer_on_two_hosts(clone, tmp_path):
    """By an ordinary user, one task on each, whose ranks are forked; the losses are those of ranks without an image."""
    machine.require()
    image = clone.path / "debian.sif"
    machine.sif(image, tmp_path / "debian")
    os.chown(image, UID, UID)
    config = clone.experiment(
        "boxed", {"inside": f"{SHORT}, resources.nodes: 2, resources.gpus_per_node: 2, {ONE_TASK}"}, save_interval=6
    )
    with (clone.path / config).open("a") as file:
        file.write(f"image: {{runtime: apptainer, path: {image}, mounts: {machine.MOUNTS}}}\n")
        file.write(f"launch: {{python: {sys.executable}}}\n")
    clone.before_training(config)
    clone.snakemake("pretrain", "--configfile", config)
    assert clone.json("boxed", "image.json")["contract"]["how"] == "apptainer"
    (start,) = clone.starts("boxed", "inside")
    assert len(start["nodes"]) == 2
    assert '"keeper"' in (clone.store("boxed", "inside") / "attempts/01/steps.jsonl").read_text()
    assert clone.curve("boxed", "inside") == clone.curve("ways", "ranks")


def test_the_table_on_the_login_host(clone):
    shown = json.loads(clone.megaboa("status", "ways", "--json"))["ways"]
    assert {run["run"]: run["state"] for run in shown} == {"ranks": "done", "tasks": "done", "single": "done"}
    assert all(run["job"] for run in shown)
