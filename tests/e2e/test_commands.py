"""Commands as the docs write them: without cores, and a dry run that ends with one screen."""

import os
import subprocess
import sys

import pytest
from clone import planned_in, user_environment

pytestmark = pytest.mark.slow


def snakemake(workspace, *arguments, **more):
    return subprocess.run(
        [sys.executable, "-m", "snakemake", *map(str, arguments)],
        cwd=workspace.path,
        env={**user_environment(), **more},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_a_dry_run_of_twelve_runs_is_one_screen(workspace):
    runs = {f"r{index}": f"{{optimizer.lr: {index}.0e-3}}" for index in range(1, 13)}
    config = workspace.experiment("twelve", runs)
    for profile in ([], ["--profile", "profiles/local"]):
        done = snakemake(workspace, "-n", "--configfile", config, *profile)
        lines = done.stdout.splitlines()
        assert done.returncode == 0 and len(lines) <= 40, done.stdout
        assert "experiment twelve: 12 runs on cpu, in results/twelve/" in lines
        rates = "0.001, 0.002, 0.003, 0.004, 0.005, 0.006, 0.007, 0.008, 0.009, 0.01, 0.011, 0.012"
        assert f"  optimizer.lr: {rates}" in lines
        assert planned_in(done.stdout)["train"] == 12


def test_a_dry_run_of_what_is_wrong_shows_no_screen(workspace):
    config = workspace.experiment("none", {"a": "{}"})
    done = snakemake(workspace, "-n", "no_such_rule", "--configfile", config)
    assert done.returncode == 1 and "no_such_rule" in done.stdout and "jobs to do" not in done.stdout


def test_stages_need_no_cores(workspace):
    config = workspace.experiment("stages", {"a": "{}"})
    for stage in ("data", "preflight"):
        done = snakemake(workspace, stage, "--configfile", config)
        assert done.returncode == 0, done.stdout
        if stage == "data":
            assert f"Provided cores: {len(os.sched_getaffinity(0))}" in done.stdout
    assert workspace.json("stages", "preflight.json")["runs"]["a"]["state"] == "PASS"


def test_braces_in_a_call_are_text(workspace):
    config = workspace.experiment("braces", {"a": "{}"}, more="export: {runs: all}\n")
    command = 'evaluate={command: "wc -c < {model}/model.safetensors > {out}"}'
    done = snakemake(workspace, "bundle", "-n", "--configfile", config, "--config", command, "store=st{ore}")
    assert done.returncode == 0, done.stdout
    assert planned_in(done.stdout)["report"] == planned_in(done.stdout)["evaluate_model"] == 1
